"""Many stand-in workers in a few processes, for `bench.fleet.control_plane`.

    python -m bench.fleet.stand_in_fleet --redis URL --cluster NAME --model DIGEST --prefix a --workers 500

Each worker has a server, a registration and a heartbeat of its own, and so has each host of a few workers. The process
prints "ready" when all serve. Then it reads commands, one in a line, and answers each with a line: `add NAME ROLE`
starts a worker, `remove NAME` drains and ends one. The end of its input ends the process at once, without a goodbye.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from bench.fleet.stand_in import StandIn
from bench.fleet.stand_in_host import StandInHost
from paceline.core.machine import raise_file_limit
from paceline.core.metrics import Family, Sample
from paceline.core.step_times import Curve, StepTimes
from paceline.services.common.registry import Role

TIMES = StepTimes(prefill=Curve(points=((1, 0.005), (512, 0.05))), decode=Curve(points=((1, 0.02), (64, 0.04))))
_TOGETHER = 25
"""Workers that start at the same time."""
_SAMPLES = [
    Sample(f"figure_{number:02}", float(number), Family(f"a_metric_with_a_usual_name_{number:02}", "What it counts"))
    for number in range(40)
]
"""As many metrics as real workers have, so that members have the usual size of 3 KB."""


class StandInFleet:
    """A process with stand-in workers, seen from the process that started it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, *options: str) -> StandInFleet:
        command = (sys.executable, "-m", "bench.fleet.stand_in_fleet", *options)
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE))

    async def wait_ready(self, seconds: float) -> None:
        """Raises RuntimeError or TimeoutError if the workers do not serve."""
        async with asyncio.timeout(seconds):
            if await self._answer() != "ready":
                raise RuntimeError("a process of stand-in workers did not start")

    async def tell(self, command: str) -> float:
        """Give a command, and return the instant at which it was carried out, on time.time()."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()
        return float(await self._answer())

    async def kill(self) -> float:
        """End all of its workers without a goodbye. Return the instant, on time.time()."""
        at = time.time()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        return at

    async def _answer(self) -> str:
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()


class _Workers:
    """The stand-ins of this process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._workers: dict[str, StandIn] = {}

    async def start(self) -> None:
        options = self._options
        numbers = range(options.workers)
        hosts = [
            StandInHost(f"host-{options.prefix}{number:04}", blocks=options.blocks)
            for number in range(-(-options.workers // options.per_host))
        ]
        await _some_at_a_time([host.start(options.redis, options.cluster) for host in hosts])
        await _some_at_a_time(
            [
                self._add(f"{options.prefix}{number:04}", _role(number), hosts[number // options.per_host])
                for number in numbers
            ]
        )

    async def obey(self, command: Sequence[str]) -> None:
        match command:
            case ["add", name, ("prefill" | "decode") as role]:
                await self._add(name, role, None)
            case ["remove", name]:
                await self._workers.pop(name).stop()

    async def _add(self, name: str, role: Role, host: StandInHost | None) -> None:
        options = self._options
        worker = StandIn(name, role, TIMES, options.model, first_id=options.first_id, host=host, samples=_SAMPLES)
        self._workers[name] = worker
        await worker.start(options.redis, options.cluster, 0.0)


def _role(number: int) -> Role:
    return "decode" if number % 2 else "prefill"


async def _some_at_a_time(starts: Sequence[object]) -> None:
    for begin in range(0, len(starts), _TOGETHER):
        await asyncio.gather(*starts[begin : begin + _TOGETHER])  # type: ignore[arg-type]


async def run(options: argparse.Namespace) -> None:
    raise_file_limit()
    workers = _Workers(options)
    await workers.start()
    print("ready", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        await workers.obey(line)
        print(time.time(), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.stand_in_fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--redis", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--model", required=True, help="digest of the model that the gateways serve")
    parser.add_argument("--prefix", default="w", help="begin of the workers' names")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--per-host", type=int, default=8, help="workers of a host [%(default)s]")
    parser.add_argument("--blocks", type=int, default=0, help="blocks that a host has cached from the beginning")
    parser.add_argument("--first-id", type=int, default=1000, help="first token id of every answer")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
