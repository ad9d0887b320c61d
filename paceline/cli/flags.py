"""The fields of a config as flags of the command line."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from pydantic import BeforeValidator

from paceline.core.config_source import RENAMED
from paceline.core.options import Options, flag, group_of

_GROUPS = ("model", "fleet", "planner", "compute", "memory", "store", "media", "limits", "network", "cluster", "logs")
"""The groups of options in the order in which a help text shows them."""

_METAVARS = {
    "advertise": "HOST",
    "allowed_local_media_path": "FOLDER",
    "allowed_headers": "NAMES",
    "allowed_media_domains": "NAMES",
    "allowed_methods": "NAMES",
    "allowed_origins": "ORIGINS",
    "api_keys_file": "FILE",
    "auth_token_file": "FILE",
    "cluster_ca_certs": "FILE",
    "cluster_cert_name": "NAME",
    "cluster_certfile": "FILE",
    "cluster_keyfile": "FILE",
    "chat_template": "FILE",
    "classes_file": "FILE",
    "limit_mm_per_prompt": "JSON",
    "lora_modules": "NAME=FOLDER",
    "lora_target_modules": "NAMES",
    "mm_processor_kwargs": "JSON",
    "models_file": "FILE",
    "record_trace": "FILE",
    "root_path": "PATH",
    "shared_prompts": "FILE",
    "ssl_ca_certs": "FILE",
    "ssl_cert_reqs": "0|1|2",
    "ssl_certfile": "FILE",
    "ssl_keyfile": "FILE",
    "uds": "PATH",
    "store": "FILE|URL|none",
    "kvtransfer_address": "ADDRESS",
    "port": "PORT",
    "record": "FILE",
    "replay": "FILE",
    "docker_socket": "PATH",
    "compose_prefix": "TEXT",
    "compose_project": "NAME",
    "redis": "URL",
    "redis_password_file": "FILE",
    "speculative_config": "JSON",
}
"""Placeholders of values in help texts, by field. Other fields of text have the last word of their names."""

SHORT_FLAGS = {"speculative_config": ("-sc",)}
"""Short names that a flag has in addition to its long one, by field."""

HIDDEN_OPTIONS = {"ready_fd", "supervisor_socket"}
"""Fields whose flags only `paceline serve` gives, to the services that it starts. No help text shows them."""


def add_options(parser: argparse.ArgumentParser, config: type[Options], names: Iterable[str]) -> None:
    """Add fields of a config to a parser as flags, in groups. The field `model` becomes the argument MODEL."""
    hints = typing.get_type_hints(config)
    groups: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: _GROUPS.index(group_of(config, name))):
        title = group_of(config, name)
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        if name == "model":
            help = help_of(config, name)
            group.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=help)
            continue
        # Suppress defaults, because only flags that are given override the file.
        group.add_argument(
            flag(name),
            *SHORT_FLAGS.get(name, ()),
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS if name in HIDDEN_OPTIONS else help_of(config, name),
            **_kind(config, name, hints[name]),
        )
    for name in RENAMED.get(config, {}):
        parser.add_argument(flag(name), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _kind(config: type[Options], name: str, hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint), "type": partial(_choice, config, name)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    fallback = "N" if hint is int else name.split("_")[-1].upper()
    return {"type": hint, "metavar": _METAVARS.get(name, fallback)}


def _choice(config: type[Options], name: str, text: str) -> str:
    """Return the choice that a text means. The field's own validators know its other names, such as fp8."""
    text = text.lower()
    for validator in config.model_fields[name].metadata:
        if isinstance(validator, BeforeValidator):
            text = typing.cast(str, validator.func(text))  # type: ignore[call-arg]
    return text


def help_of(config: type[Options], name: str) -> str:
    """Return the help text of a field. Its default is at the end, unless the default is empty, 0 or "auto"."""
    field = config.model_fields[name]
    text = str(field.description).replace("%", "%%")
    return text if field.default in ("", 0, "auto") else f"{text} [{field.default}]"
