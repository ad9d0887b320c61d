"""Measure the control plane of a large fleet: a real Redis, real gateways, and stand-ins that speak the real protocol.

    python -m bench.fleet.control_plane ~/.cache/paceline/smollm2-135m-instruct --workers 2000 --json control.json

Each stand-in has a server, a registration and a heartbeat of its own; a few processes hold all of them, and half of
these reach Redis through a gate that can be shut. Eight workers are a host with a list of cached blocks. Measured are

- CPU time of Redis and the gateways while nothing happens, and under a stream of requests; CPU time of a placement;
- memory of a gateway at its start and with the whole fleet;
- how long it takes until every gateway knows that a worker joins, drains, leaves, or was killed;
- requests that fail while Redis is flushed, killed, stopped, and split from half of the fleet.

The stand-ins' own CPU time is shown apart. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import redis.asyncio

from bench.common.systems import ending_on_sigterm
from bench.common.workloads import Request, Workload
from bench.fleet.control_plane_parts import GatewayProcess, Stage, placement_seconds
from bench.serving.load import Outcome, Server, new_file, percentile, table

SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 768, 256, 16
PROMPTS = 20
"""Number of beginnings of SHARED_TOKENS that requests share."""
SEEN_SECONDS = 30.0
"""Longest wait until a change is seen."""

Figures = dict[str, float]


@dataclass
class Report:
    """Everything that was measured. Times are in seconds, memory in MB, and CPU in % of one core."""

    workers: int
    gateways: int
    memory: Figures = field(default_factory=dict)
    joining: Figures = field(default_factory=dict)
    quiet: Figures = field(default_factory=dict)
    busy: Figures = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    """For each kind of change, the times until the last gateway knew of it."""
    faults: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(fault["failed"] for fault in self.faults.values()) + int(self.busy.get("failed", 0))


def requests(ids: range, rate: float, seconds: float, seed: int) -> tuple[Request, ...]:
    """Return requests that arrive at random, and share the beginnings of their prompts, which have these token ids."""
    draw = random.Random(seed)
    shared = random.Random("shared")
    beginnings = [tuple(shared.choices(ids, k=SHARED_TOKENS)) for _ in range(PROMPTS)]
    found, at = [], 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        new_tokens = tuple(draw.choices(ids, k=OWN_TOKENS))
        found.append(Request(draw.choice(beginnings) + new_tokens, ANSWER_TOKENS, at=at))
    return tuple(found)


class ControlPlane:
    """The measurements of one stage."""

    def __init__(self, stage: Stage, options: argparse.Namespace) -> None:
        self._stage = stage
        self._options = options
        self._seeds = itertools.count(options.seed)
        self.report = Report(options.workers, options.gateways)

    async def measure(self) -> Report:
        await self._join_all()
        await self._use("quiet", self._nothing)
        await self._use("busy", self._stream)
        await self._change()
        faults: dict[str, Callable[[], Awaitable[None]]] = {
            "flushed": self._flush,
            "killed": self._kill,
            "stopped": self._stop,
            "split": self._split,
        }
        for name, fault in faults.items():
            self.report.faults[name] = await self._suffer(fault)
        return self.report

    async def _join_all(self) -> None:
        """Start all stand-ins, and wait until every gateway knows them and has closed idle connections."""
        stage, report = self._stage, self.report
        report.memory = {f"{name}, empty": use for name, use in stage.memory().items()}
        began, before = time.monotonic(), stage.cpu_seconds()
        await stage.start_workers(self._options.workers, self._options.blocks)
        for gateway in stage.gateways:
            await gateway.wait_for("joined at", stage.members, SEEN_SECONDS)
        report.joining = {"seconds": time.monotonic() - began}
        report.joining |= {
            f"CPU seconds of {name}": use - before.get(name, 0.0) for name, use in stage.cpu_seconds().items()
        }
        await asyncio.sleep(self._options.settle)
        report.memory |= {f"{name}, {stage.members} members": use for name, use in stage.memory().items()}

    async def _nothing(self) -> list[Outcome]:
        await asyncio.sleep(self._options.seconds)
        return []

    async def _stream(self, seconds: float | None = None) -> list[Outcome]:
        """Send requests to all gateways in turn."""
        options, stage = self._options, self._stage
        seconds = options.seconds if seconds is None else seconds
        due = requests(range(*options.ids), options.rate, seconds, next(self._seeds))
        parts = [due[number :: len(stage.gateways)] for number in range(len(stage.gateways))]
        runs = (_send(gateway, part) for gateway, part in zip(stage.gateways, parts))
        return [outcome for outcomes in await asyncio.gather(*runs) for outcome in outcomes]

    async def _use(self, what: str, run: Callable[[], Awaitable[list[Outcome]]]) -> None:
        """Measure the CPU time of everything during `run`."""
        stage = self._stage
        placed = await stage.placements()
        began, before = time.monotonic(), await stage.all_cpu_seconds()
        outcomes = await run()
        seconds, after = time.monotonic() - began, await stage.all_cpu_seconds()
        figures = {f"{name}, % of a core": 100 * (after[name] - before[name]) / seconds for name in before}
        if outcomes:
            counts = {bound: count - placed.get(bound, 0) for bound, count in (await stage.placements()).items()}
            figures |= placement_seconds(counts)
            ttft = [outcome.chunks[0] - outcome.sent for outcome in outcomes if outcome.chunks]
            figures |= {"requests": len(outcomes), "failed": _failed(outcomes)}
            figures |= {f"TTFT, s, p{share}": percentile(ttft, share) for share in (50, 99)}
        setattr(self.report, what, figures)

    async def _change(self) -> None:
        """Let workers join, leave and die, and note when the gateways know."""
        stage, seen = self._stage, self.report.seen
        fleet = stage.fleets[0]
        for number in range(self._options.changes):
            name = f"new-{number}"
            await self._note("joined", name, "joined at", fleet.tell(f"add {name} decode"))
            left = await fleet.tell(f"remove {name}")
            await self._note("left: no more requests", name, "does not answer", _at(left))
            await self._note("left: gone", name, "is gone", _at(left))
        for number in range(self._options.changes):
            victim = await stage.start_victim(f"victim-{number}-")
            name = f"victim-{number}-0000"
            for gateway in stage.gateways:
                await gateway.wait_for(f"{name} joined at", 1, SEEN_SECONDS)
            await asyncio.sleep(random.uniform(1.0, 2.0))  # at any time between two heartbeats
            died = await victim.kill()
            await self._note("killed: no more requests", name, "does not answer", _at(died))
            await self._note("killed: gone", name, "is gone", _at(died))
            for gateway in stage.gateways:  # the victim's host, whose name ends in the same way, has died with it
                await gateway.wait_for(f"{name} is gone", 2, SEEN_SECONDS)
        assert all(len(each) == self._options.changes for each in seen.values())

    async def _note(self, what: str, name: str, line: str, happened: Awaitable[float]) -> None:
        """Note how long it took until the last gateway logged a line about a member."""
        at = await happened
        found = [await gateway.moment_of(name, line, SEEN_SECONDS) for gateway in self._stage.gateways]
        self.report.seen.setdefault(what, []).append(max(found) - at)

    # ---- faults

    async def _suffer(self, fault: Callable[[], Awaitable[None]]) -> dict[str, int]:
        """Send requests before, during and after a fault. Return the numbers of requests that were sent and that
        failed.
        """
        gone = [gateway.count("is gone") for gateway in self._stage.gateways]
        running = asyncio.create_task(self._stream(self._options.fault_seconds))
        await asyncio.sleep(self._options.fault_seconds / 4)
        await fault()
        outcomes = await running
        lost = [gateway.count("is gone") - before for gateway, before in zip(self._stage.gateways, gone)]
        for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
            print(f"a request failed: {error}", file=sys.stderr)
        return {"requests": len(outcomes), "failed": _failed(outcomes), "members given up": sum(lost)}

    async def _flush(self) -> None:
        client = redis.asyncio.Redis.from_url(self._stage.redis_url)
        await client.flushall()
        await client.aclose()

    async def _kill(self) -> None:
        await asyncio.to_thread(self._stage.redis.stop, signal.SIGKILL)
        await asyncio.sleep(self._options.fault_seconds / 8)
        await self._stage.start_redis()

    async def _stop(self) -> None:
        self._stage.redis.tell(signal.SIGSTOP)
        await asyncio.sleep(self._options.fault_seconds / 2)
        self._stage.redis.tell(signal.SIGCONT)

    async def _split(self) -> None:
        self._stage.gate.shut()
        await asyncio.sleep(self._options.fault_seconds / 2)
        self._stage.gate.open()


async def _send(gateway: GatewayProcess, due: Sequence[Request]) -> list[Outcome]:
    async with Server(gateway.url) as server:
        return await server.run(Workload("stream", tuple(due), concurrency=max(1, len(due))))


async def _at(moment: float) -> float:
    return moment


def _failed(outcomes: Sequence[Outcome]) -> int:
    return sum(bool(outcome.error) for outcome in outcomes)


async def run(options: argparse.Namespace) -> Report:
    """Start everything, measure, and end everything."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stage.open(
            Path(folder), options.model, options.gateways, options.processes, options.ids[0]
        ) as stage:
            return await ControlPlane(stage, options).measure()


