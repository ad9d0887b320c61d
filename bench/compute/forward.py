"""Time of a forward pass on CPU: replayed in one call, called operation by operation, and with plain torch.

    python -m bench.compute.forward ~/.cache/paceline/smollm2-135m-instruct [--threads 1] [--quantization gguf]

The ways take turns, and figures are medians in milliseconds. With one thread they are CPU time, which other work on the
machine hardly changes; with more threads they are wall time. The floor is the time of `torch.sum` over as many bytes as
the layers' weights have in bf16. If weights are compressed, "whole" is the way without compression. --quantization adds
ways with quantized weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from bench.compute.kernels import medians
from paceline.core.config import Quantization
from paceline.core.kv_layout import KVLayout, make_layout
from paceline.engine.runner import layer_caches
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import Forward, ForwardInputs, Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.files.gguf_reference import has_reference, read_reference
from paceline.models.folder import weight_files
from paceline.models.loader import load_model
from paceline.services.common.shared_memory import map_arena
from paceline.services.kvtransfer.arena import Arena

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
PASSES = {
    "one token behind 256": (1, 1, 256),
    "a token for each of 8 behind 256": (8, 1, 256),
    "a token for each of 16 behind 544": (16, 1, 544),
    "a prompt of 512": (1, 512, 512),
    "a prompt of 2048": (1, 2048, 2048),
}
"""For each pass: number of requests, new tokens of each request, tokens of each context."""


class CalledOneByOne(NativeKernels):
    def compile(self, forward: Forward) -> Forward:
        return forward


def make_batch(layout: KVLayout, requests: int, count: int, context: int) -> AttentionBatch:
    groups, first = [], 0
    positions = torch.arange(context - count, context)
    for group in layout.groups:
        blocks = group.blocks_for(context)
        tables = torch.arange(first, first + requests * blocks).view(requests, blocks)
        first += requests * blocks
        slots = tables[:, positions // group.block_tokens].flatten()
        offsets = (positions % group.block_tokens).repeat(requests)
        groups.append(GroupTables(group.block_tokens, group.shape.window, tables.int(), slots, offsets))
    starts = tuple(range(0, requests * count + 1, count))
    return AttentionBatch(starts, (context,) * requests, tuple(groups))


def layer_bytes(folder: Path) -> int:
    """Return the bytes in bf16 of the layers' weight matrices, which every token is multiplied by."""
    shapes: dict[str, Sequence[int]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as handle:
            shapes |= {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118
    if has_reference(folder):
        shapes |= {name: matrix.shape for name, matrix in read_reference(folder).matrices.items()}
    layers = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    return sum(shape[0] * shape[1] for shape in layers) * DTYPE.itemsize


def arena_memory(size: int) -> torch.Tensor:
    """Return memory as workers have it: shared, and in huge pages if there are any. `size` is in bytes."""
    arena = Arena(Path("/dev/shm"), size)
    memory = map_arena(arena.path, size)
    arena.close()  # the memory stays as long as it is mapped
    return torch.frombuffer(memory[:size], dtype=DTYPE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the measurement [%(default)s]")
    parser.add_argument(
        "--quantization", choices=("int8", "gguf"), action="append", default=[], help="format of the model's matrices"
    )
    parser.add_argument("--instruction-set", default="auto", help="instruction set of the kernels [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    instruction_set = options.instruction_set
    replayed = NativeKernels(options.threads, instruction_set)
    whole = NativeKernels(options.threads, instruction_set, compress=False)
    ways: dict[str, tuple[Kernels, Quantization]] = {
        "replayed": (replayed, "none"),
        **{name: (replayed, name) for name in options.quantization},
        **({"whole": (whole, "none")} if replayed.compresses else {}),
        "one by one": (CalledOneByOne(options.threads, instruction_set), "none"),
        "torch": (ReferenceKernels(), "none"),
    }
    models = {name: load_model(options.model, DTYPE, used, CPU, quantization=how) for name, (used, how) in ways.items()}
    layout = make_layout(models["torch"].group_shapes, DTYPE.itemsize, "bench")
    slots = max(requests * layout.slots_for(context) for requests, _, context in PASSES.values())
    caches = layer_caches(layout, arena_memory(slots * layout.slot_bytes))
    read = torch.ones(layer_bytes(options.model) // 4)
    print(f"{'pass':<36}{'floor':>9}" + "".join(f"{name:>12}" for name in models))
    with torch.inference_mode():
        for name, (requests, count, context) in PASSES.items():
            batch = make_batch(layout, requests, count, context)
            positions = torch.arange(context - count, context).repeat(requests)
            ids = torch.randint(0, models["torch"].config.vocab_size, (requests * count,))
            runs: list[Callable[[], object]] = [read.sum]
            inputs = ForwardInputs(ids, positions, caches, batch)
            runs += [lambda m=model: m.forward(inputs) for model in models.values()]  # noqa: B023
            floor, *each = (seconds * 1e3 for seconds in medians(options.rounds, *runs))
            print(f"{name:<36}{floor:>9.1f}" + "".join(f"{seconds:>12.1f}" for seconds in each), flush=True)


if __name__ == "__main__":
    main()
