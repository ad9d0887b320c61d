"""What adapters cost: the time of a step without adapters, divided by its time with them.

    python -m bench.compute.lora ~/.cache/paceline/smollm2-135m-instruct [--threads 2] [--rank 16] [--out FILE]

A step is a forward pass and its logits. The ways take turns, and figures are medians. Adapters are random, change all
linear layers, and are in slots already. "read" is the time in which a worker reads an adapter's folder into memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.compute.forward import CPU, DTYPE, arena_memory, make_batch
from bench.compute.kernels import medians
from bench.serving.load import table
from paceline.core.kv_layout import make_layout
from paceline.engine.runner import layer_caches
from paceline.kernels.interface import ForwardInputs
from paceline.kernels.native import NativeKernels
from paceline.models.adapters.linears import NamedLinear
from paceline.models.adapters.loading import AdapterRules, LoadedAdapter
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.compiled import CompiledModel
from paceline.models.loader import AdapterChoice, load_model

SLOTS = 8
PASSES = {
    "a token for each of 8 behind 256": (8, 1, 256),
    "one token behind 256": (1, 1, 256),
    "a prompt of 512": (1, 512, 512),
}
"""For each pass: number of requests, new tokens of each request, tokens of each context."""
ADAPTERS = (0, 1, 4, 8)
"""Numbers of adapters in a step, which its requests have in turns."""


def write_adapter(folder: Path, linears: list[NamedLinear], rank: int, seed: int) -> None:
    """Write a random adapter of all linear layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for each in linears:
        for part, shape in (("A", (rank, each.size_in)), ("B", (each.module_outputs, rank))):
            tensor = torch.randn(shape, generator=generator, dtype=torch.float32) * 0.02
            tensors[f"base_model.model.{each.name}.lora_{part}.weight"] = tensor.to(DTYPE)
    names = sorted({each.name.rpartition(".")[2] for each in linears})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def place_adapters(adapters: ModelAdapters, rank: int) -> tuple[list[LoadedAdapter], float]:
    """Fill all slots. Return what keeps the adapters in memory, and the seconds to read one."""
    linears = list(adapters.linears)
    loaded, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for slot in range(SLOTS):
            own = Path(folder) / str(slot)
            write_adapter(own, linears, rank, slot)
            began = time.perf_counter()
            loaded.append(adapters.read(own))
            seconds.append(time.perf_counter() - began)
            adapters.place(slot, loaded[-1].digest)
    return loaded, sorted(seconds)[SLOTS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.lora", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads [%(default)s]")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--instruction-set", default="auto", help="instruction set of the kernels [%(default)s]")
    parser.add_argument("--out", type=Path, help="file to which all figures are written as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = NativeKernels(options.threads, options.instruction_set)
    choice = AdapterChoice(SLOTS, AdapterRules(options.rank), DTYPE)
    model = load_model(options.model, DTYPE, kernels, CPU, adapters=choice)
    assert isinstance(model, CompiledModel)
    assert model.adapters is not None
    kept, read = place_adapters(model.adapters, options.rank)
    megabytes = kept[0].nbytes / 1e6
    layout = make_layout(model.group_shapes, DTYPE.itemsize, "bench")
    slots = max(requests * layout.slots_for(context) for requests, _, context in PASSES.values())
    caches = layer_caches(layout, arena_memory(slots * layout.slot_bytes))
    rows, found = [], {}
    with torch.inference_mode():
        for name, (requests, count, context) in PASSES.items():
            batch = make_batch(layout, requests, count, context)
            positions = torch.arange(context - count, context).repeat(requests)
            ids = torch.randint(0, model.config.vocab_size, (requests * count,))
            runs: list[Callable[[], object]] = []
            ways = [number for number in ADAPTERS if number <= requests]
            for number in ways:
                own = torch.tensor(list(itertools.islice(itertools.cycle(range(number or 1)), requests)))
                adapters = own.repeat_interleave(count) if number else None
                inputs = ForwardInputs(ids, positions, caches, replace(batch, adapters=adapters))
                runs.append(lambda inputs=inputs: model.logits(model.forward(inputs, [1] * requests)))  # type: ignore[misc] # noqa: B023
            without, *seconds = medians(options.rounds, *runs)
            found[name] = {str(number): own for number, own in zip(ways, (without, *seconds))}
            for number, own in zip(ways[1:], seconds):
                rows.append([name, str(number), f"{without * 1e3:.2f}", f"{own * 1e3:.2f}", f"{without / own:.3f}"])
    print(table(["pass", "adapters", "ms without", "ms with", "ratio"], rows))
    print(f"read: {read * 1e3:.1f} ms for {megabytes:.1f} MB")
    if options.out is not None:
        options.out.write_text(json.dumps({"seconds": found, "read_seconds": read, "adapter_megabytes": megabytes}))


if __name__ == "__main__":
    main()
