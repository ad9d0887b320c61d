"""Compare simulations with a real stack: the errors of TTFT, ITL and the hit rate for seven loads.

    python -m bench.fleet.simulate_error ~/.cache/paceline/smollm2-135m-instruct --out errors.json

For each kind of fleet (a prefill and a decode worker; one worker for both) a stack is started with --record-trace.
In each of --rounds rounds it is profiled, and then each load runs once, with an empty cache. The traces that the
gateway recorded are simulated with the profile of their round, because a shared machine changes its speed meanwhile.
Each trace is simulated with SEEDS seeds, and the tables show the medians of their figures. Measured times are those of
the client. ITL is the gap between two pieces of an answer.

The requests of all runs of a load are the same, so the difference between the runs shows how much the machine itself
changes. A round takes about eight minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.common.services import Process, free_port
from bench.common.systems import ending_on_sigterm
from bench.fleet.simulate_loads import LOADS, Load, Talk, make_load
from bench.serving.load import events_of, new_file, percentile, table
from paceline.client import GatewayClient
from paceline.core.errors import PacelineError
from paceline.core.step_times import Profile, read_profile
from paceline.profiler.profile import profile
from paceline.simulator.recorder import ClassRecord, Times
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import Simulation
from paceline.simulator.trace import LoadTrace
from paceline.simulator.trace_files import read_trace

REQUEST_SECONDS = 120.0
SEEDS = 9
"""Simulations of each run. Which requests get the rare delays depends on the seed."""
SETTLE_SECONDS = 2.0
"""Time until the recorder has written its last lines, and the fleet has told its figures."""
Figures = dict[str, float]
"""Seconds, and shares, by their names."""
Pieces = Sequence[tuple[float, bytes]]
"""Instants and bytes of the pieces of an answer."""


@dataclass(slots=True)
class Seen:
    """The measurements of clients, and the lines that the gateway has recorded."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def figures(self) -> Figures:
        cached, asked = (sum(line[name] for line in self.lines) for name in ("cached_tokens", "input_length"))
        return {
            "TTFT p50": percentile(self.ttft, 50),
            "TTFT p99": percentile(self.ttft, 99),
            "ITL p50": percentile(self.itl, 50),
            "ITL p99": percentile(self.itl, 99),
            "hit rate": cached / asked,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load, measured and simulated."""

    measured: Figures
    """Figures over all runs together."""
    runs: list[Figures]
    simulated: Figures
    """Medians over the seeds."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a load, and the simulations of what was recorded, one for each seed."""

    seen: Seen
    simulated: list[ClassRecord]


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare all runs of a load with their simulations."""
    seen = [run.seen for run in runs]
    together = Seen(*([each for run in seen for each in getattr(run, name)] for name in ("ttft", "itl", "lines")))
    by_seed = [figures_of(figures) for figures in zip(*(run.simulated for run in runs), strict=True)]
    simulated = {name: statistics.median(values[name] for values in by_seed) for name in by_seed[0]}
    return Comparison(together.figures(), [run.figures() for run in seen], simulated)


class RealStack:
    """A stack of its own for one kind of fleet.

    Args:
        trace: the file that its gateway records.
        folder: gets profiles and the trace of each run.
    """

    def __init__(self, url: str, trace: Path, folder: Path, aggregated: bool) -> None:
        self.url = url
        self._trace = trace
        self._folder = folder
        self._aggregated = aggregated
        self._known_bytes = trace.stat().st_size

    def profile(self, number: int) -> Profile:
        """Return the profile of a round, which is measured unless the folder has it already."""
        path = self._folder / f"profile-{self._aggregated}-{number}.json"
        if not path.exists():
            profile(GatewayClient(self.url), path, "", scales=False)
            time.sleep(SETTLE_SECONDS)
        return read_profile(path)

    def run(self, load: Load, number: int, learned: Profile) -> Run:
        """Run a load in a round, and simulate what was recorded."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()
        self._new_lines()
        seen = asyncio.run(_run(self.url, load))
        time.sleep(SETTLE_SECONDS)
        lines = self._new_lines()
        path = self._folder / f"{load.name} {number}.jsonl"
        path.write_bytes(lines)
        seen.lines = [json.loads(line) for line in lines.splitlines()]
        # Runs with the same seeds would have the same rare delays, at the same requests.
        seeds = range(SEEDS * number, SEEDS * (number + 1))
        return Run(seen, [simulate(learned, read_trace(path), load.aggregated, seed) for seed in seeds])

    def _new_lines(self) -> bytes:
        """Return the lines that the gateway has recorded since the last call."""
        with self._trace.open("rb") as file:
            file.seek(self._known_bytes)
            lines = file.read()
        self._known_bytes += len(lines)
        return lines


@contextmanager
def real_stack(model: str, folder: Path, aggregated: bool) -> Iterator[RealStack]:
    """Start a stack."""
    port, trace = free_port(), folder / f"trace-{aggregated}.jsonl"
    fleet = ("--prefill=0",) if aggregated else ()
    log = folder / f"serve-{aggregated}.log"
    process = Process(log, "serve", model, f"--port={port}", f"--record-trace={trace}", "--store=none", *fleet)
    try:
        process.wait_for("Ready.")
        time.sleep(SETTLE_SECONDS)
        yield RealStack(f"http://127.0.0.1:{port}", trace, folder, aggregated)
    finally:
        process.stop()


async def _run(url: str, load: Load) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Accept-Encoding": "identity"}
    answers = list[tuple[float, Pieces]]()
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=REQUEST_SECONDS, limits=limits, trust_env=False
    ) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        begin = time.perf_counter()
        await asyncio.gather(*(_talk(http, model, talk, begin, seen, answers) for talk in load.talks))
    for sent, pieces in answers:
        _note(pieces, sent, seen)
    return seen


