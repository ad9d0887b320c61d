"""What loading adapters costs the requests that run: times between steps, with and without loads beside them.

    python -m bench.compute.lora_loading ~/.cache/paceline/smollm2-135m-instruct [--threads 2] [--rank 16] [--out FILE]

The engine decodes for some requests without adapters. In every second run, a thread reads one random adapter of all
linear layers after the other, as a worker does. The ways take turns. "delay" is the difference of two quantiles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core import env

env.share_cores()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from bench.compute.forward import CPU, DTYPE  # noqa: E402
from bench.compute.loop import run  # noqa: E402
from bench.compute.lora import write_adapter  # noqa: E402
from bench.serving.load import table  # noqa: E402
from paceline.core.machine import yield_to_others  # noqa: E402
from paceline.engine.compute_thread import Runner  # noqa: E402
from paceline.engine.loading import load  # noqa: E402
from paceline.engine.step import Step, StepResult  # noqa: E402
from paceline.kernels.native import NativeKernels  # noqa: E402
from paceline.models.adapters.loading import AdapterRules  # noqa: E402
from paceline.models.adapters.model_adapters import ModelAdapters  # noqa: E402
from paceline.models.loader import AdapterChoice  # noqa: E402

QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass
class StepTimes:
    """A runner that notes the end of each step of another one."""

    runner: Runner
    ends: list[float] = field(default_factory=list)

    def execute(self, step: Step) -> StepResult:
        result = self.runner.execute(step)
        self.ends.append(time.perf_counter())
        return result


@contextlib.contextmanager
def reading(adapters: ModelAdapters, folder: Path, pause: float) -> Iterator[list[float]]:
    """Read an adapter again and again on a thread while the context is open. Yield the seconds of all readings.

    Args:
        pause: seconds between two readings.
    """
    seconds: list[float] = []
    over = threading.Event()

    def read() -> None:
        yield_to_others()
        while not over.wait(pause):
            began = time.perf_counter()
            adapters.read(folder)
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=read, name="adapters")
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compute.lora_loading", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads [%(default)s]")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters [%(default)s]")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together [%(default)s]")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each request [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two loads [%(default)s]")
    parser.add_argument("--out", type=Path, help="file to which all figures are written as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choice = AdapterChoice(8, AdapterRules(options.rank), DTYPE)
    loaded = load(options.model, DTYPE, CPU, NativeKernels(options.threads), None, adapters=choice)
    assert loaded.adapters is not None
    prompts = [[index + 1] * 64 for index in range(options.batch)]
    gaps: dict[str, list[float]] = {"no loads": [], "loads beside": []}
    reads: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "adapter"
        write_adapter(folder, list(loaded.adapters.linears), options.rank, 0)
        for _ in range(options.rounds):
            for way, found in gaps.items():
                watched: list[StepTimes] = []

                def watch(runner: Runner, watched: list[StepTimes] = watched) -> Runner:
                    watched.append(StepTimes(runner))
                    return watched[-1]

                beside = reading(loaded.adapters, folder, options.pause) if way != "no loads" else None
                with beside or contextlib.nullcontext([]) as seconds:
                    run(loaded, 2, prompts, options.tokens, CPU, watch)
                reads += seconds
                found += np.diff(watched[0].ends)[8:].tolist()  # without those of prompts
    figures = {way: np.quantile(found, QUANTILES).tolist() for way, found in gaps.items()}
    figures["delay"] = np.subtract(figures["loads beside"], figures["no loads"]).tolist()
    rows = [[way, *(f"{1e3 * value:.2f}" for value in values)] for way, values in figures.items()]
    print(table(["ms between steps", "p50", "p90", "p99", "most"], rows))
    print(f"{len(reads)} loads of {1e3 * float(np.median(reads)):.1f} ms")
    if options.out is not None:
        options.out.write_text(json.dumps({"seconds": figures, "read_seconds": reads}))


if __name__ == "__main__":
    main()
