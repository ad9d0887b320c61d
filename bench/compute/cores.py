"""Measure how well the native kernels share work among cores that differ in speed, or in their distance to memory.

    python -m bench.compute.cores [--rows 1 8 512] [--busy 1] [--instruction-set avx2]

Each core that this process may use first computes alone. Their rates may differ: cores are fast or slow, share a
physical core, or belong to a CPU quota. Then all compute together. The share is the rate together, divided by the sum
of the rates alone; it is below 100 % if slow cores hold up fast ones, and also if memory is too slow for all. With
--busy, another process works on a core all the time, as a model of a core of half the speed.

If there are several NUMA nodes, the cores of each node also read weights in the memory of each node. The rates tell
whether a copy for each node would pay.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bench.compute.kernels import layers_pass
from paceline.kernels.native import NativeKernels

SHAPES = ((576, 576), (576, 1536), (1536, 576))
"""Inputs and outputs of the linear layers, as in SmolLM2-135M."""
LAYERS = 40
RUN_SECONDS = 0.3
"""Time of one measurement. It is long enough for both processes on a busy core to have many turns."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.cores", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], help="rows of the linear layers")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each rate; the median counts")
    parser.add_argument("--busy", type=int, action="append", default=[], help="core on which another process works")
    parser.add_argument("--instruction-set", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cores, nodes = sorted(os.sched_getaffinity(0)), nodes_of()
    with torch.inference_mode(), ExitStack() as stack:
        for core in options.busy:
            stack.enter_context(busy(core))
        for rows in options.rows:

            def rate(team: Sequence[int], memory: Sequence[int] = (), rows: int = rows) -> float:
                return measure(team, memory or team, rows, options.rounds, options.instruction_set)

            alone = {core: rate([core]) for core in cores}
            together = rate(cores)
            print(f"{rows} rows: {together:.1f} GFLOP/s together, {together / sum(alone.values()):.0%} of the sum of")
            print("   " + ", ".join(f"core {core}: {core_rate:.1f}" for core, core_rate in alone.items()), flush=True)
            for name, team in nodes.items() if len(nodes) > 1 else ():
                node_rates = ", ".join(f"{other}: {rate(team, memory):.1f}" for other, memory in nodes.items())
                print(f"   cores of {name}, with weights in the memory of {node_rates}", flush=True)


def measure(team: Sequence[int], memory: Sequence[int], rows: int, rounds: int, instruction_set: str) -> float:
    """Return GFLOP/s of linear layers, computed by the cores `team`, with weights that the cores `memory` wrote."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, memory)
        start = make(len(team), rows, instruction_set)
        os.sched_setaffinity(0, team)
        run = start()
        operations = 2.0 * rows * LAYERS * sum(a * b for a, b in SHAPES)
        return operations / 1e9 / statistics.median(seconds(run) for _ in range(rounds))
    finally:
        os.sched_setaffinity(0, before)


def make(threads: int, rows: int, instruction_set: str) -> Callable[[], Callable[[], object]]:
    """Make weights. Return a function that starts threads on the cores that are allowed then, and returns a pass."""
    packer = NativeKernels(1, instruction_set)
    inputs = {size_in: torch.randn(rows, size_in).bfloat16() for size_in, _ in SHAPES}
    layers = [
        [packer.pack(torch.randn(size_out, size_in).bfloat16()) for _ in range(LAYERS)] for size_in, size_out in SHAPES
    ]

    def start() -> Callable[[], object]:
        kernels = NativeKernels(threads, instruction_set)
        passes = [layers_pass(kernels, weight, inputs[size_in]) for weight, (size_in, _) in zip(layers, SHAPES)]
        return lambda: [run() for run in passes]

    return start


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a run: the mean over as many runs as fit into RUN_SECONDS."""
    run()
    began, count = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < RUN_SECONDS:
        run()
        count += 1
    return took / count


@contextmanager
def busy(core: int) -> Iterator[int]:
    """Keep a core busy with another process, whose id is yielded."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, [core])
        yield process.pid
    finally:
        process.kill()
        process.wait()


def nodes_of(root: Path = Path("/sys/devices/system/node")) -> dict[str, list[int]]:
    """Return the cores of each NUMA node that this process may use."""
    found = {}
    for folder in sorted(root.glob("node[0-9]*")):
        parts = [part.split("-") for part in (folder / "cpulist").read_text().strip().split(",") if part]
        cores = {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
        if allowed := sorted(cores & os.sched_getaffinity(0)):
            found[folder.name] = allowed
    return found


if __name__ == "__main__":
    main()
