"""Every service reads the options of `paceline serve` from one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.config import (
    GatewayConfig,
    KVTransferConfig,
    PlannerConfig,
    ServeConfig,
    WorkerConfig,
    model_configs,
)
from paceline.core.config_source import Config, load_config
from paceline.services.serve.settings import fleet_settings, gateway_settings, models_file, served_name

CONFIG = ServeConfig(
    model='/models/ä "quoted" 🚲',
    max_seqs=7,
    max_model_len=100,
    drain_seconds=3,
    kv_memory="1GiB",
    cache_policy="arc",
    host="0.0.0.0",
    port=9000,
    api_key='a"b\\c',
    prefill=3,
    cache_dir="/cache",
)


MODEL, SECRET, SOCKET = Path("/cache/ä 🚲"), Path("/run/secret"), Path("/run/scale.sock")
REDIS = "unix:///redis.sock"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(fleet_settings(CONFIG, MODEL, REDIS, "c1", SECRET))
    return path


@pytest.fixture
def gateway_file(tmp_path: Path) -> Path:
    models, path = tmp_path / "models.toml", tmp_path / "gateway.toml"
    second = ServeConfig(model="/models/b", max_logprobs=5)
    models.write_text(models_file([(CONFIG, MODEL, "c1", SOCKET), (second, Path("/b"), "c2", Path("/run/2.sock"))]))
    path.write_text(gateway_settings(CONFIG, models, REDIS, SECRET))
    return path


def read(cls: type[Config], table: str, file: Path) -> Config:
    return load_config(cls, table, file, {})


def test_gateway(gateway_file: Path) -> None:
    config = read(GatewayConfig, "gateway", gateway_file)
    assert (config.host, config.port, config.api_key) == ("0.0.0.0", 9000, 'a"b\\c')
    assert (config.redis, config.drain_seconds) == (REDIS, 3.0)
    assert config.store == "/cache/store.db"


def test_models_of_the_gateway(gateway_file: Path) -> None:
    first, second = model_configs(read(GatewayConfig, "gateway", gateway_file))
    assert (first.model, first.served_model_name) == (str(MODEL), 'ä "quoted" 🚲')
    assert (first.cluster, first.supervisor_socket, first.max_logprobs) == ("c1", str(SOCKET), 20)
    assert (second.served_model_name, second.cluster, second.max_logprobs) == ("b", "c2", 5)
    assert first.port == second.port == 9000


def test_the_planner_knows_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    config = ServeConfig(classes_file="/classes.toml", most_decode=3)
    path.write_text(fleet_settings(config, MODEL, REDIS, "c1", SECRET))
    planner = read(PlannerConfig, "planner", path)
    assert (planner.classes_file, planner.most_decode, planner.cluster) == ("/classes.toml", 3, "c1")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_listen_on_a_free_port_of_this_machine_only(file: Path, role: str) -> None:
    config = read(WorkerConfig, role, file)
    assert (config.host, config.port) == ("127.0.0.1", 0)
    assert (config.model, config.max_seqs, config.max_model_len) == ("/cache/ä 🚲", 7, 100)
    assert config.packed_dir == "/cache/packed"


def test_kvtransfer(file: Path) -> None:
    config = read(KVTransferConfig, "kvtransfer", file)
    assert (config.host, config.port, config.kv_memory) == ("127.0.0.1", 0, "1GiB")
    assert config.cache_policy == "arc"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ServeConfig(model="gemma-3-270m"), "gemma-3-270m"),
        (ServeConfig(model="/models/llama/"), "llama"),
        (ServeConfig(model="some/file.gguf"), "file"),
        (ServeConfig(model="some/file-00001-of-00003.gguf"), "file"),
        (ServeConfig(model="/models/llama", served_model_name="mine"), "mine"),
        (ServeConfig(model="org/name"), "org/name"),
        (ServeConfig(model="org/name/sub/file.gguf"), "file"),
    ],
)
def test_clients_call_the_model_by_its_last_name(config: ServeConfig, name: str) -> None:
    assert served_name(config) == name


def test_a_link_keeps_its_name_wherever_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(version)
        assert served_name(ServeConfig(model=str(tmp_path / "current"))) == "current"
        monkeypatch.chdir(tmp_path / version)
        assert served_name(ServeConfig(model=".")) == version
        assert served_name(ServeConfig(model="../current")) == "current"


@pytest.mark.parametrize(
    ("cls", "table"), [(GatewayConfig, "gateway"), (WorkerConfig, "decode"), (KVTransferConfig, "kvtransfer")]
)
def test_all_know_where_their_common_secret_is(file: Path, gateway_file: Path, cls: type[Config], table: str) -> None:
    own = gateway_file if cls is GatewayConfig else file
    assert read(cls, table, own).auth_token_file == str(SECRET)