def show(report: Report) -> str:
    """Return the report as tables."""
    rows = [
        [part, name, f"{value:.4g}"]
        for part in ("memory", "joining", "quiet", "busy")
        for name, value in getattr(report, part).items()
    ]
    rows += [["seen after, s", what, f"{max(times):.2f} at most"] for what, times in report.seen.items()]
    rows += [
        ["Redis " + what, name, str(count)] for what, counts in report.faults.items() for name, count in counts.items()
    ]
    return table(["", "figure", "value"], rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.control_plane", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder; only its tokenizer is read")
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--processes", type=int, default=4, help="processes with stand-in workers [%(default)s]")
    parser.add_argument("--blocks", type=int, default=2000, help="cached blocks of each host [%(default)s]")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, at all gateways [%(default)s]")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for shares of CPU [%(default)s]")
    parser.add_argument("--settle", type=float, default=75.0, help="pause after all have joined [%(default)s]")
    parser.add_argument("--fault-seconds", type=float, default=30.0, help="time around each fault [%(default)s]")
    changes = "workers that join, leave and are killed, one after another [%(default)s]"
    parser.add_argument("--changes", type=int, default=5, help=changes)
    ids = "token ids of prompts: the first one, with which answers begin, and the one after the last [1000 11000]"
    parser.add_argument("--ids", type=int, nargs=2, default=(1000, 11_000), metavar=("FIRST", "END"), help=ids)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=new_file, help="file for all figures")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    ending_on_sigterm()
    report = asyncio.run(run(options))
    print(show(report))
    if options.json:
        options.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
