"""What a model takes in memory and on the disk, at the end of `paceline prepare`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from paceline.core.config import ServeConfig, quantization_of
from paceline.core.errors import ModelError, PacelineError
from paceline.core.kv_layout import make_layout
from paceline.core.progress import size_text
from paceline.models.config import is_assistant, read_facts, weight_form
from paceline.models.files.cache import keep_within, removal_text
from paceline.models.model_config import ModelConfig
from paceline.models.weight_sizes import weight_sizes

_TOKENS = 1000


def report_prepared(folder: Path, config: ServeConfig, report: Callable[[str], None]) -> None:
    """Report what the model takes in memory, and make room in the cache folder if it exceeds --cache-size.

    Raises ConfigError if the options do not fit the model, or ModelError if the cache folder cannot be read.
    """
    cache = Path(config.cache_dir).expanduser().absolute()
    if removed := keep_within(cache, config.cache_size):
        report(f"removed {removal_text(removed)} from {cache}, because of --cache-size {config.cache_size}")
    with contextlib.suppress(ModelError):  # a worker says what is wrong with the folder
        if not is_assistant(folder):
            report(footprint(folder, config))


def footprint(folder: Path, config: ServeConfig) -> str:
    """Return a sentence about the weights by format, the KV of 1,000 tokens, and the kernels that run on this machine.

    Without the packages of a worker, it is about the weights alone. Raises PacelineError if the options do not fit the
    model.
    """
    facts = read_facts(folder, config.model_impl)
    dtype = "bfloat16" if facts.dtype == "float16" else facts.dtype
    sizes = weight_sizes(folder, weight_form(folder, quantization_of(config)), dtype)
    formats = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())
    parts = [f"weights take {size_text(sum(sizes.values()))} of memory ({formats})"]
    try:
        import torch

        from paceline.kernels import instruction_set_of, select_kernels
        from paceline.models.base import kv_groups

        if isinstance(facts, ModelConfig):
            groups, _ = kv_groups(facts, config.kv_coding)
            layout = make_layout(groups, getattr(torch, dtype).itemsize, "")
            code = "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}"
            parts.append(f"KV {size_text(int(layout.token_bytes * _TOKENS))}{code} for {_TOKENS:,} tokens")
        device = torch.device("cpu")
        kernels = select_kernels(device)
        parts.append(f"{kernels.name} kernels with {instruction_set_of(kernels, device).split()[-1]}")
    except (ImportError, PacelineError):
        pass  # this machine only prepares models
    return "; ".join(parts)
