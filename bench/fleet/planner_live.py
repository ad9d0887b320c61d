"""Let the planner scale a live fleet of stand-in workers, and a static fleet of as many devices beside it.

    python -m bench.fleet.planner_live ~/.cache/paceline/smollm2-135m-instruct --json /tmp/planner.json

The gateway, Redis and the planner's service are real. Workers (`bench.fleet.stand_in`) take the step times of
--profile, which `paceline profile` writes, or built-in ones. The load swings from long prompts with short answers to
short prompts with long answers and back in 12 minutes. A request is within its objectives if its first token came in
time, and 95 % of the others in time after the one before. The share of such requests is printed for each minute of
arrival. Those of --warm-up do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.services import Process, free_port
from bench.common.workloads import FIRST_ID, Request, Workload
from bench.fleet.stand_in import DRAIN_SECONDS, StandIn
from bench.serving.load import Outcome, Server, new_file, table
from paceline.core.model_folder import model_digest
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Role
from paceline.core.step_times import Curve, StepTimes, read_profile
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import connect
from paceline.services.common.seals import Seal
from paceline.services.common.secret import Secret
from paceline.services.common.tasks import end_tasks
from paceline.services.planner.recording import RecordFile
from paceline.services.planner.service import PlannerService
from paceline.services.platforms.platform import Ability, PlatformRole, PlatformState
from paceline.services.serve.redis_server import redis_command, wait_for_redis

BUDGET = 6
TTFT, ITL = 3.0, 0.1
"""Objectives in seconds."""
STARTUP_SECONDS = 8.0
INTERVAL, FORECAST = 2.0, 15.0
"""Seconds between two decisions, and between two forecasts: about twice as long as a start."""
SWING_SECONDS = 720.0
"""Time in which the load goes from one kind of requests to the other and back."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
TIMES = {
    "prefill": StepTimes(prefill=Curve(points=((1, 0.02), (512, 0.2))), decode=Curve(points=((1, 0.03),))),
    "decode": StepTimes(
        prefill=Curve(points=((1, 0.02), (512, 0.2))), decode=Curve(points=((1, 0.032), (16, 0.092), (64, 0.3)))
    ),
}
"""Step times without --profile: a prompt of 1,500 tokens takes 0.6 s, and 16 requests get a token each 92 ms."""


class Phase(NamedTuple):
    """Requests per second and their lengths in tokens."""

    rate: float
    prompt: int
    answer: int


PROMPTS, ANSWERS = Phase(5.0, 1500, 24), Phase(3.2, 150, 160)


