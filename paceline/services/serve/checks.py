"""What can be known to go wrong before anything is started."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from paceline.core.cache_policy.registry import find_policy
from paceline.core.config import GIB, ServeConfig, has_pools, parse_bytes
from paceline.core.config_source import check_numbers
from paceline.core.errors import ConfigError
from paceline.core.speculative import parse_speculative_config
from paceline.models.config import read_config
from paceline.models.draft import check_speculative, read_draft_config
from paceline.models.folder import BLOCKS_FILE, weight_files

PROCESS_BYTES = 400 << 20
"""Resident memory of one worker without weights and KV cache: Python, torch, scratch space of a step."""
LEAST_KV_BYTES = 256 << 20
"""What has to be left for the KV cache where its size is "auto"."""

_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def check_config(config: ServeConfig) -> None:
    """Raises ConfigError for options that make no stack, whatever the model."""
    check_numbers(config)
    if config.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"--dtype must be auto, bfloat16 or float32, not {config.dtype!r}")
    for option, without in (("kv_memory", "auto"), ("kv_tier_memory", "auto"), ("kv_disk_size", "")):
        text = getattr(config, option)
        if text not in (without, "") and not parse_bytes(text):
            raise ConfigError(f"--{option.replace('_', '-')} must not be 0; write it like 512MiB or 4GiB")
    if config.kv_tier_memory and not has_pools(config):
        raise ConfigError(
            "--kv-tier-memory needs --kv-pool device; where workers compute in the arena, that is the tier as well: "
            "give its size with --kv-memory"
        )
    find_policy(config.cache_policy)
    read_draft_config(parse_speculative_config(config.speculative_config))


def check_model(config: ServeConfig, folder: Path) -> None:
    """Raises ConfigError or ModelError for options that make no stack with the model in `folder`."""
    check_speculative(parse_speculative_config(config.speculative_config), folder)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nobody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
        raise ConfigError(f"port {port} of {host} {reason}; choose another with --port or --host") from error


def check_memory(config: ServeConfig, folder: Path, available: int | None) -> None:
    """Raises ConfigError if the weights, the processes and the KV cache do not fit into `available` bytes.

    Args:
        folder: the model.
        available: what can be taken without swapping; None where the system does not tell.
    """
    if available is None:
        return
    workers = config.prefill + config.decode
    weights = _weight_bytes(folder, config, workers) if config.device == "cpu" else 0
    kv_bytes = _kv_bytes(config, workers)
    needed = weights + workers * PROCESS_BYTES + kv_bytes
    if needed > available:
        sizes = [f"--{name.replace('_', '-')}" for name in ("kv_memory", "kv_tier_memory") if _is_given(config, name)]
        lower = " or ".join([*sizes, "--prefill", "--decode"])
        raise ConfigError(
            f"this stack needs {_gib(needed)} of memory (weights {_gib(weights)}, {workers} workers "
            f"{_gib(workers * PROCESS_BYTES)}, KV cache {_gib(kv_bytes)}) and {_gib(available)} are free; "
            f"lower {lower}, or take a smaller model"
        )


def check_more_workers(config: ServeConfig, folder: Path, added: int, available: int | None) -> None:
    """Raise ConfigError if so many more workers of a running stack do not fit into `available` bytes."""
    if available is None:
        return
    own_weights = _weight_bytes(folder, config, 2) - _weight_bytes(folder, config, 1) if config.device == "cpu" else 0
    own_pool = _kv_bytes(config, 2) - _kv_bytes(config, 1)
    needed = added * (PROCESS_BYTES + own_weights + own_pool)
    if needed > available:
        raise ConfigError(
            f"{added} more workers need {_gib(needed)} of memory and {_gib(available)} are free; add fewer"
        )


def _kv_bytes(config: ServeConfig, workers: int) -> int:
    """What KV blocks take at least."""
    memory = LEAST_KV_BYTES if config.kv_memory == "auto" else parse_bytes(config.kv_memory)
    if not has_pools(config):
        return memory
    tier = parse_bytes(config.kv_tier_memory) if _is_given(config, "kv_tier_memory") else LEAST_KV_BYTES
    return tier + (workers * memory if config.device == "cpu" else 0)


def _is_given(config: ServeConfig, size: str) -> bool:
    return getattr(config, size) not in ("", "auto")


def _weight_bytes(folder: Path, config: ServeConfig, workers: int) -> int:
    """Workers share the mapped file, or that of packed weights; what plain torch has to convert, and what is quantized,
    is a copy in each."""
    stored_bytes = sum(file.stat().st_size for file in weight_files(folder))
    stored = read_config(folder).dtype
    dtype = stored if config.dtype == "auto" else config.dtype
    whole = stored_bytes * _ITEMSIZES[dtype] // _ITEMSIZES[stored]
    if config.quantization == "none":
        return whole * (workers if config.kernels == "reference" and dtype != stored else 1)
    if config.kernels == "reference":  # dequantizes
        return workers * whole
    if config.quantization == "gguf" and (folder / BLOCKS_FILE).is_file():
        return workers * (folder / BLOCKS_FILE).stat().st_size
    return workers * stored_bytes // _ITEMSIZES[stored] // 32 * 34


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
