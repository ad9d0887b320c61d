"""The TOML file that all services of a stack read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.config import ServeConfig
from paceline.models.hub_name import parse_hub_name

_GATEWAY = (
    "host",
    "port",
    "uds",
    "root_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "api_key",
    "admin_key",
    "api_keys_file",
    "classes_file",
    "record_trace",
    "record_trace_size",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "store",
    "limit_mm_per_prompt",
    "mm_processor_kwargs",
    "allowed_media_domains",
    "allow_private_media",
    "allowed_local_media_path",
    "vllm_metric_names",
)
"""Options of `serve` that only the gateway has."""
_SERVE = ("prefill", "decode", "encode", "planner", "cache_dir", "revision")
"""Options of `serve` that no service has."""


def stack_settings(config: ServeConfig, model: Path, redis: str, cluster: str, secret: Path) -> str:
    """Return the file's text: every option of `config` under the name that it has in the services.

    Args:
        model: the folder that `config.model` was resolved to.
        redis: URL of Redis.
        secret: the file with the secret that the services share.
    """
    options = config.model_dump()
    shared = {name: value for name, value in options.items() if name not in (*_GATEWAY, *_SERVE)}
    shared |= {"model": str(model), "served_model_name": served_name(config), "redis": redis, "cluster": cluster}
    shared["auth_token_file"] = str(secret)
    shared["packed_dir"] = str(Path(config.cache_dir).expanduser().absolute() / "packed")
    gateway = {name: options[name] for name in _GATEWAY}
    gateway["store"] = config.store or str(Path(config.cache_dir).expanduser().absolute() / "store.db")
    return f"{_lines(shared)}\n[gateway]\n{_lines(gateway)}\n[kvtransfer]\nport = 0\n"


def served_name(config: ServeConfig) -> str:
    """Return the name of the model in the API: by default the name on the hub, or the name of the folder or file."""
    if config.served_model_name:
        return config.served_model_name
    hub = parse_hub_name(config.model)
    return hub.repository if hub and not hub.gguf else Path(config.model).resolve().name.removesuffix(".gguf")


def _lines(values: Mapping[str, Any]) -> str:
    # A JSON scalar is a TOML scalar, unless characters are escaped into surrogates.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
