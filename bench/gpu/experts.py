"""Time of layers of experts on a GPU, compared with reading the weights of the experts in use.

    python -m bench.gpu.experts --out experts.json [--rounds 20] [--kernels triton]
    python -m bench.gpu.experts --out experts.json --small    # tiny layers on any machine, in seconds

Each batch runs through several layers, as a CUDA graph like a decode step, and other experts are drawn for each row and
layer. Their weights together are much larger than the caches. "whole" is the operation with everything in it: sorting
rows by expert, three products, activation and weighted sum. "products" are the launches of the products alone. The
floor is the size of the weights of the experts in use divided by the read bandwidth, which is measured first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.compute.loop import machine
from bench.gpu.timing import median_seconds, options_of, pick_device, read_bandwidth, recorded
from paceline.kernels import select_kernels
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import Kernels
from paceline.kernels.triton_kernels.experts import products, sort_pairs


class Shape(NamedTuple):
    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS = (
    Shape("qwen-3-30b-a3b", 2048, 768, 128, 8),
    Shape("gemma-4-26b-a4b", 2816, 704, 128, 8),
    Shape("gpt-oss-120b", 2880, 2880, 128, 4),
)
SMALL = (Shape("tiny", 64, 48, 8, 2),)
ROWS = (1, 2, 4, 8, 16, 64, 512, 4096)
SMALL_ROWS = (1, 3)
LAYERS = 4


def random_layer(shape: Shape, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> ExpertWeights:
    def matrices(size_out: int, size_in: int) -> list[Any]:
        whole = torch.empty(shape.experts, size_out, size_in, dtype=dtype, device=device).normal_(0, size_in**-0.5)
        return [kernels.pack(weights) for weights in whole]

    gate, up = matrices(shape.inner, shape.hidden), matrices(shape.inner, shape.hidden)
    return kernels.index_experts(ExpertWeights(gate, up, matrices(shape.hidden, shape.inner), "silu"))


def measure(
    shape: Shape, numbers: Sequence[int], kernels: Kernels, device: torch.device, rounds: int, rate: float
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each number of rows. `rate` is in bytes per second."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = [random_layer(shape, kernels, dtype, device) for _ in range(LAYERS)]
    for count in numbers:
        x = torch.randn(count, shape.hidden, device=device).to(dtype)
        scores = torch.rand(LAYERS, count, shape.experts, device=device)
        ids = scores.topk(shape.top_k).indices
        weights = torch.full((count, shape.top_k), 1 / shape.top_k, device=device)

        def whole(x: Tensor = x, ids: Tensor = ids, weights: Tensor = weights) -> list[Tensor]:
            return [kernels.experts(x, expert_ids, weights, layer) for expert_ids, layer in zip(ids, layers)]

        ways: dict[str, Callable[[], list[Tensor]]] = {"whole": whole}
        if kernels.name.startswith("triton"):
            ways["products"] = products_of(layers, x, ids)
        used = sum(len(expert_ids.unique()) for expert_ids in ids) / LAYERS
        read = used * 3 * shape.hidden * shape.inner * dtype.itemsize
        seconds = {way: median_seconds(recorded(run, device), device, rounds) / LAYERS for way, run in ways.items()}
        shares = {f"{way}_share_of_floor": read / rate / way_seconds for way, way_seconds in seconds.items()}
        yield {"model": shape.name, "rows": count, "experts_in_use": used, **seconds, **shares}


def products_of(layers: list[ExpertWeights], x: Tensor, ids: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that computes the products of all layers, with rows that were sorted before."""
    first = layers[0]
    pairs = [sort_pairs(expert_ids, len(first.gate)) for expert_ids in ids]
    top_k = ids.shape[2]
    inner = torch.randn(len(x) * top_k, first.gate[0].size_out, device=x.device).to(x.dtype)

    def run() -> list[Tensor]:
        results = []
        for layer_pairs, layer in zip(pairs, layers):
            results.append(products(x, layer_pairs, layer, first=0, matrices=2, pairs_of_row=top_k))
            results.append(products(inner, layer_pairs, layer, first=2, matrices=1, pairs_of_row=1))
        return results

    return run


def main() -> None:
    options = options_of(__doc__, "tiny layers", 20).parse_args()
    device = pick_device(options.small)
    shapes, numbers = (SMALL, SMALL_ROWS) if options.small else (MODELS, ROWS)
    results = []
    with torch.inference_mode():
        rate = read_bandwidth(device, options.small)
        print(f"reads {rate / 1e9:.0f} GB/s")
        kernels = select_kernels(device, options.kernels)
        for shape in shapes:
            for result in measure(shape, numbers, kernels, device, options.rounds, rate):
                results.append(result)
                told = [
                    f"{way} {1e6 * result[way]:.1f} us, {result[f'{way}_share_of_floor']:.1%} of the floor"
                    for way in ("whole", "products")
                    if way in result
                ]
                place = f"{shape.name:<18}{result['rows']:>6} rows, {result['experts_in_use']:5.1f} experts in use"
                print(f"{place}: {'; '.join(told)}", flush=True)
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
