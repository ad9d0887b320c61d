"""The TOML files that the services of a stack read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.config import GatewayConfig, ServeConfig, own_options
from paceline.models.gguf.parts import gguf_stem
from paceline.models.sources.hub_name import parse_hub_name

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
    "share_cache",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allow_credentials",
    "store",
    "allowed_media_domains",
    "allow_private_media",
    "allowed_local_media_path",
    "vllm_metric_names",
)
"""Options of `serve` that only the gateway has, and that apply to all models."""
_MODEL = tuple(name for name in own_options(GatewayConfig) if name in ServeConfig.model_fields and name != "model")
"""Options of `serve` that the gateway has for each model."""
_SERVE = (
    *("prefill", "decode", "encode", "pool", "planner"),
    *("cache_dir", "cache_size", "mmproj", "revision", "models_file"),
)
"""Options of `serve` that no service of a fleet has."""
_SERVICE = ("log_level", "log_format", "drain_seconds")
"""Options of `serve` that each service has."""


def fleet_settings(
    config: ServeConfig,
    model: Path,
    redis: str,
    cluster: str,
    secret: Path,
    is_encoder: bool = False,
    turns_file: str = "",
) -> str:
    """Return the text of the file for the services of one model, except the gateway.

    It has every option of `config` under the name that it has in these services.

    Args:
        model: the folder that `config.model` was resolved to.
        redis: URL of Redis.
        secret: the file with the secret that the services share.
        is_encoder: whether the model has pool workers, which have other defaults.
        turns_file: the file by which workers of several models take turns; "" if there is one model.
    """
    shared = {"convert", "pooler_config", "enable_lora", "lora_modules"}
    left_out = {*_GATEWAY, *_MODEL, *_SERVE, "served_model_name"} - shared
    options = {name: value for name, value in config.model_dump().items() if name not in left_out}
    options |= {"model": str(model), "redis": redis, "cluster": cluster, "auth_token_file": str(secret)}
    if is_encoder:
        own_defaults = {"max_seqs", "max_batched_tokens"} - config.model_fields_set
        options = {name: value for name, value in options.items() if name not in own_defaults}
    if turns_file:
        options["turns_file"] = turns_file
    options["packed_dir"] = str(cache_folder(config) / "packed")
    # The planner reads the objectives of the classes.
    planner = {"classes_file": config.classes_file}
    return f"{_lines(options)}\n[kvtransfer]\nport = 0\n\n[planner]\n{_lines(planner)}"


def gateway_settings(config: ServeConfig, models: Path, redis: str, secret: Path) -> str:
    """Return the text of the gateway's file. `models` is the path of the file that has the text of `models_file`."""
    options = {name: getattr(config, name) for name in (*_GATEWAY, *_SERVICE)}
    options["store"] = config.store or str(cache_folder(config) / "store.db")
    options |= {"models_file": str(models), "redis": redis, "auth_token_file": str(secret)}
    return _lines(options)


def models_file(fleets: Iterable[tuple[ServeConfig, Path, str, Path]]) -> str:
    """Return the text of the gateway's file of models.

    Args:
        fleets: for each model its options, the folder that `config.model` was resolved to, the cluster, and the socket
            where the fleet is scaled.
    """
    tables = []
    for config, model, cluster, socket in fleets:
        options = {name: getattr(config, name) for name in _MODEL}
        options |= {"model": str(model), "cluster": cluster, "supervisor_socket": str(socket)}
        tables.append(f"[{json.dumps(served_name(config), ensure_ascii=False)}]\n{_lines(options)}")
    return "\n".join(tables)


def served_name(config: ServeConfig) -> str:
    """Return the name of the model in the API: by default the name on the hub, or the name of the folder or file.

    For a symbolic link, this is the link's own name, which stays the same when the link points to a newer model.
    """
    if config.served_model_name:
        return config.served_model_name
    hub = parse_hub_name(config.model)
    return hub.repository if hub and not hub.gguf else gguf_stem(Path(os.path.abspath(config.model)).name)


def cache_folder(config: ServeConfig) -> Path:
    """Return the absolute path of --cache-dir, the folder for converted models and other made files."""
    return Path(config.cache_dir).expanduser().absolute()


def _lines(values: Mapping[str, Any]) -> str:
    # A JSON scalar is also a TOML scalar, unless characters are escaped as surrogates.
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
