"""Time of encoding an image on a GPU: the layers as CUDA graphs, launched one by one, and in `transformers`.

    python -m bench.gpu.encode --out encode.json [--rounds 20]
    python -m bench.gpu.encode --out encode.json --small    # a tiny tower on any machine, in seconds

The tower is that of Gemma 4 E2B with random weights in bf16. All ways take the same pixels.
`python -m bench.serving.media_ttft --device cuda` measures times to first tokens without and with an encode worker.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.media_model import SMALL_VISION, VISION, write_media_model
from bench.compute.encode import TEXT, inputs_of_transformers, pixels_of
from bench.compute.loop import machine
from bench.gpu.timing import median_seconds, options_of, pick_device
from paceline.core.media import MediaKind
from paceline.kernels import select_kernels
from paceline.kernels.encoding import Tower
from paceline.kernels.interface import Kernels
from paceline.models.loader import load_encoders

BUDGETS = (70, 280, 1120)
"""Numbers of soft tokens."""


def encoder(folder: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that encodes an image."""
    encoders = load_encoders(folder, dtype, kernels, device)
    assert encoders is not None
    return lambda pixels: encoders.encode(MediaKind.IMAGE, pixels)


def launched_one_by_one(kernels: Kernels) -> Kernels:
    """Return the same kernels without recordings of towers."""

    def same(tower: Tower) -> Tower:
        return tower

    kernels.compile_tower = same  # type: ignore[method-assign]
    return kernels


def measure(folder: Path, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return the seconds of all ways for each budget."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reference = write_media_model(folder, SMALL_VISION if options.small else VISION, text=TEXT).to(device, dtype)
    graphs = encoder(folder, select_kernels(device, options.kernels), dtype, device)
    eager = encoder(folder, launched_one_by_one(select_kernels(device, options.kernels)), dtype, device)
    results = []
    for tokens in BUDGETS[:1] if options.small else BUDGETS:
        pixels = pixels_of(tokens)
        patches, places = (tensor.to(device) for tensor in inputs_of_transformers(pixels))
        patches = patches.to(dtype)

        ways: dict[str, Callable[[], object]] = {
            "graphs": lambda pixels=pixels: graphs(pixels),
            "one by one": lambda pixels=pixels: eager(pixels),
            "transformers": lambda patch_inputs=(patches, places): reference.model.get_image_features(*patch_inputs),
        }
        seconds = {way: median_seconds(run, device, options.rounds) for way, run in ways.items()}
        results.append({"tokens": tokens, **seconds})
        told = ", ".join(f"{way} {1e3 * way_seconds:.2f} ms" for way, way_seconds in seconds.items())
        print(f"{tokens:5} soft tokens: {told}; graphs {seconds['one by one'] / seconds['graphs']:.2f} x", flush=True)
    return results


def main() -> None:
    options = options_of(__doc__, "a tiny tower", 20).parse_args()
    device = pick_device(options.small)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        results = measure(Path(folder, "model"), options, device)
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
