"""Tiny models with encoders, and inputs for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.media import MediaKind
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.models.encoders.base import Encoders
from paceline.models.loader import load_encoders
from tests.tiny_checkpoints import (
    write_gemma3_with_vision,
    write_gemma4_unified,
    write_gemma4_with_media,
    write_qwen3_5_with_vision,
    write_qwen3_vl,
)

CPU = torch.device("cpu")
WRITERS: dict[str, Callable[[Path], Any]] = {
    "gemma3": write_gemma3_with_vision,
    "unified": write_gemma4_unified,
    "edge": lambda folder: write_gemma4_with_media(folder, "edge"),
    "dense": lambda folder: write_gemma4_with_media(folder, "dense"),
    "qwen3_vl": write_qwen3_vl,
    "qwen3_5": write_qwen3_5_with_vision,
}
"""Functions that save a model to a folder and return that of `transformers`."""


def load(folder: Path, kernels: Kernels | None = None, dtype: torch.dtype = torch.float32) -> Encoders:
    encoders = load_encoders(folder, dtype, kernels or NativeKernels(2), CPU)
    assert encoders is not None
    return encoders


def encode(encoders: Encoders, kind: MediaKind, tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        found = encoders.encode(kind, tensor)
    assert found.shape == (encoders.rows(kind, tensor.shape), encoders.row_size)
    assert found.dtype == encoders.dtype
    return found


def image(height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def audio(samples: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(0, 0.3, samples).astype(np.float32)


def sound(*shape: int) -> Tensor:
    return torch.from_numpy(audio(math.prod(shape))).view(shape)


INPUTS = {
    "edge": [(MediaKind.IMAGE, image(48, 96)), (MediaKind.AUDIO, sound(50, 8))],
    "unified": [(MediaKind.IMAGE, image(24, 36)), (MediaKind.AUDIO, sound(100))],
    "gemma3": [(MediaKind.IMAGE, image(56, 56))],
    "qwen3_vl": [
        (MediaKind.IMAGE, image(64, 96)),
        (MediaKind.VIDEO_FRAME, torch.stack([image(32, 64), image(32, 64).flip(0)])),
    ],
}
"""A small input for each encoder of some of the models."""


def change(folder: Path, to: Path, tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Copy a checkpoint with other tensors."""
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors(load_file(folder / "model.safetensors")), to / "model.safetensors")
    return to
