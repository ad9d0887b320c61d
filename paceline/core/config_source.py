"""Loading of a config from flags and a TOML file.

A TOML file holds keys for all services at its top, and keys for one service in a table with the service's name:

    redis = "redis://redis:6379/0"
    model = "/models/smollm2-135m-instruct"
    [decode]
    max-seqs = 128

A flag takes precedence over the service's table, the table over the top, and the top over the default.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.config import GatewayConfig, KVTransferConfig, ServeConfig, ServiceConfig, WorkerConfig, has_pools
from paceline.core.errors import ConfigError
from paceline.core.options import Options, flag

Config = TypeVar("Config", bound="ServiceConfig | ServeConfig")

_TIER = "it is --kv-memory now, and what was --kv-memory is --kv-pool-memory"
_STORE = "it is --store now, because files and batches are kept there, too"
RENAMED: dict[type[Options], dict[str, str]] = {
    ServeConfig: {"kv_tier_memory": _TIER, "response_store": _STORE},
    GatewayConfig: {
        "response_store": _STORE,
        "response_store_entries": "it is --stored-responses now",
        "response_store_size": "it is --stored-responses-size now",
        "response_store_seconds": "it is --stored-responses-seconds now",
    },
    KVTransferConfig: {"kv_tier_memory": _TIER},
    WorkerConfig: {"kv_memory": "the size of a worker's own pool is --kv-pool-memory now"},
}
"""For each service, its options of earlier releases by name, each with a hint that names the present option."""


def load_config(cls: type[Config], table: str, file: Path | None, flags: Mapping[str, Any]) -> Config:
    """Return a config from flags and a TOML file.

    Args:
        table: name of the service's table in the file.
        flags: values of the flags that the user gave, by field name.

    Raises ConfigError.
    """
    shared, section = ({}, {}) if file is None else _read_toml(table, file)
    renamed = RENAMED.get(cls, {})
    for name in (*section, *flags):
        if name in renamed:
            raise ConfigError(f"there is no option {flag(name)}: {renamed[name]}")
    if unknown := section.keys() - cls.model_fields.keys():
        key = min(unknown).replace("_", "-")
        raise ConfigError(f"{file}: [{table}] has no option {key!r}; see paceline {table} --help")
    known = {name: value for name, value in shared.items() if name in cls.model_fields}
    config = cls(**{**known, **section, **flags})
    # Earlier releases took a pool's size from the key kv-memory at the top, which is the shared memory's size now.
    old_pool = "kv_memory" in shared and "kv_pool_memory" not in config.model_fields_set
    if old_pool and isinstance(config, WorkerConfig) and has_pools(config):
        raise ConfigError(f"{file}: give kv-pool-memory, too; kv-memory is only the size of the shared memory now")
    return config


def _read_toml(table: str, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values at the top of a file and the values of a table, by field name."""
    try:
        document = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    section = document.get(table, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: {table} must be a table of options, [{table}]")
    shared = {key: value for key, value in document.items() if not isinstance(value, dict)}
    return _as_names(shared), _as_names(section)


def _as_names(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in values.items()}
