"""The files with which docker compose serves a second model. No docker is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.parser import build_parser
from paceline.cli.services import SERVICES
from paceline.core.config import GatewayConfig, KVTransferConfig, WorkerConfig, model_configs
from paceline.core.config_source import load_config

COMPOSE = Path(__file__).parents[1] / "compose"
FIRST, SECOND = (yaml.safe_load((COMPOSE / name).read_text())["services"] for name in ("compose.yaml", "second.yaml"))


def command_of(service: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a service, whose variables have their defaults."""
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
    return vars(build_parser().parse_args(words))


def config_of(service: dict[str, Any]) -> Any:
    given = command_of(service)
    given.pop("config")
    name = given.pop("command")
    if given.get("models_file") == "/etc/models.toml":
        given["models_file"] = str(COMPOSE / "models.toml")
    return load_config(SERVICES[name].config, name, COMPOSE / "paceline.toml", given)


def test_the_gateway_knows_the_fleets_of_both_models() -> None:
    gateway = config_of(SECOND["gateway"])
    assert isinstance(gateway, GatewayConfig)
    first, second = model_configs(gateway)
    for model, prefix in ((first, ""), (second, "second-")):
        prepared = command_of(FIRST[f"{prefix}model"])
        assert (model.served_model_name, model.model) == (prepared["model"], str(prepared["link"]))
        for role in ("prefill", "decode"):
            worker = config_of(FIRST[prefix + role])
            assert isinstance(worker, WorkerConfig)
            assert (worker.model, worker.cluster) == (model.model, model.cluster)
            assert worker.kvtransfer_address == f"{prefix}kvtransfer:{worker.port}"
        host = config_of(FIRST[f"{prefix}kvtransfer"])
        assert isinstance(host, KVTransferConfig)
        assert host.cluster == model.cluster
    hosts = [config_of(each).host_id for each in (FIRST["kvtransfer"], FIRST["second-kvtransfer"])]
    assert len(set(hosts)) == 2


@pytest.mark.parametrize("role", ["model", "kvtransfer", "prefill", "decode"])
def test_a_service_of_the_second_model_differs_from_that_of_the_first_in_its_command(role: str) -> None:
    second, own = FIRST[f"second-{role}"], {"command", "depends_on", "profiles"}
    assert {key: value for key, value in second.items() if key not in own} == {
        key: value for key, value in FIRST[role].items() if key not in own
    }
    assert second["profiles"] == ["second"]
    assert {*second["depends_on"]} <= FIRST.keys()
