"""Which model this is: what must agree before two workers may share cached blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.core.config import Quantization

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_identity(folder: Path, dtype: str, quantization: Quantization = "none") -> str:
    """A digest of a model folder's config and weights, and of what they run in.

    "none" and "gguf" are one model: they compute the same bits, and may hand each other their blocks.

    Weights are sampled at even distances, headers included, rather than read whole: start-up must not wait for
    gigabytes, and two models with equal shapes differ nearly everywhere.
    """
    digest = hashlib.sha256(dtype.encode())
    if quantization == "int8":
        digest.update(quantization.encode())
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
