"""The identity of a model, which must be equal before two workers may share cached blocks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.core.config import ModelImpl, Quantization
from paceline.models.config import implementation
from paceline.models.folder import BLOCKS_FILE, weight_files

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_identity(folder: Path, dtype: str, quantization: Quantization = "none", code: str = "native") -> str:
    """Return a digest of a model folder's config and weights, and of the dtype and quantization that they run in.

    Blocks of our own code and of a model's code in `transformers` differ in their last bits, so `code`, the
    `implementation_name`, tells them apart. Code in the folder is part of such a model.

    "none" and "gguf" give the same digest: they have the same weights, so their workers may exchange blocks. Results
    are the same bits, or differ as those of two instruction sets do, if products with GGUF's blocks are in integers.

    Weights are sampled at even distances, headers included, and not read whole. Start-up must not wait until gigabytes
    are read, and two models with equal shapes differ nearly everywhere.
    """
    digest = hashlib.sha256(dtype.encode())
    if quantization == "int8":
        digest.update(quantization.encode())
    if code != "native":
        digest.update(code.encode())
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    digest.update((folder / "config.json").read_bytes())
    blocks = folder / BLOCKS_FILE
    for path in [*weight_files(folder), *([blocks] if blocks.is_file() else [])]:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        places = [index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1) for index in range(_SAMPLES)]
        with path.open("rb", buffering=_SAMPLE_BYTES) as file:
            _announce(file.fileno(), places)
            for place in places:
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _announce(descriptor: int, places: Sequence[int]) -> None:
    """Let the system read all samples of a file at once, and nothing between them, if it can."""
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for place in places:
            os.posix_fadvise(descriptor, place, _SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)


def implementation_name(folder: Path, model_impl: ModelImpl) -> str:
    """Return the name of the code that computes a model, as in `Numerics.implementation`.

    Raises:
        ModelError: config.json cannot be read.
    """
    if implementation(folder, model_impl) == "native":
        return "native"
    # Another version may compute the same model with other operations. If it is not installed, loading says so.
    version = next((own.version for own in importlib.metadata.distributions(name="transformers")), "")
    return f"transformers {version}".strip()