async def _talk(
    http: httpx.AsyncClient, model: str, talk: Talk, begin: float, seen: Seen, answers: list[tuple[float, Pieces]]
) -> None:
    """Have a conversation. The last answer is added to `answers` with the time when it was asked for."""
    await asyncio.sleep(max(0.0, begin + talk.at - time.perf_counter()))
    context: list[int] = []
    for turn in talk.turns:
        await asyncio.sleep(turn.after)
        context += turn.tokens
        body = {
            "model": model,
            "prompt": context,
            "max_tokens": turn.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        sent, pieces = time.perf_counter(), list[tuple[float, bytes]]()
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for piece in reply.aiter_raw():
                pieces.append((time.perf_counter(), piece))
            if reply.status_code != 200:
                raise RuntimeError(f"a request failed: {pieces}")
        if turn is talk.turns[-1]:
            answers.append((sent, pieces))  # parsing waits until the load is over, because it delays other streams
        else:
            context += _note(pieces, sent, seen)


def _note(pieces: Pieces, sent: float, seen: Seen) -> list[int]:
    """Note the times of an answer's pieces, and return its tokens."""
    tokens: list[int] = []
    last: float | None = None
    for came, data in events_of(pieces):
        if data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"a request failed: {event['error']}")
        ids = [each for choice in event["choices"] for each in choice.get("token_ids") or ()]
        if not ids:
            continue
        if last is None:
            seen.ttft.append(came - sent)
        else:
            seen.itl.append(came - last)
        last = came
        tokens += ids
    return tokens


def simulate(learned: Profile, trace: LoadTrace, aggregated: bool, seed: int) -> ClassRecord:
    """Return the result of a simulation of a trace, with the fleet that the stack had."""
    scenario = Scenario(learned, 0 if aggregated else 1, 1, is_aggregated=aggregated, seed=seed)
    simulation = Simulation(scenario, trace)
    simulation.run()
    (record,) = simulation.recorder.classes.values()
    return record


def figures_of(runs: Sequence[ClassRecord]) -> Figures:
    """Return the figures of some simulations together."""
    ttft, itl = [each for one_run in runs for each in one_run.ttft], Times.merged(one_run.itl for one_run in runs)
    return {
        "TTFT p50": percentile(ttft, 50),
        "TTFT p99": percentile(ttft, 99),
        "ITL p50": itl.percentile(0.50),
        "ITL p99": itl.percentile(0.99),
        "hit rate": sum(one_run.cached_tokens for one_run in runs) / sum(one_run.prompt_tokens for one_run in runs),
    }


def error_of(measured: float, simulated: float) -> float:
    """Return the relative error; of two zeros, 0."""
    return abs(simulated - measured) / measured if measured else math.inf if simulated else 0.0


def report(found: dict[str, Comparison]) -> str:
    """Return a table of each figure, by load: measured, how far the runs are apart, simulated, and the error."""
    rows = [
        [
            load,
            name,
            _shown(name, comparison.measured[name]),
            f"{error_of(min(run[name] for run in comparison.runs), max(run[name] for run in comparison.runs)):.0%}",
            _shown(name, comparison.simulated[name]),
            f"{error_of(comparison.measured[name], comparison.simulated[name]):.0%}",
        ]
        for load, comparison in found.items()
        for name in comparison.measured
    ]
    return table(["load", "figure", "measured", "runs differ", "simulated", "error"], rows)


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "hit rate" else f"{1000 * value:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.simulate_error", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--load", action="append", choices=LOADS, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=2, help="profiles of each stack, and runs of each load [2]")
    parser.add_argument("--seconds", type=float, default=60.0, help="time in which the requests of each run arrive")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for profiles, traces and logs, whose profiles are used again; default: they are removed",
    )
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    ending_on_sigterm()
    loads = [make_load(name, options.seconds, options.seed) for name in options.load or LOADS]
    runs = defaultdict[str, list[Run]](list)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            for aggregated in sorted({load.aggregated for load in loads}):
                with real_stack(options.model, folder, aggregated) as stack:
                    for number in range(1, options.rounds + 1):
                        learned = stack.profile(number)
                        for load in (load for load in loads if load.aggregated == aggregated):
                            runs[load.name].append(stack.run(load, number, learned))
                            print(report({load.name: compare(runs[load.name])}), flush=True)
    except (PacelineError, RuntimeError, TimeoutError, httpx.HTTPError) as error:
        print(f"bench.fleet.simulate_error: {error}", file=sys.stderr)
        return 1
    found = {name: compare(load_runs) for name, load_runs in runs.items()}
    print(report(found))
    if options.out:
        figures = {name: dataclasses.asdict(comparison) for name, comparison in found.items()}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
