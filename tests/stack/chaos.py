"""Kill processes of real stacks at random while streams run: `python -m tests.stack.chaos --seed N`, or `make chaos`.

The first stack is `paceline serve`. The second has its workers on two hosts, which are network namespaces on this
machine. The link between the hosts is cut now and then, for moments or for longer than leases and connections last.

The undisturbed stack first computes the greedy tokens of every prompt. Then each client streams one request after
another until all kills are done; some clients disconnect in the middle. Every request that its client reads to the end
must give exactly the tokens of the undisturbed stack. At the end no block may be leased.

The gateway is killed, too. A stream that breaks with its gateway goes on where it was at the gateway that starts next.

With `--media`, a tiny random Gemma 4 answers questions about images, videos and audio clips. Encode workers are killed,
too. With `--vectors`, clients ask a tiny encoder for vectors beside the chats (`chaos_vectors.py`), on one host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from bench.common.namespaces import Host, NoNamespacesError
from bench.common.namespaces import two_hosts as joined_hosts
from paceline.core.env import default_cache_dir
from paceline.models.sources.assets import resolve_model
from paceline.services.common.tasks import end_tasks
from tests.stack.chaos_clients import Client, Question, Report, attempts, completions, encodings
from tests.stack.chaos_vectors import CHAT, VectorClients, write_models
from tests.stack.cluster import Cluster
from tests.stack.media_chats import questions_about_media, write_model
from tests.stack.processes import arenas, serve
from tests.stack.reference import PROMPTS

MODEL = "smollm2-135m-instruct"
CUTS = ((0.1, 2.0), (2.0, 8.0), (11.0, 20.0))
"""Ranges in seconds for the length of a cut. They are used in turn: too short to notice, noticeable, and longer than
leases and connections last.
"""
VICTIM_SECONDS = 120.0
"""Longest wait until every role has a ready process again, before the next kill."""
SILENCE_SECONDS = 180.0
"""A stream without any output for this many seconds has failed."""


@dataclass(frozen=True)
class Plan:
    """The load, and the kills and cuts that disturb it."""

    kills: Mapping[str, int]
    """Number of processes to kill, by role."""
    streams: int
    tokens: int
    """Tokens that each request generates."""
    pause: tuple[float, float]
    """Least and most seconds between two kills, and between two cuts."""
    cuts: tuple[tuple[float, float], ...] = ()
    """One entry per cut of the link between two hosts: least and most seconds that it lasts."""
    leaves: float = 0.1
    """Probability that a client disconnects before its request has ended."""
    prefill: int = 2
    decode: int = 2
    encode: int = 0
    questions: tuple[Question, ...] = completions(PROMPTS)
    model: str = MODEL
    kv_memory: str = "512MiB"
    vectors: int = 0
    """Number of clients that ask an encoder for vectors beside the streams, from two pool workers."""
    options: tuple[str, ...] = ()
    """Further options of all workers."""


class Prey(Protocol):
    """A stack that restarts killed processes."""

    url: str
    hosts: Sequence[Host]
    admin: Mapping[str, str]
    """Headers for routes that are for admins."""

    def living(self, role: str) -> list[int]:
        """Return the pids of the ready processes of a role."""

    def family(self) -> list[psutil.Process]:
        """Return all processes of the stack."""

    async def settled(self) -> None:
        """Wait until no block is leased or in flight."""


@contextlib.asynccontextmanager
async def one_host(plan: Plan, folder: Path) -> AsyncIterator[Prey]:
    """Start `paceline serve`."""
    options = [f"--prefill={plan.prefill}", f"--decode={plan.decode}", f"--encode={plan.encode}"]
    options += ["--pool=2"] if plan.vectors else []
    with serve(folder / "log", plan.model, *options, f"--kv-memory={plan.kv_memory}", *plan.options) as stack:
        yield stack


@contextlib.asynccontextmanager
async def two_hosts(plan: Plan, folder: Path, lease_seconds: float = 10.0) -> AsyncIterator[Prey]:
    """Start services on two hosts, and spread the workers of each role over both.

    Raises:
        NoNamespacesError: network namespaces cannot be made on this machine.
    """
    model = resolve_model(plan.model, default_cache_dir(), print)
    with (
        joined_hosts() as hosts,
        hosts[0].inside(),
        Cluster(folder, model, hosts, lease_seconds, kv_memory=plan.kv_memory, worker_options=plan.options) as cluster,
    ):
        names = [
            cluster.start_worker(role, number, number % 2)
            for role, count in (("prefill", plan.prefill), ("decode", plan.decode), ("encode", plan.encode))
            for number in range(count)
        ]
        cluster.start_gateway()
        cluster.wait_ready(*names)
        await cluster.wait_workers(plan.prefill + plan.decode + plan.encode)
        keeping = asyncio.create_task(cluster.keep())
        try:
            yield cluster
        finally:
            await end_tasks(keeping)


async def chaos(plan: Plan, seed: int, starting: AbstractAsyncContextManager[Prey]) -> Report:
    """Run a plan on a stack of its own, seeded with `seed`, and return the results."""
    report = Report()
    draw = random.Random(seed)
    seen = Seen()
    async with starting as stack:
        async with httpx.AsyncClient(base_url=stack.url, headers=dict(stack.admin), timeout=SILENCE_SECONDS) as http:
            kills_gateways = bool(plan.kills.get("gateway"))
            client = Client(http, plan.questions, plan.tokens, report, plan.leaves, gateways_end=kills_gateways)
            await client.learn(plan.streams)
            vectors = VectorClients(http, plan.vectors, report, kills_gateways)
            await vectors.learn()
            before, began = await attempts(http), time.monotonic()
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.streams):
                    group.create_task(client.run(random.Random(draw.random()), over))
                vectors.start(group, draw, plan.pause, over)
                cutting = group.create_task(_cut_all(plan, stack, random.Random(draw.random()), report))
                await _kill_all(plan, stack, draw, report, seen)
                await cutting
                over.set()
            report.attempts, report.seconds = await attempts(http), time.monotonic() - began
            if not report.kills["gateway"]:
                report.attempts -= before
            report.encodings = await encodings(http)
            began = time.monotonic()
            await stack.settled()
            report.settled_seconds = time.monotonic() - began
        seen.look(stack)
    report.leftovers = seen.left()
    return report


class Seen:
    """The processes and the arena files that a stack has had."""

    def __init__(self) -> None:
        self._processes: set[psutil.Process] = set()
        self._files: set[Path] = set()

    def look(self, stack: Prey) -> None:
        """Remember what the stack has now."""
        family = stack.family()
        self._processes |= set(family)
        self._files |= arenas(family)

    def left(self) -> list[str]:
        """Return what is still there."""
        processes = [f"{each.name()} {each.pid}" for each in self._processes if each.is_running()]
        return processes + [str(path) for path in self._files if path.exists()]


async def _kill_all(plan: Plan, stack: Prey, draw: random.Random, report: Report, seen: Seen) -> None:
    order = [role for role, count in plan.kills.items() for _ in range(count)]
    draw.shuffle(order)
    for role in order:
        await asyncio.sleep(draw.uniform(*plan.pause))
        living = await _living(plan, stack)  # if a role had no process left, requests would only wait
        if role in ("kvtransfer", "gateway"):  # which have an arena, and processes that decode media
            seen.look(stack)
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(living[role]), signal.SIGKILL)
            report.kills[role] += 1
    await _living(plan, stack)


async def _living(plan: Plan, stack: Prey) -> dict[str, list[int]]:
    """Wait until every role that the plan kills has a ready process. Return the process ids of each."""
    async with asyncio.timeout(VICTIM_SECONDS):
        while not all((living := {each: stack.living(each) for each in plan.kills}).values()):
            await asyncio.sleep(0.05)
    return living


async def _cut_all(plan: Plan, stack: Prey, draw: random.Random, report: Report) -> None:
    for least, most in draw.sample(plan.cuts, len(plan.cuts)):
        await asyncio.sleep(draw.uniform(*plan.pause))
        # Packets that the cut host sends fail at once; packets that the other host sends are lost silently.
        host, seconds = draw.choice(stack.hosts), draw.uniform(least, most)
        host.set_link(False)
        try:
            await asyncio.sleep(seconds)
        finally:
            host.set_link(True)
        report.cuts.append(seconds)


def media_plan(folder: Path, plan: Plan) -> Plan:
    """Return a plan with chats about media, for a tiny model that is written to a new folder."""
    model = write_model(folder)
    roles = ("decode", "prefill", "encode", "kvtransfer", "gateway", "redis")
    return dataclasses.replace(
        plan,
        kills=Counter(roles[index % len(roles)] for index in range(sum(plan.kills.values()))),
        encode=2,
        questions=questions_about_media(model, 48),
        model=str(folder),
        kv_memory="16MiB",  # so that encodings are evicted and computed again
        options=("--dtype=float32", "--threads=1", "--max-batched-tokens=64"),
    )


def vectors_plan(folder: Path, plan: Plan) -> Plan:
    """Return a plan with two models, whose files are written to a new folder: the one that chats, and an encoder."""
    roles = ("pool", "decode", "pool", "prefill", "redis", "kvtransfer", "gateway")
    questions = [dataclasses.replace(each, fields={**each.fields, "model": CHAT}) for each in plan.questions]
    return dataclasses.replace(
        plan,
        kills=Counter(roles[index % len(roles)] for index in range(sum(plan.kills.values()))),
        vectors=6,
        questions=tuple(questions),
        model=f"--models-file={write_models(folder, plan.model)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=32, help="spread over all roles")
    parser.add_argument("--cuts", type=int, default=12, help="cuts of the link between two hosts")
    parser.add_argument("--pause", type=float, nargs=2, default=(0.5, 4.0), help="least and most seconds between kills")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hosts", type=int, choices=(1, 2), help="number of hosts [first one, then two]")
    parser.add_argument("--media", action="store_true", help="chats about images, videos and audio clips")
    parser.add_argument("--vectors", action="store_true", help="an encoder beside the model that chats, on one host")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs [none are kept]")
    arguments = parser.parse_args()
    roles = ("decode", "prefill", "redis", "kvtransfer", "gateway")
    kills = Counter(roles[index % len(roles)] for index in range(arguments.kills))
    cuts = tuple(CUTS[index % len(CUTS)] for index in range(arguments.cuts))
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(kills, arguments.streams, arguments.tokens, pause=tuple(arguments.pause))
        if arguments.media:
            plan = media_plan(Path(folder, "model"), plan)
        if arguments.vectors:
            plan, arguments.hosts = vectors_plan(Path(folder, "models"), plan), 1
        for number, start in ((1, one_host), (2, two_hosts)):
            if arguments.hosts not in (None, number):
                continue
            logs = (arguments.logs or Path(folder)) / f"hosts-{number}"
            logs.mkdir(parents=True, exist_ok=True)
            try:
                its_plan = dataclasses.replace(plan, cuts=cuts if number == 2 else ())
                report = asyncio.run(chaos(its_plan, arguments.seed, start(its_plan, logs)))
            except NoNamespacesError as error:
                sys.exit(f"chaos on two hosts: {error}")
            print(f"{number} host{'s' * (number > 1)}, seed {arguments.seed}: {report}", *report.wrong, sep="\n")
            wrong |= bool(report.wrong or report.leftovers or not report.ended)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
