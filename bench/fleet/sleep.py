"""Let a model sleep and wake several times, and measure how long this takes and how much memory is given back.

    python -m bench.fleet.sleep --rounds 5
    python -m bench.fleet.sleep --model FOLDER --json /tmp/sleep.json -- --kv-memory 1GiB

Arguments after -- go to `paceline serve`. Seconds are those of the calls /sleep and /wake_up, and from the begin of
/wake_up to the first token of a request that is sent after it. Memory is that of the packed weights that workers have
mapped (proportional shares, PSS), and the allocated size of the arena's file. "cached" is what the system's cache has
of the files of weights during the sleep: level 1 leaves it there, where it makes room for whoever needs memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from bench.common.services import names_by_pid, serving
from bench.common.systems import ending_on_sigterm
from bench.serving.load import table

MIB = 1 << 20
LEVELS = (1, 2)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a stack that may be given back, in MiB."""

    weights: float
    kv: float


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one sleep. Times are in seconds."""

    level: int
    sleep: float
    wake: float
    first_token: float
    awake: Memory
    asleep: Memory
    cached: float
    """MiB of the files of weights in the system's cache during the sleep."""


def measure(url: str, workers: Sequence[psutil.Process], level: int) -> Round:
    _ask(url)
    awake, files = _memory(workers), _weight_files(workers)
    slept = _post(f"{url}/sleep?level={level}")
    asleep, cached = _memory(workers), _cached(files)
    began = time.perf_counter()
    woken = _post(f"{url}/wake_up")
    _ask(url)
    return Round(level, slept, woken, time.perf_counter() - began, awake, asleep, cached)


def _post(url: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, b"")) as reply:
        reply.read()
    return time.perf_counter() - began


def _ask(url: str) -> None:
    """Send a request with a new prompt, and return at its end after one token."""
    body = json.dumps({"prompt": f"{time.time_ns()}: once upon a time", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        reply.read()


def _memory(workers: Sequence[psutil.Process]) -> Memory:
    maps = [each for worker in workers for each in worker.memory_maps()]
    arenas = {each.path for each in maps if each.path.endswith(".arena")}
    weights = sum(each.pss for each in maps if ".shards/" in each.path)
    return Memory(weights / MIB, sum(os.stat(path).st_blocks * 512 for path in arenas) / MIB)


def _weight_files(workers: Sequence[psutil.Process]) -> list[str]:
    return sorted({each.path for worker in workers for each in worker.memory_maps() if ".shards/" in each.path})


def _cached(files: Sequence[str]) -> float:
    """Return the MiB of files in the system's cache, as util-linux counts them."""
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sum(map(int, done.stdout.split())) / MIB


def rows(rounds: Sequence[Round]) -> list[list[str]]:
    """Return the medians of each level."""
    found = []
    for level in LEVELS:
        own = [each for each in rounds if each.level == level]

        def median(values: Sequence[float]) -> float:
            return statistics.median(values)

        weights = median([each.awake.weights for each in own]), median([each.asleep.weights for each in own])
        kv = median([each.awake.kv for each in own]), median([each.asleep.kv for each in own])
        given = 1 - (weights[1] + kv[1]) / (weights[0] + kv[0])
        found.append(
            [
                str(level),
                *(f"{median([getattr(each, name) for each in own]):.2f}" for name in ("sleep", "wake", "first_token")),
                f"{weights[0]:.0f} to {weights[1]:.1f}",
                f"{kv[0]:.0f} to {kv[1]:.1f}",
                f"{given:.1%}",
                f"{median([each.cached for each in own]):.0f}",
            ]
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.sleep", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name, folder or GGUF file [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="sleeps of each level [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`")
    options = parser.parse_args()
    ending_on_sigterm()
    rounds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder, "log"), options.model, *options.flags) as (
            stack,
            url,
        ),
    ):
        names = names_by_pid(stack).items()
        workers = [psutil.Process(pid) for pid, name in names if name.split("-")[0] in ("prefill", "decode")]
        for _ in range(options.rounds):
            for level in LEVELS:
                rounds.append(measure(url, workers, level))
                print(f"level {level}: awake after {rounds[-1].wake:.2f} s", file=sys.stderr)
    titles = ["level", "sleep s", "wake s", "first token s", "weights MiB", "KV MiB", "given back", "cached MiB"]
    print(table(titles, rows(rounds)))
    if options.json:
        options.json.write_text(json.dumps({"flags": options.flags, "rounds": [asdict(each) for each in rounds]}))


if __name__ == "__main__":
    main()
