"""Measure forward passes on a GPU, compared with a floor that the machine sets and with `transformers`.

    python -m bench.gpu.forward --out forward.json [--model llama-8b] [--rounds 20] [--kernels triton]
    python -m bench.gpu.forward --out forward.json --small    # tiny models on any machine, in seconds

Models have random weights, made on the device. The floor of a decode step (forward pass, logits, greedy tokens) is the
time to read its weights and its KV cache at the measured bandwidth. The floor of a prompt is the time of its operations
at the peak rate of the vendor's matrix product. `transformers` runs the same shape with a static cache and
torch.compile (not compiled with --small), in the same process after Paceline.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.compute.forward import make_batch
from bench.compute.loop import machine
from bench.gpu.random_model import GEMMA_27B, LLAMA_8B, TINY, TINY_GEMMA, RandomWeights, load_random
from bench.gpu.timing import matrix_peak, median_seconds, options_of, pick_device, read_bandwidth
from bench.gpu.transformers_peer import Peer
from paceline.core.kv_layout import KVLayout
from paceline.engine.runner import layer_caches
from paceline.kernels import select_kernels
from paceline.kernels.choosing import Draw
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.models.model_config import ModelConfig

MODELS = {"llama-8b": LLAMA_8B, "gemma-3-27b": GEMMA_27B}
SMALL = {"llama-8b": TINY, "gemma-3-27b": TINY_GEMMA}
GREEDY = Draw(0.0, 0, 0.0, 1.0, 0, 0)


class Pass(NamedTuple):
    name: str
    requests: int
    count: int
    """New tokens of each request."""
    context: int


PASSES = (
    Pass("decode, batch 1", 1, 1, 512),
    Pass("decode, batch 64, 4k context", 64, 1, 4096),
    Pass("prefill of 4096", 1, 4096, 4096),
)
SMALL_PASSES = (Pass("decode, batch 1", 1, 1, 20), Pass("decode, batch 3", 3, 1, 40), Pass("prefill of 30", 1, 30, 30))


def matrix_elements(config: ModelConfig) -> int:
    """Return the number of elements of all matrices that a token is multiplied by, with the head."""
    hidden, heads = config.hidden_size, config.attention["full"]
    attention = hidden * heads.head_dim * 2 * (heads.num_heads + heads.num_kv_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * hidden


def visible_pairs(config: ModelConfig, shape: Pass) -> int:
    """Return the number of pairs of a query and a key that it sees, over all layers."""
    pairs = 0
    for kind in config.layer_types:
        seen = config.attention[kind].window or shape.context
        pairs += sum(min(position + 1, seen) for position in range(shape.context - shape.count, shape.context))
    return pairs * shape.requests


def floor_seconds(config: ModelConfig, shape: Pass, itemsize: int, bandwidth: float, peak: float) -> float:
    """Return the shortest possible time: bytes over bandwidth for decoding, operations over peak rate for a prompt.

    Only the last token of a prompt has logits. All layers have heads of one shape.
    """
    heads = config.attention["full"]
    if shape.count == 1:
        kv_bytes = 2 * visible_pairs(config, shape) * heads.num_kv_heads * heads.head_dim * itemsize
        return (matrix_elements(config) * itemsize + kv_bytes) / bandwidth
    head = config.vocab_size * config.hidden_size
    products = (matrix_elements(config) - head) * shape.requests * shape.count + head * shape.requests
    attention = 2 * visible_pairs(config, shape) * heads.num_heads * heads.head_dim
    return 2.0 * (products + attention) / peak


def prepare(weights: RandomWeights, kernels: Kernels, shape: Pass, device: torch.device) -> Callable[[], object]:
    """Return a function that runs one pass as the engine does, with inputs made in advance."""
    loaded = load_random(weights, kernels, None)
    layout: KVLayout = loaded.layout
    slots = shape.requests * layout.slots_for(shape.context)
    pool = torch.randn(slots * layout.slot_bytes // weights.dtype.itemsize, device=device, dtype=weights.dtype)
    caches = layer_caches(layout, pool)
    with torch.device(device):
        batch = make_batch(layout, shape.requests, shape.count, shape.context)
        positions = torch.arange(shape.context - shape.count, shape.context).repeat(shape.requests)
        ids = torch.arange(shape.requests * shape.count) % weights.config.vocab_size
    last = slice(shape.count - 1, None, shape.count)

    def run() -> object:
        logits = loaded.model.logits(loaded.model.forward(ForwardInputs(ids, positions, caches, batch))[last]).values
        if loaded.chooser is None:
            return logits.argmax(1)
        return loaded.chooser.choose(logits, range(shape.requests), [GREEDY] * shape.requests)

    return run


def measure(name: str, config: ModelConfig, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bandwidth, peak = read_bandwidth(device, options.small), matrix_peak(device, dtype, options.small)
    print(f"{name}: reads {bandwidth / 1e9:.0f} GB/s, computes {peak / 1e12:.2f} TFLOP/s", flush=True)
    passes = SMALL_PASSES if options.small else PASSES
    kernels = select_kernels(device, options.kernels)
    weights = RandomWeights(config, dtype, device)
    ours = {
        shape.name: median_seconds(prepare(weights, kernels, shape, device), device, options.rounds) for shape in passes
    }
    del weights
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    peer = (
        Peer(config, dtype, device, options.peer == "compiled" and not options.small)
        if options.peer != "none"
        else None
    )
    results = []
    for shape in passes:
        floor = floor_seconds(config, shape, dtype.itemsize, bandwidth, peak)
        seconds = ours[shape.name]
        figures = {"pass": shape.name, "seconds": seconds, "share_of_floor": floor / seconds, "floor_seconds": floor}
        told = f"{shape.name:<32}{seconds * 1e3:>10.2f} ms, {floor / seconds:>6.1%} of the floor"
        if peer is not None:
            theirs = median_seconds(peer.prepare(shape.requests, shape.count, shape.context), device, options.rounds)
            figures |= {"transformers_seconds": theirs, "speedup": theirs / seconds}
            told += f", {theirs / seconds:.2f} x"
        results.append(figures)
        print(told, flush=True)
    return {"model": name, "bytes_per_second": bandwidth, "operations_per_second": peak, "passes": results}


def main() -> None:
    parser = options_of(__doc__, "tiny models", 20)
    parser.add_argument("--model", choices=MODELS, action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--peer", choices=("compiled", "eager", "none"), default="compiled", help="how transformers runs"
    )
    options = parser.parse_args()
    device = pick_device(options.small)
    known = SMALL if options.small else MODELS
    with torch.inference_mode():
        results = [measure(name, known[name], options, device) for name in options.model or MODELS]
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
