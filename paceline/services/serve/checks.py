"""Checks of options, port and memory before a process is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Container, Sequence
from pathlib import Path
from typing import get_args

from paceline.core.cache_policy.registry import find_policy
from paceline.core.config import GIB, ServeConfig, has_pools, quantization_of
from paceline.core.errors import ConfigError
from paceline.core.options import flag, parse_bytes
from paceline.core.pooling_choice import pooling_choice
from paceline.core.pooling_folder import read_pooling_config
from paceline.core.speculative import parse_speculative_config
from paceline.models.config import has_native_encoders, read_facts, read_format, weight_form
from paceline.models.draft import check_speculative, is_draft_name, read_draft_config
from paceline.models.files.gguf_reference import has_reference
from paceline.models.folder import count_weights, weight_files
from paceline.models.kv_codes import check_kv_coding
from paceline.models.model_config import ModelConfig
from paceline.models.weight_sizes import weight_sizes
from paceline.services.serve.settings import served_name
from paceline.services.serve.worker_fleet import Role

PROCESS_BYTES = 400 << 20
"""Resident bytes of one worker without weights and KV cache: Python, torch and the scratch memory of a step."""
LEAST_KV_BYTES = 256 << 20
"""Smallest memory for the KV cache if its size is "auto", in bytes."""

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def check_config(config: ServeConfig) -> None:
    """Raise ConfigError for options with which no stack can run, whatever the model is."""
    find_policy(config.cache_policy)
    speculative = parse_speculative_config(config.speculative_config)
    if not is_draft_name(speculative):
        read_draft_config(speculative, config.model_impl)


def check_model(config: ServeConfig, folder: Path) -> None:
    """Raise ConfigError or ModelError for options that do not fit the model in `folder`."""
    if is_encoder(folder):
        return
    speculative = parse_speculative_config(config.speculative_config)
    check_speculative(speculative, folder, config.model_impl)
    models = read_facts(folder, config.model_impl), read_draft_config(speculative, config.model_impl)
    check_kv_coding(config.kv_coding, *models)
    check_encode_workers(config, folder, config.encode)


def is_encoder(folder: Path) -> bool:
    """Return whether the model in `folder` is an encoder of texts, which has pool workers. Raises ModelError."""
    pooling = read_pooling_config(folder)
    return pooling is not None and pooling.is_encoder


def generates(config: ServeConfig, folder: Path) -> bool:
    """Return whether the model in `folder` generates text, so that it has decode workers. Raises ModelError or
    ConfigError.
    """
    pooling = read_pooling_config(folder, pooling_choice(config))
    return pooling is None or pooling.generates


def roles_of(config: ServeConfig, folder: Path) -> tuple[Role, ...]:
    """Return the roles of workers that the model in `folder` may have. Raises ModelError or ConfigError."""
    if is_encoder(folder):
        return ("pool",)
    return ("prefill", "decode", "encode") if generates(config, folder) else ("prefill", "encode")


def check_roles(config: ServeConfig, roles: Sequence[Role], wanted: Container[str]) -> None:
    """Raise ConfigError for workers of roles that the model does not have.

    Args:
        roles: the roles that the model may have.
        wanted: the roles of workers that a person has asked for.
    """
    every: tuple[Role, ...] = get_args(Role)
    for role in every:
        if role in wanted and role not in roles:
            makes = "makes text" if "decode" in roles else "makes no text"
            own = ", ".join(roles)
            raise ConfigError(f"{served_name(config)} {makes} and has no {role} workers; its workers are: {own}")


def named_roles(config: ServeConfig, shared: Container[str]) -> list[str]:
    """Return the roles of which the options of a model ask for workers.

    Args:
        shared: options that are meant for several models, so that one of them may have no use for them.
    """
    every: tuple[Role, ...] = get_args(Role)
    given = config.model_fields_set
    return [role for role in every if role in given and role not in shared and getattr(config, role)]


def check_encode_workers(config: ServeConfig, folder: Path, count: int) -> None:
    """Raise ConfigError if `count` is above 0 and the model in `folder` has no encoders for encode workers."""
    if count and (is_encoder(folder) or not has_native_encoders(folder, config.model_impl)):
        raise ConfigError(
            f"{served_name(config)} has no encoders that Paceline computes, so it needs no encode workers"
        )


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen on this host and port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
        raise ConfigError(f"port {port} of {host} {reason}; choose another with --port or --host") from error


def check_memory(models: Sequence[tuple[ServeConfig, Path]], available: int | None) -> str:
    """Raise ConfigError if the weights, the processes and the KV caches do not fit into `available` bytes.

    Experts are mapped from a file, so only those that a token uses must fit.

    Args:
        models: the options and the folder of each model.
        available: bytes that can be allocated without swapping; None if the system does not report them.

    Returns:
        A warning for the user if not all experts fit; "" if they do.
    """
    if available is None:
        return ""
    weights = processes = kv_bytes = idle = 0
    for config, folder in models:
        if is_encoder(folder):
            weights += config.pool * _encoder_bytes(folder, config)
            processes += config.pool
            continue
        workers = config.prefill + config.decode  # an encode worker has no weights of the text model and no pool
        own_weights = _weight_bytes(folder, config, workers) if config.device == "cpu" else 0
        weights += own_weights
        idle += int(own_weights * _idle_expert_share(folder, config))
        kv_bytes += _kv_bytes(config, workers)
        processes += workers + config.encode
    needed = weights + processes * PROCESS_BYTES + kv_bytes
    if needed > available >= needed - idle:
        return (
            f"this stack is slow: {_gib(available)} of memory are free and it needs {_gib(needed)} (weights "
            f"{_gib(weights)}), so experts that a token needs are often read from the disk"
        )
    if needed > available:
        configs = [config for config, _ in models]
        sizes = ("kv_memory", "kv_pool_memory")
        given = [flag(name) for name in sizes if any(getattr(config, name) != "auto" for config in configs)]
        encode = ["--encode"] if any(config.encode for config in configs) else []
        lower = " or ".join([*given, "--prefill", "--decode", *encode])
        raise ConfigError(
            f"this stack needs {_gib(needed)} of memory (weights {_gib(weights)}, {processes} workers "
            f"{_gib(processes * PROCESS_BYTES)}, KV cache {_gib(kv_bytes)}) and {_gib(available)} are free; "
            f"lower {lower}, or take a smaller model"
        )
    return ""


def check_more_workers(config: ServeConfig, folder: Path, added: int, available: int | None) -> None:
    """Raise ConfigError if `added` more workers of a running stack do not fit into `available` bytes.

    If `available` is None, nothing is checked.
    """
    if available is None:
        return
    if is_encoder(folder):
        own_weights, own_pool = _encoder_bytes(folder, config), 0
    else:
        own_weights, own_pool = _added_bytes(folder, config)
    needed = added * (PROCESS_BYTES + own_weights + own_pool)
    if needed > available:
        raise ConfigError(
            f"{added} more workers need {_gib(needed)} of memory and {_gib(available)} are free; add fewer"
        )


def _encoder_bytes(folder: Path, config: ServeConfig) -> int:
    """Return the bytes that the weights of an encoder take in each worker."""
    return sum(path.stat().st_size for path in weight_files(folder)) if config.device == "cpu" else 0


def _added_bytes(folder: Path, config: ServeConfig) -> tuple[int, int]:
    """Return the bytes of weights and of the KV pool that a further worker of a model that makes text takes."""
    own_weights = _weight_bytes(folder, config, 2) - _weight_bytes(folder, config, 1) if config.device == "cpu" else 0
    return own_weights, _kv_bytes(config, 2) - _kv_bytes(config, 1)


def _kv_bytes(config: ServeConfig, workers: int) -> int:
    """Return the smallest number of bytes that all KV blocks take."""
    pools = workers * _size(config.kv_pool_memory) if has_pools(config) and config.device == "cpu" else 0
    return _size(config.kv_memory) + pools


def _size(text: str) -> int:
    return LEAST_KV_BYTES if text == "auto" else parse_bytes(text)


def _weight_bytes(folder: Path, config: ServeConfig, workers: int) -> int:
    """Return the bytes that the weights take in all.

    Workers share the mapped checkpoint or the packed weights. Weights that plain torch converts or dequantizes are a
    copy in each worker.
    """
    count, stored = count_weights(folder, read_format(folder)), read_facts(folder, config.model_impl).dtype
    dtype = stored if config.dtype == "auto" else config.dtype
    whole = count * _ITEMSIZES[dtype]
    form = weight_form(folder, quantization_of(config))
    if config.kernels == "reference":
        converts = dtype != stored or form != "none" or has_reference(folder)
        return whole * (workers if converts else 1)
    return sum(weight_sizes(folder, form, dtype).values())


def _idle_expert_share(folder: Path, config: ServeConfig) -> float:
    """Return the share of the weights that belongs to mapped experts and that a single token does not use."""
    facts = read_facts(folder, config.model_impl)
    is_mapped = config.device == "cpu" and config.kernels != "reference"
    if not is_mapped or not isinstance(facts, ModelConfig) or facts.experts is None:
        return 0
    experts = facts.experts
    idle = (facts.num_layers - len(experts.dense_layers)) * (experts.count - experts.routing.top_k)
    return idle * 3 * experts.inner_size * facts.hidden_size / count_weights(folder, read_format(folder))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