def load(minutes: float, seed: int) -> Workload:
    """Return requests that arrive at random, and that swing from one kind to the other and back. Groups are minutes."""
    draw, requests = random.Random(seed), []
    at, end = 0.0, 60 * minutes
    while (at := at + draw.expovariate(PROMPTS.rate + ANSWERS.rate)) < end:
        share = 0.5 + 0.5 * math.cos(2 * math.pi * at / SWING_SECONDS)
        phase, present = (
            (PROMPTS, share) if draw.random() < PROMPTS.rate / (PROMPTS.rate + ANSWERS.rate) else (ANSWERS, 1 - share)
        )
        if draw.random() < present:
            tokens = max(1, round(phase.prompt * draw.uniform(0.5, 1.5)))
            prompt = tuple(draw.choices(range(FIRST_ID, 30_000), k=tokens))
            answer = max(2, round(phase.answer * draw.uniform(0.5, 1.5)))
            requests.append(Request(prompt, answer, str(int(at // 60)), at))
    return Workload("swing", tuple(requests), concurrency=len(requests))


def is_within(outcome: Outcome) -> bool:
    """Return whether a request met both objectives."""
    if outcome.error or outcome.chunks[0] - outcome.sent > TTFT:
        return False
    gaps = [later - earlier for earlier, later in zip(outcome.chunks, outcome.chunks[1:])]
    return sum(gap <= ITL for gap in gaps) >= 0.95 * len(gaps)


def objectives(budget: int, ttft: float, itl: float, interval: float, forecast: float) -> Objectives:
    """Return objectives of a planner for prefill and decode workers that take a device each.

    Args:
        interval, forecast: seconds between two decisions, and between two forecasts.
    """
    limits = {role: RoleLimits(1, budget - 1) for role in ROLES}
    # With 95 % at all times, some minutes would have less. The benchmarks judge the worst minute.
    latency = Latency(ttft, itl, 0.99)
    return Objectives(default=latency, roles=limits, budget=budget, fast_seconds=interval, slow_seconds=forecast)


class StandInPlatform:
    """The platform of stand-in workers in this process."""

    name = "stand-ins"
    abilities: frozenset[Ability] = frozenset({"choose", "flip", "spread"})

    def __init__(self, redis: str, cluster: str, model: str, times: dict[str, StepTimes]) -> None:
        self._redis = redis
        self._cluster = cluster
        self._model = model
        self._times = times
        self._numbers = 0
        self._workers: dict[str, StandIn] = {}
        self._leaving: dict[str, StandIn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.device_seconds = 0.0
        self._counted_at = time.monotonic()

    def take_over(self) -> None:
        pass

    async def state(self) -> PlatformState:
        return PlatformState(
            {role: PlatformRole(own := self._count(role), own, self._draining(role)) for role in ROLES}
        )

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        await self.have(role, wanted, STARTUP_SECONDS, victims)

    async def have(self, role: Role, wanted: int, startup: float, victims: Sequence[str] = ()) -> None:
        """Start or drain workers until there are `wanted`. New ones serve after `startup` seconds."""
        self._count_devices()
        role_workers = [worker for worker in self._workers.values() if worker.role == role]
        chosen = [worker for worker in role_workers if worker.name in victims]
        others = [worker for worker in reversed(role_workers) if worker not in chosen]
        for worker in [*chosen, *others][: max(0, len(role_workers) - wanted)]:
            self._leaving[worker.name] = self._workers.pop(worker.name)
            self._spawn(self._end(worker))
        for _ in range(wanted - len(role_workers)):
            self._numbers += 1
            worker = StandIn(f"worker-{self._numbers}", role, self._times[role], self._model)
            self._workers[worker.name] = worker
            self._spawn(worker.start(self._redis, self._cluster, startup))

    async def flip(self, worker_id: str, role: Role) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None and worker.role != role and worker.state == "ready":
            self._spawn(worker.flip(role, self._times[role]))

    async def close(self) -> None:
        self._count_devices()
        await end_tasks(*self._tasks)
        await asyncio.gather(*(worker.stop() for worker in (*self._workers.values(), *self._leaving.values())))

    async def _end(self, worker: StandIn) -> None:
        await worker.stop()
        self._count_devices()
        del self._leaving[worker.name]

    def _count(self, role: Role) -> int:
        return sum(worker.wanted_role == role for worker in self._workers.values())

    def _draining(self, role: Role) -> int:
        return sum(worker.role == role for worker in self._leaving.values())

    def _count_devices(self) -> None:
        now = time.monotonic()
        self.device_seconds += (now - self._counted_at) * (len(self._workers) + len(self._leaving))
        self._counted_at = now

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Figures(NamedTuple):
    """The figures of one fleet."""

    within: dict[str, float]
    """Share of the requests of each minute that were within their objectives."""
    devices: float
    """Mean number of devices."""
    errors: int
    decisions: list[str]


@contextlib.asynccontextmanager
async def fleet(
    model: Path, times: dict[str, StepTimes], folder: Path
) -> AsyncIterator[tuple[str, str, StandInPlatform]]:
    """Run Redis, a gateway and three stand-ins of each role. Yield the gateway's URL, Redis' URL and the platform."""
    socket, port = folder / "redis.sock", free_port()
    redis = f"unix://{socket}"
    program, *arguments = redis_command(socket)
    store = Process(folder / "redis.log", *arguments, program=[program])
    options = (str(model), f"--redis={redis}", "--cluster=bench", f"--port={port}", "--store=none")
    gateway: Process | None = None
    platform = StandInPlatform(redis, "bench", model_digest(model), times)
    try:
        await wait_for_redis(redis, 30)
        gateway = Process(folder / "gateway.log", "gateway", *options, "--log-level=info")
        await asyncio.to_thread(gateway.wait_for, "serving")
        for role in ROLES:
            await platform.have(role, BUDGET // 2, 0.0)
        await asyncio.sleep(3)  # until the gateway has seen them
        yield f"http://127.0.0.1:{port}", redis, platform
    finally:
        await platform.close()
        for process in (gateway, store):
            if process is not None:
                await asyncio.to_thread(process.stop)


async def measure(
    model: Path, times: dict[str, StepTimes], workload: Workload, planned: bool, record: Path | None = None
) -> Figures:
    """Send the load to a fleet that the planner scales, or to a static one."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        async with fleet(model, times, Path(folder)) as (url, redis, platform), contextlib.AsyncExitStack() as undo:
            if planned:
                client = await undo.enter_async_context(contextlib.aclosing(connect(redis)))
                planner = Planner(objectives(BUDGET, TTFT, ITL, INTERVAL, FORECAST))
                kept = RecordFile(record, 1 << 30, planner) if record else None

                def note() -> None:
                    lines.extend(past.line for past in service.report().decisions[-1:] if past.acted)

                facts = planner, platform, client, "bench", UNSIGNED, Seal(Secret()), "planner", DRAIN_SECONDS, kept
                service = PlannerService(*facts, on_decision=note)
                stop = asyncio.Event()
                running = asyncio.create_task(service.run(stop))
                undo.push_async_callback(asyncio.wait, {running})
                undo.callback(stop.set)
            began, used = time.monotonic(), platform.device_seconds
            async with Server(url) as server:
                outcomes = await server.run(workload)
            platform._count_devices()
            devices = (platform.device_seconds - used) / (time.monotonic() - began)
    minutes = sorted({outcome.group for outcome in outcomes}, key=int)
    within = {}
    for minute in minutes:
        own = [is_within(outcome) for outcome in outcomes if outcome.group == minute]
        within[minute] = sum(own) / len(own)
    return Figures(within, devices, sum(bool(outcome.error) for outcome in outcomes), lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.planner_live", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder; only its tokenizer is read")
    parser.add_argument("--minutes", type=float, default=24.0, help="length of the load [%(default)s]")
    parser.add_argument("--warm-up", type=int, default=12, help="minutes that do not count [%(default)s]")
    parser.add_argument("--profile", type=Path, help="step times, from paceline profile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=new_file, help="file for the planner's reports and decisions")
    parser.add_argument("--only", choices=("planner", "static"), help="measure only one of the fleets")
    parser.add_argument("--json", type=new_file, help="file for all figures")
    options = parser.parse_args()
    if options.warm_up >= options.minutes:
        parser.error("--warm-up must be less than --minutes, because the other minutes are judged")
    times = dict(TIMES)
    if options.profile:
        profile = read_profile(options.profile)
        times = {"prefill": profile.prefill.steps, "decode": profile.decode.steps}
    workload = load(options.minutes, options.seed)
    names = [options.only] if options.only else ["planner", "static"]
    figures = {
        name: asyncio.run(measure(options.model, times, workload, name == "planner", options.record)) for name in names
    }
    minutes = list(next(iter(figures.values())).within)
    rows = [
        [minute, *(f"{100 * fleet_figures.within[minute]:.1f}" for fleet_figures in figures.values())]
        for minute in minutes
    ]
    rows.append(["devices", *(f"{fleet_figures.devices:.2f}" for fleet_figures in figures.values())])
    rows.append(["errors", *(str(fleet_figures.errors) for fleet_figures in figures.values())])
    print(table(["minute", *(f"{name}, % within" for name in figures)], rows))
    for line in figures["planner"].decisions if "planner" in figures else ():
        print(f"  {line}")
    for name, fleet_figures in figures.items():
        counted = {minute: share for minute, share in fleet_figures.within.items() if int(minute) >= options.warm_up}
        worst = min(counted, key=counted.__getitem__)
        print(f"{name}: worst minute {worst}: {100 * counted[worst]:.1f} %")
    if options.json:
        options.json.write_text(
            json.dumps({name: fleet_figures._asdict() for name, fleet_figures in figures.items()}, indent=2) + "\n"
        )
    return 1 if any(fleet_figures.errors for fleet_figures in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
