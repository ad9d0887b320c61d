"""The file of --models-file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import GatewayConfig, ServeConfig, model_configs, own_options
from paceline.core.errors import ConfigError

TWO = '["org/a"]\nmodel = "/a"\n[b]\nmodel = "/b"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.toml"


def test_one_model_needs_no_file() -> None:
    for config in (GatewayConfig(model="/a"), ServeConfig()):
        assert model_configs(config) == [config]


def test_a_table_overrides_what_holds_for_all(file: Path) -> None:
    file.write_text('[a]\nmodel = "/a"\nmax-logprobs = 3\n[b]\nmodel = "/b"\ncluster = "mine"\n')
    a, b = model_configs(GatewayConfig(models_file=str(file), cluster="c", port=9, max_logprobs=7))
    assert (a.served_model_name, a.model, a.cluster, a.max_logprobs, a.port) == ("a", "/a", "c-a", 3, 9)
    assert (b.served_model_name, b.model, b.cluster, b.max_logprobs, b.port) == ("b", "/b", "mine", 7, 9)


def test_each_fleet_has_its_sizes_and_its_planner(file: Path) -> None:
    file.write_text('[a]\nmodel = "x"\nkv-memory = "1GiB"\nplanner = true\nbudget = 4\n[b]\nmodel = "y"\ndecode = 3\n')
    a, b = model_configs(ServeConfig(models_file=str(file), prefill=2))
    assert (a.planner, a.budget, a.kv_memory, a.prefill, a.decode) == (True, 4, "1GiB", 2, 1)
    assert (b.planner, b.budget, b.kv_memory, b.prefill, b.decode) == (False, 0, "auto", 2, 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no model"),
        ("model = 'a'", "must be the heading of a model's table"),
        ("[a", "not valid TOML"),
        ("[a]\nmax-logprobs = 1", "needs a model"),
        ('[a]\nmodel = "x"\nport = 1', "--port holds for all models"),
        ('[a]\nmodel = "x"\nmodels-file = "y"', "--models-file holds for all models"),
        ('[a]\nmodel = "x"\nfoo = 1', "there is no such option"),
        ('[a]\nmodel = "x"\nmax-logprobs = -2', r"\[a\] --max-logprobs must be at least -1"),
        ('[a]\nmodel = "x"\nmax-logprobs = 1\nmax_logprobs = 2', "has an option twice"),
        ('[" a"]\nmodel = "x"', "visible characters"),
        ('[a]\nmodel = "x"\ncluster = "c"\n[b]\nmodel = "y"\ncluster = "c"', "two models have --cluster c"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_reason(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        model_configs(GatewayConfig(models_file=str(file)))


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (ServeConfig, {"served_model_name": "a"}, "--served-model-name and --models-file exclude each other"),
        (GatewayConfig, {"record_trace": "t.jsonl"}, "two models have --record-trace t.jsonl"),
        (ServeConfig, {"record": "r.jsonl", "planner": True}, "two models have --record r.jsonl"),
    ],
)
def test_what_only_one_model_can_have_is_in_its_table(
    file: Path, config: type[Any], options: dict[str, Any], told: str
) -> None:
    file.write_text(TWO)
    with pytest.raises(ConfigError, match=told):
        model_configs(config(models_file=str(file), **options))


def test_a_model_of_a_shared_file_is_for_other_services(file: Path) -> None:
    file.write_text(TWO)
    config = GatewayConfig(models_file=str(file), model="/of-the-workers")
    assert [each.model for each in model_configs(config)] == ["/a", "/b"]


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        model_configs(ServeConfig(models_file="/nowhere.toml"))


def test_what_clients_see_of_the_server_is_one_for_all() -> None:
    shared = {"port", "host", "api_key", "store", "ssl_certfile", "max_body_bytes", "redis", "media_memory"}
    assert not shared & {*own_options(GatewayConfig), *own_options(ServeConfig)}
