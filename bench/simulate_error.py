"""Compare simulations with a real stack: the errors of TTFT, ITL and the hit rate for six loads.

    python -m bench.simulate_error ~/.cache/paceline/smollm2-135m-instruct --seconds 60 --out errors.json

For each kind of fleet (a prefill and a decode worker; one worker for both) a stack is started with --record-trace and
profiled. Then each load runs, with an empty cache at its begin. The trace that the gateway recorded is simulated with
the profile. Measured times are those of the client. ITL is the gap between two pieces of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.load import new_file, percentile, table
from bench.services import Process, free_port
from bench.simulate_loads import LOADS, Load, Talk, make_load
from bench.systems import ending_on_sigterm
from paceline.client import GatewayClient
from paceline.core.errors import PacelineError
from paceline.core.step_times import Profile, read_profile
from paceline.profiler.profile import profile
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import simulate
from paceline.simulator.trace import Trace
from paceline.simulator.trace_files import read_trace

REQUEST_SECONDS = 120.0
SETTLE_SECONDS = 2.0
"""Time until the recorder has written its last lines, and the fleet has told its figures."""
Figures = dict[str, float]
"""Seconds, and shares, by their names."""


@dataclass(slots=True)
class Seen:
    """What clients have seen."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def figures(self) -> Figures:
        return {
            "TTFT p50": percentile(self.ttft, 50),
            "TTFT p99": percentile(self.ttft, 99),
            "ITL p50": percentile(self.itl, 50),
            "ITL p99": percentile(self.itl, 99),
        }


class RealStack:
    """A stack of its own for one kind of fleet, with its profile."""

    def __init__(self, url: str, trace: Path, learned: Profile) -> None:
        self.url = url
        self.profile = learned
        self._trace = trace
        self._known_bytes = trace.stat().st_size

    def run(self, load: Load, folder: Path) -> tuple[Figures, Trace]:
        """Run a load. Return what was measured, and its trace."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()
        self._new_lines()
        seen = asyncio.run(_run(self.url, load))
        time.sleep(SETTLE_SECONDS)
        lines = self._new_lines()
        path = folder / f"{load.name}.jsonl"
        path.write_bytes(lines)
        entries = [json.loads(line) for line in lines.splitlines()]
        cached, asked = (sum(entry[name] for entry in entries) for name in ("cached_tokens", "input_length"))
        return {**seen.figures(), "hit rate": cached / asked}, read_trace(path)

    def _new_lines(self) -> bytes:
        """Return what the gateway has recorded since the last call."""
        with self._trace.open("rb") as file:
            file.seek(self._known_bytes)
            lines = file.read()
        self._known_bytes += len(lines)
        return lines


@contextmanager
def real_stack(model: str, folder: Path, aggregated: bool) -> Iterator[RealStack]:
    """Start a stack and profile it, unless the folder has its profile already."""
    port, trace = free_port(), folder / f"trace-{aggregated}.jsonl"
    fleet = ("--prefill=0",) if aggregated else ()
    log = folder / f"serve-{aggregated}.log"
    process = Process(log, "serve", model, f"--port={port}", f"--record-trace={trace}", "--store=none", *fleet)
    try:
        process.wait_for("Ready.")
        path = folder / f"profile-{aggregated}.json"
        if not path.exists():
            profile(GatewayClient(f"http://127.0.0.1:{port}"), path, "", scales=False)
        time.sleep(SETTLE_SECONDS)
        yield RealStack(f"http://127.0.0.1:{port}", trace, read_profile(path))
    finally:
        process.stop()


async def _run(url: str, load: Load) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        begin = time.perf_counter()
        await asyncio.gather(*(_talk(http, model, talk, begin, seen) for talk in load.talks))
    return seen


async def _talk(http: httpx.AsyncClient, model: str, talk: Talk, begin: float, seen: Seen) -> None:
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
        sent, pieces = time.perf_counter(), list[tuple[float, str]]()
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                pieces.append((time.perf_counter(), line))
            if reply.status_code != 200:
                raise RuntimeError(f"a request failed: {pieces}")
        context += _note(pieces, sent, seen)  # parsing waits for the end, because it delays other streams


def _note(pieces: Sequence[tuple[float, str]], sent: float, seen: Seen) -> list[int]:
    """Note the times of an answer's pieces, and return its tokens."""
    tokens: list[int] = []
    last: float | None = None
    for came, line in pieces:
        if not line.startswith("data: {"):
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
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


def simulated(learned: Profile, trace: Trace, aggregated: bool) -> Figures:
    """Return what a simulation of the trace says, with the fleet that the stack had."""
    scenario = Scenario(learned, 0 if aggregated else 1, 1, is_aggregated=aggregated, workers_per_host=2)
    (own,) = simulate(scenario, trace).classes.values()
    return {
        "TTFT p50": own.ttft.p50,
        "TTFT p99": own.ttft.p99,
        "ITL p50": own.itl.p50,
        "ITL p99": own.itl.p99,
        "hit rate": own.hit_rate,
    }


def error_of(measured: float, simulated: float) -> float:
    """Return the relative error; of two zeros, 0."""
    return abs(simulated - measured) / measured if measured else math.inf if simulated else 0.0


def report(found: dict[str, tuple[Figures, Figures]]) -> str:
    """Return a table: measured, simulated and the error of each figure, by load."""
    rows = [
        [
            load,
            name,
            _shown(name, measured[name]),
            _shown(name, simulated[name]),
            f"{error_of(measured[name], simulated[name]):.0%}",
        ]
        for load, (measured, simulated) in found.items()
        for name in measured
    ]
    return table(["load", "figure", "measured", "simulated", "error"], rows)


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "hit rate" else f"{1000 * value:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate_error", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--load", action="append", choices=LOADS, help="may be repeated; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="time in which the requests of a load arrive")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for profiles, traces and logs, whose profiles are used again; default: they are removed",
    )
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    ending_on_sigterm()
    loads = [make_load(name, options.seconds, options.seed) for name in options.load or LOADS]
    found: dict[str, tuple[Figures, Figures]] = {}
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            for aggregated in sorted({load.aggregated for load in loads}):
                with real_stack(options.model, folder, aggregated) as stack:
                    for load in (load for load in loads if load.aggregated == aggregated):
                        measured, trace = stack.run(load, folder)
                        found[load.name] = measured, simulated(stack.profile, trace, aggregated)
                        print(report({load.name: found[load.name]}), flush=True)
    except (PacelineError, RuntimeError, TimeoutError, httpx.HTTPError) as error:
        print(f"bench.simulate_error: {error}", file=sys.stderr)
        return 1
    print(report(found))
    if options.out:
        figures = {name: {"measured": one, "simulated": other} for name, (one, other) in found.items()}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
