"""The options of each model that one gateway serves, and the file that names the models:

["org/small"]
model = "/models/small"
decode = 2

[large]
model = "/models/large"
most_decode = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.serve import ServeConfig
from paceline.core.errors import ConfigError
from paceline.core.options import flag, group_of

Config = TypeVar("Config", GatewayConfig, ServeConfig)

_GROUPS = ("model", "fleet", "planner")
"""Groups of options that a model's table may have."""
_ALSO = {
    "cluster",
    "limit_mm_per_prompt",
    "local_prefill_tokens",
    "max_logprobs",
    "max_text_characters",
    "max_waiting",
    "mm_processor_kwargs",
    "queue_seconds",
    "record_trace",
    "record_trace_size",
    "router_mode",
    "supervisor_socket",
}
_NOT = {"models_file", "served_model_name"}
_APART = ("cluster", "record", "record_trace", "supervisor_socket")
"""Options that no two models may share: two fleets would mix in one cluster, and two writers in one file."""
_NAME_CHARACTERS = 256
"""Largest length of a model's name."""
_ADVICE = "docs/operations/models.md shows how to write it"


def own_options(service: type[GatewayConfig] | type[ServeConfig]) -> list[str]:
    """Return the names of the options that a model's table may set. All other options apply to all models."""
    names = service.model_fields
    return [name for name in names if name not in _NOT and (name in _ALSO or group_of(service, name) in _GROUPS)]


def model_configs(config: Config) -> list[Config]:
    """Return one config for each model: the options of `config`, overridden by those of the model's table.

    Without --models-file there is one model, whose config is `config`. With --models-file, `model` of `config` is
    ignored, because it is meant for other services that share a TOML file with this one. If the table of a gateway's
    model names no cluster, its cluster's name is made of the cluster of `config`, a hyphen, and the model's name.

    Raises ConfigError if the file cannot be read or is not valid.
    """
    if not config.models_file:
        return [config]
    if config.served_model_name:
        raise ConfigError("--served-model-name and --models-file exclude each other: the file names the models")
    where = f"--models-file {config.models_file}"
    try:
        tables = tomllib.loads(Path(config.models_file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}; {_ADVICE}") from None
    if not tables:
        raise ConfigError(f"{where} names no model; {_ADVICE}")
    configs = [_model_config(config, where, name, table) for name, table in tables.items()]
    _check_apart(configs, where)
    return configs


def _model_config(config: Config, where: str, name: str, table: object) -> Config:
    if not isinstance(table, dict):
        raise ConfigError(f'{where}: {name} must be the heading of a model\'s table, ["{name}"]; {_ADVICE}')
    if not (0 < len(name) <= _NAME_CHARACTERS and name.isprintable() and name == name.strip()):
        raise ConfigError(
            f"{where}: a model's name has 1 to {_NAME_CHARACTERS} visible characters, unlike {name!r:.80}"
        )
    overrides: dict[str, Any] = {key.replace("-", "_"): value for key, value in table.items()}
    if len(overrides) < len(table):
        raise ConfigError(f"{where}: [{name}] has an option twice, once with - and once with _; remove one of them")
    allowed = own_options(type(config))
    if unknown := sorted(overrides.keys() - set(allowed)):
        known = flag(unknown[0]) if unknown[0] in type(config).model_fields else ""
        reason = f"{known} holds for all models" if known else "there is no such option"
        raise ConfigError(f"{where}: [{name}] cannot have {unknown[0]!r}: {reason}")
    if not overrides.get("model"):
        raise ConfigError(f"{where}: [{name}] needs a model, such as model = 'org/name'")
    if isinstance(config, GatewayConfig):
        overrides = {"cluster": f"{config.cluster}-{name}", **overrides}
    values = {field: getattr(config, field) for field in config.model_fields_set}
    try:
        return type(config)(**{**values, **overrides, "served_model_name": name, "models_file": ""})
    except ConfigError as error:
        raise ConfigError(f"{where}: [{name}] {error}") from None


def _check_apart(configs: Sequence[GatewayConfig] | Sequence[ServeConfig], where: str) -> None:
    """Raise ConfigError if two models have the same value of an option in `_APART`."""
    for option in _APART:
        values = [value for config in configs if (value := getattr(config, option, ""))]
        if shared := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"{where}: two models have {flag(option)} {shared}; give each its own in its table")
