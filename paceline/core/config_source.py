"""From files and flags to a config.

A TOML file may hold keys for all services at its top and keys for one service in a table of its name:

    redis = "redis://redis:6379/0"
    model = "/models/smollm2-135m-instruct"
    [decode]
    max-seqs = 128

Order of precedence: flag, table of the service, top of the file, default.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.config import ServeConfig, ServiceConfig, WorkerConfig
from paceline.core.errors import ConfigError

Config = TypeVar("Config", bound="ServiceConfig | ServeConfig")


def load_config(cls: type[Config], table: str, file: Path | None, flags: Mapping[str, Any]) -> Config:
    """Merges a TOML file and flags into a config.

    Args:
        table: the service's table in the file.
        flags: field names to values; only flags that the user gave.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values = _read_toml(cls, table, file)
    try:
        config = cls(**{**values, **flags})
    except TypeError as error:
        raise ConfigError(str(error)) from error
    check_numbers(config)
    return config


def check_numbers(config: ServiceConfig | ServeConfig) -> None:
    """Raises ConfigError for numbers that no service could work with."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least, most = field.metadata["range"]
        if isinstance(value, (int, float)) and not least <= value <= most:
            flag = "--" + field.name.replace("_", "-")
            wanted = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise ConfigError(f"{flag} must be {wanted}, not {value:g}")
    if isinstance(config, (WorkerConfig, ServeConfig)) and config.max_batched_tokens < config.max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {config.max_batched_tokens} is less than --max-seqs {config.max_seqs}: "
            "a step has to give every running request a token; raise the first or lower the second"
        )


def _read_toml(cls: type[Config], table: str, file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    own = document.get(table, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{file}: {table} must be a table of options, [{table}]")
    values: dict[str, Any] = {}
    for source, must_know in ((shared, False), (own, True)):
        for key, value in source.items():
            name = key.replace("-", "_")
            if name not in types:
                if must_know:
                    raise ConfigError(f"{file}: [{table}] has no option {key!r}; see paceline {table} --help")
                continue
            wanted = types[name]
            if wanted is float and type(value) is int:
                value = float(value)
            if type(value) is not wanted:
                raise ConfigError(f"{file}: {key} must be of type {wanted.__name__}, not {type(value).__name__}")
            values[name] = value
    return values
