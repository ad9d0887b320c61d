"""Measure the decode loop on a GPU: gain of running ahead and of drafts, cost of batch-invariant kernels.

    python -m bench.gpu.decode_loop --out decode_loop.json
    python -m bench.gpu.decode_loop --out decode_loop.json --small    # a tiny model on any machine, in seconds

The model has the shape of Llama 3 8B in bf16, with random weights made on the device (16 GB; 8.6 GB of KV at batch 64).
Each round runs every way in turn on the same prompts, which repeat themselves. All ways except the last use the
batch-invariant kernels and must give the same tokens; if they do not, the command ends with status 1. The last way only
shows the speed without batch invariance. Figures are the engine's own counters, and device times from CUDA events.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core import env

env.share_cores()

import torch  # noqa: E402

from bench.compute.loop import Run, machine, print_header, print_rows, run, summary  # noqa: E402
from bench.gpu.random_model import CIRCLE, LLAMA_8B, TINY, RandomWeights, load_random  # noqa: E402
from bench.gpu.step_clock import DeviceTimes, StepClock, WatchedModel  # noqa: E402
from paceline.core.speculative import SpeculativeConfig  # noqa: E402
from paceline.engine.loading import Loaded  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402


class Way(NamedTuple):
    name: str
    steps_in_flight: int
    speculative: SpeculativeConfig | None
    kernels: str


class Setting(NamedTuple):
    weights: RandomWeights
    batches: tuple[int, ...]
    prompt_len: int
    max_tokens: int
    ways: tuple[Way, ...]


def setting(small: bool, device: torch.device) -> Setting:
    """Return the setting of the runs. On a CPU, the kernels are those of a worker on a CPU."""
    config = TINY if small else LLAMA_8B
    invariant, fastest = ("triton-invariant", "triton") if device.type == "cuda" else ("auto", "auto")
    ngram = SpeculativeConfig("ngram", num_speculative_tokens=8)
    early = SpeculativeConfig("early_layers", num_speculative_tokens=4, num_layers=config.num_layers // 4)
    ways = (
        Way("one step", 1, None, invariant),
        Way("two steps", 2, None, invariant),
        Way("one step, ngram", 1, ngram, invariant),
        Way("two steps, ngram", 2, ngram, invariant),
        Way("one step, early layers", 1, early, invariant),
        Way("two steps, early layers", 2, early, invariant),
        Way("two steps, any order of adding", 2, None, fastest),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = RandomWeights(config, dtype, device)
    return Setting(weights, (1, 3), 40, 64, ways) if small else Setting(weights, (1, 16, 64), 512, 128, ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all figures")
    parser.add_argument("--small", action="store_true", help="a tiny model, on whatever device there is")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        parser.error("there is no CUDA device here; --small runs a tiny model on the CPU")
    chosen = setting(options.small, device)
    print_header()
    results = [measure(chosen, batch, options.rounds, device) for batch in chosen.batches]
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")
    if differing := [result["batch"] for result in results if not result["tokens_are_equal"]]:
        sys.exit(f"tokens differ between the ways at batch {differing}")


def measure(chosen: Setting, batch: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure all ways at one batch size."""
    prompts = [repeating_prompt(index, chosen.prompt_len, chosen.weights.config.vocab_size) for index in range(batch)]
    clock = StepClock(device)
    loads = {way.name: _load(chosen.weights, way, device, clock) for way in chosen.ways}
    runs: dict[str, list[Run]] = {way.name: [] for way in chosen.ways}
    times: dict[str, list[DeviceTimes]] = {way.name: [] for way in chosen.ways}
    # A warm-up round that does not count comes first: kernels are compiled and tuned in it.
    for counts in [False] + [True] * rounds:
        for way in chosen.ways:
            ended = run(loads[way.name], way.steps_in_flight, prompts, chosen.max_tokens, device, clock.watch)
            if counts:
                runs[way.name].append(ended)
                times[way.name].append(clock.times())
    figures = summary(runs)
    print_rows("repeats", batch, figures)
    device_figures = {name: _medians(run_times) for name, run_times in times.items()}
    _print_times(device_figures)
    compared = [figures[way.name] for way in chosen.ways[:-1]]
    return {
        "batch": batch,
        "tokens_are_equal": all(values["same_requests"] == values["requests"] for values in compared),
        "ways": {name: way_figures | device_figures[name] for name, way_figures in figures.items()},
        "gain_of_running_ahead": _ratio(figures, "two steps", "one step"),
        "gain_of_ngram": _ratio(figures, "two steps, ngram", "two steps"),
        "gain_of_early_layers": _ratio(figures, "two steps, early layers", "two steps"),
        "price_of_one_order_of_adding": _ratio(figures, "two steps, any order of adding", "two steps"),
    }


def repeating_prompt(index: int, length: int, vocab_size: int) -> list[int]:
    """Repeat two circles of the random model and a jump between them. Every request has circles of its own."""
    first = index * 2 * CIRCLE
    piece = [*range(first, first + 2 * CIRCLE), first + CIRCLE // 2]
    return [(piece * (length // len(piece) + 1))[place] % vocab_size for place in range(length)]


def _load(weights: RandomWeights, way: Way, device: torch.device, clock: StepClock) -> Loaded:
    loaded = load_random(weights, select_kernels(device, way.kernels), way.speculative)
    return dataclasses.replace(loaded, model=WatchedModel(loaded.model, clock))


def _medians(rounds: Sequence[DeviceTimes]) -> dict[str, float]:
    """Return the median of each figure, by name."""
    names = [field.name for field in dataclasses.fields(DeviceTimes)]
    return {f"device_{name}": statistics.median(getattr(times, name) for times in rounds) for name in names}


def _print_times(figures: Mapping[str, Mapping[str, float]]) -> None:
    for name, way_figures in figures.items():
        idle, forward, rest, bubble = way_figures.values()
        print(
            f"{'':<15}{name:<32}device: idle {idle:.3f} ms, forward {forward:.3f}, rest {rest:.3f}, {bubble:.2%} idle"
        )


def _ratio(figures: Mapping[str, Mapping[str, float]], name: str, base: str) -> float:
    return figures[name]["tokens_per_second"] / figures[base]["tokens_per_second"]


if __name__ == "__main__":
    main()
