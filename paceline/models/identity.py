"""The identity of a model, which must be equal before two workers may share cached blocks."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.core.config import Quantization

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_identity(folder: Path, dtype: str, quantization: Quantization = "none") -> str:
    """Return a digest of a model folder's config and weights, and of the dtype and quantization that they run in.

    "none" and "gguf" give the same digest: they have the same weights, so their workers may exchange blocks. Results
    are the same bits, or differ as those of two instruction sets do, if products with GGUF's blocks are in integers.

    Weights are sampled at even distances, headers included, and not read whole. Start-up must not wait until gigabytes
    are read, and two models with equal shapes differ nearly everywhere.
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
