"""Measure decoding of the engine alone as work grows: time and memory against batch size and context length.

    python -m bench.compute.scaling ~/.cache/paceline/smollm2-135m-instruct --out scaling.json --picture scaling.svg

Each run decodes the last tokens of contexts of the given length. The KV of the tokens before is filled already, as on a
decode worker that adopts it. Here it holds random numbers, which take as long to read as any others. CPU time is of all
threads together, so other work on the machine hardly changes it. Memory is of the whole process: weights, the KV of
exactly these contexts, and everything else. Runs whose KV would take more than --kv-gib are left out. The table shows
the best of all rounds, because other work on the machine can only slow a run down; the file has every round.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

from paceline.core import env

env.share_cores()

import torch  # noqa: E402

from bench.common.picture import curves  # noqa: E402
from bench.compute.loop import Run, machine, run  # noqa: E402
from bench.serving.load import new_file, table  # noqa: E402
from paceline.engine.loading import Loaded, load  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
CPU = torch.device("cpu")
STEPS_IN_FLIGHT = 2
TITLES = ("tokens/s", "processor ms a token", "MiB resident")

Runs = dict[tuple[int, int], list[Run]]
"""Runs by context length and batch size."""


def points(loaded: Loaded, contexts: list[int], batches: list[int], most_bytes: float) -> list[tuple[int, int]]:
    """Return the pairs of context and batch whose KV takes at most `most_bytes` bytes."""

    def kv_bytes(context: int) -> int:
        return loaded.layout.slots_for(context) * loaded.layout.slot_bytes

    return [(context, batch) for context in contexts for batch in batches if batch * kv_bytes(context) <= most_bytes]


def measure(loaded: Loaded, context: int, batch: int, tokens: int) -> Run:
    """Run the engine until contexts have `context` tokens. The last `tokens` of them are decoded."""
    source, vocab = random.Random(0), loaded.model.config.vocab_size
    prompts = [source.choices(range(vocab), k=context - tokens) for _ in range(batch)]
    return run(loaded, STEPS_IN_FLIGHT, prompts, tokens, CPU, max_len=context, adopted=True)


def best(runs: list[Run]) -> tuple[float, float, float]:
    """Return the best figures of all rounds: tokens per second, CPU milliseconds per token, resident MiB."""
    return (
        max(one.tokens_per_second for one in runs),
        min(one.cpu_ms for one in runs),
        min(one.resident_bytes for one in runs) / 2**20,
    )


def show(runs: Runs) -> str:
    """Return a table with a line for each context and batch."""
    lines = [[f"{place[0]}, {place[1]}", *map("{:.1f}".format, best(point_runs))] for place, point_runs in runs.items()]
    return table(["context, batch", *TITLES], lines)


def draw(runs: Runs, path: Path) -> None:
    panels: dict[str, dict[str, dict[int, float]]] = {title: defaultdict(dict) for title in TITLES}
    for (context, batch), point_runs in runs.items():
        for lines, value in zip(panels.values(), best(point_runs)):
            lines[f"{context} tokens of context"][batch] = value
    curves(panels, "batch: requests that decode at once", path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="type of weights and activations [%(default)s]",
    )
    parser.add_argument("--batch", type=int, action="append", help=f"may be repeated; default {BATCHES}")
    parser.add_argument("--context", type=int, action="append", help=f"may be repeated; default {CONTEXTS}")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that each request decodes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--kv-gib", type=float, default=7.0, help="largest memory for KV, in GiB [%(default)g]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures of all rounds")
    parser.add_argument("--picture", type=new_file, help="file for a picture")
    args = parser.parse_args()
    loaded = load(args.model, getattr(torch, args.dtype), CPU, select_kernels(CPU, "auto"), None)
    contexts, batches = args.context or list(CONTEXTS), args.batch or list(BATCHES)
    if args.tokens < 2 or not all(args.tokens < context <= loaded.max_position for context in contexts):
        parser.error(f"--tokens must be at least 2, and contexts longer than that and at most {loaded.max_position}")
    runs: Runs = {place: [] for place in points(loaded, contexts, batches, args.kv_gib * 2**30)}
    for number in range(args.rounds):
        for (context, batch), point_runs in runs.items():
            point_runs.append(measure(loaded, context, batch, args.tokens))
            progress = f"round {number + 1}: context {context}, batch {batch}: {point_runs[-1].cpu_ms:.1f} ms a token"
            print(progress, file=sys.stderr)
    print(show(runs))
    if args.out:
        figures = [
            {
                "context": context,
                "batch": batch,
                "tokens_per_second": [one.tokens_per_second for one in point_runs],
                "cpu_ms_a_token": [one.cpu_ms for one in point_runs],
                "resident_bytes": [one.resident_bytes for one in point_runs],
            }
            for (context, batch), point_runs in runs.items()
        ]
        args.out.write_text(json.dumps({"machine": machine(CPU), "figures": figures}, indent=2) + "\n")
    if args.picture:
        draw(runs, args.picture)


if __name__ == "__main__":
    main()
