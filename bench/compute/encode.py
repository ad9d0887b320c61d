"""Time of encoding one image with the vision tower of Gemma 4 E2B, beside `transformers`.

    python -m bench.compute.encode [--tokens 280] [--threads 2] [--rounds 5] [--layers 16]

The weights are random, in bf16. Both ways take turns, and figures are medians: of wall time, or of CPU time
with one thread.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.media_model import DTYPE, VISION, write_media_model
from bench.compute.kernels import medians
from paceline.core.media import MediaKind
from paceline.kernels.native import NativeKernels
from paceline.models.loader import load_encoders

PATCH, POOL = 16, 3
"""Pixels of a patch's side, and patches of the side of a square that becomes one row."""
TEXT = {
    "hidden_size": 1536,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
}
"""A tiny text model with the hidden size of E2B."""


def pixels_of(tokens: int) -> Tensor:
    """Return random pixels of an image with a multiple of 14 soft tokens: uint8 [height, width, 3]."""
    rows, columns = 14 * POOL, tokens // 14 * POOL
    return torch.randint(0, 256, (rows * PATCH, columns * PATCH, 3), dtype=torch.uint8)


def inputs_of_transformers(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the patches of an image from 0 to 1, [1, patches, 3 * PATCH ** 2], and their columns and rows."""
    rows, columns = (size // PATCH for size in pixels.shape[:2])
    patches = pixels.view(rows, PATCH, columns, PATCH, 3).transpose(1, 2).reshape(1, rows * columns, -1)
    places = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
    return patches / 255, torch.stack(places, -1).view(1, -1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.encode", description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=280, help="rows of the encoding, a multiple of 14 [%(default)s]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16, help="layers of the tower [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pixels = pixels_of(options.tokens)
    patches, places = inputs_of_transformers(pixels)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        reference = write_media_model(Path(folder, "model"), {**VISION, "num_hidden_layers": options.layers}, text=TEXT)
        encoders = load_encoders(Path(folder, "model"), DTYPE, NativeKernels(options.threads), torch.device("cpu"))
        assert encoders is not None

        def ours() -> Any:
            return encoders.encode(MediaKind.IMAGE, pixels)

        def theirs() -> Any:
            return reference.model.get_image_features(patches.to(DTYPE), places).pooler_output[0]

        wanted, found = theirs().float(), ours().float()
        error = ((found - wanted).norm() / wanted.norm()).item()
        our_seconds, other = medians(options.rounds, ours, theirs)
    print(f"{len(found)} rows, {options.threads} threads, relative difference {error:.4f}")
    print(f"Paceline     {our_seconds * 1e3:8.0f} ms")
    print(f"transformers {other * 1e3:8.0f} ms, {other / our_seconds:.2f} times as long")


if __name__ == "__main__":
    main()
