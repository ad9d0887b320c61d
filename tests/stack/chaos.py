"""Kill processes of real stacks at random while streams run: `python -m tests.stack.chaos --seed N`, or `make chaos`.

The first stack is `paceline serve`. The second has its workers on two hosts, which are network namespaces on this
machine. The link between the hosts is cut now and then, for moments or for longer than leases and connections last.

The undisturbed stack first computes the greedy tokens of every prompt. Then each client streams one request after
another until all kills are done; some clients disconnect in the middle. Every request that its client reads to the end
must give exactly the tokens of the undisturbed stack. At the end no block may be leased.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from bench.namespaces import Host, NoNamespacesError
from bench.namespaces import two_hosts as joined_hosts
from paceline.core.env import default_cache_dir
from paceline.models.assets import resolve_model
from paceline.services.common.tasks import end_tasks
from tests.stack.cluster import Cluster
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
    prompts: tuple[str, ...] = PROMPTS
    model: str = MODEL
    kv_memory: str = "512MiB"
    options: tuple[str, ...] = ()
    """Further options for `paceline serve`."""


@dataclass
class Report:
    """The results of one run."""

    kills: Counter[str] = field(default_factory=Counter)
    cuts: list[float] = field(default_factory=list)
    """Seconds that each cut lasted."""
    ended: int = 0
    left: int = 0
    asked_again: int = 0
    """How often a client got 429 or 503 before any token, because no worker was available."""
    attempts: float = 0
    """Attempts that workers admitted, over all requests."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    settled_seconds: float = 0.0
    """Seconds from the end of the last stream until no block was leased or in flight."""
    leftovers: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {role}" for role, count in sorted(self.kills.items()))
        left_behind = ", ".join(self.leftovers) or "nothing"
        return (
            f"{self.kills.total()} kills ({kills}), {len(self.cuts)} cuts of the link ({sum(self.cuts):.0f} s,"
            f" at most {max(self.cuts, default=0):.0f} s) in {self.seconds:.0f} s; {self.ended} streams ended right,"
            f" {len(self.wrong)} wrong, in {self.attempts:.0f} attempts; {self.left} clients left,"
            f" {self.asked_again} times a client asked again; no block leased {self.settled_seconds:.1f} s after the"
            f" last stream; {left_behind} left behind"
        )


class Prey(Protocol):
    """A stack that restarts killed processes."""

    url: str
    hosts: Sequence[Host]

    def living(self, role: str) -> list[int]:
        """Return the pids of the ready processes of a role."""

    def family(self) -> list[psutil.Process]:
        """Return all processes of the stack."""

    async def settled(self) -> None:
        """Wait until no block is leased or in flight."""


@contextlib.asynccontextmanager
async def one_host(plan: Plan, folder: Path) -> AsyncIterator[Prey]:
    """Start `paceline serve`."""
    options = (f"--prefill={plan.prefill}", f"--decode={plan.decode}", f"--kv-memory={plan.kv_memory}")
    with serve(folder / "log", plan.model, *options, *plan.options) as stack:
        yield stack


@contextlib.asynccontextmanager
async def two_hosts(plan: Plan, folder: Path, lease_seconds: float = 10.0) -> AsyncIterator[Prey]:
    """Start services on two hosts, and spread the workers of each role over both.

    Raises:
        NoNamespacesError: network namespaces cannot be made on this machine.
    """
    model = resolve_model(plan.model, default_cache_dir(), print)
    with joined_hosts() as hosts, hosts[0].inside(), Cluster(folder, model, hosts, lease_seconds) as cluster:
        names = [
            cluster.start_worker(role, number, number % 2)
            for role, count in (("prefill", plan.prefill), ("decode", plan.decode))
            for number in range(count)
        ]
        cluster.start_gateway()
        cluster.wait_ready(*names)
        await cluster.wait_workers(len(names))
        keeping = asyncio.create_task(cluster.keep())
        try:
            yield cluster
        finally:
            await end_tasks(keeping)


async def chaos(plan: Plan, seed: int, starting: AbstractAsyncContextManager[Prey]) -> Report:
    """Run a plan on a stack of its own, seeded with `seed`, and return the results."""
    report = Report()
    draw = random.Random(seed)
    seen: set[Path] = set()
    async with starting as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=SILENCE_SECONDS) as http:
            client = Client(http, plan, report)
            await client.learn()
            before, began = await attempts(http), time.monotonic()
            over = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.streams):
                    group.create_task(client.run(random.Random(draw.random()), over))
                cutting = group.create_task(_cut_all(plan, stack, random.Random(draw.random()), report))
                await _kill_all(plan, stack, draw, report, seen)
                await cutting
                over.set()
            report.attempts, report.seconds = await attempts(http) - before, time.monotonic() - began
            began = time.monotonic()
            await stack.settled()
            report.settled_seconds = time.monotonic() - began
        family = stack.family()
        seen |= arenas(family)
    alive = [f"{each.name()} {each.pid}" for each in family if each.is_running()]
    report.leftovers = alive + [str(path) for path in seen if path.exists()]
    return report


async def attempts(http: httpx.AsyncClient) -> float:
    """Return how many attempts workers have admitted, over all requests that have ended so far."""
    metrics = (await http.get("/metrics")).text
    (value,) = re.findall(r"^paceline:request_attempts_total\S* (\S+)", metrics, re.MULTILINE)
    return float(value)


async def _kill_all(plan: Plan, stack: Prey, draw: random.Random, report: Report, seen: set[Path]) -> None:
    order = [role for role, count in plan.kills.items() for _ in range(count)]
    draw.shuffle(order)
    for role in order:
        await asyncio.sleep(draw.uniform(*plan.pause))
        async with asyncio.timeout(VICTIM_SECONDS):
            # If a role had no process left, requests would only wait.
            while not all((living := {each: stack.living(each) for each in plan.kills}).values()):
                await asyncio.sleep(0.05)
        if role == "kvtransfer":
            seen |= arenas(stack.family())
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(living[role]), signal.SIGKILL)
            report.kills[role] += 1


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


class Client:
    """A client that streams completions and compares their tokens with the undisturbed stack's."""

    def __init__(self, http: httpx.AsyncClient, plan: Plan, report: Report) -> None:
        self._http = http
        self._plan = plan
        self._report = report
        self.expected: dict[str, list[int]] = {}
        """For each prompt, the tokens of the undisturbed stack."""

    async def learn(self) -> None:
        """Record each prompt's tokens from the undisturbed stack."""
        places = asyncio.Semaphore(self._plan.streams)

        async def one(prompt: str) -> None:
            async with places:
                self.expected[prompt] = [token async for token in self.stream(prompt)]

        await asyncio.gather(*(one(prompt) for prompt in self._plan.prompts))

    async def run(self, draw: random.Random, over: asyncio.Event) -> None:
        """Send one request after another until `over` is set."""
        while not over.is_set():
            prompt = draw.choice(self._plan.prompts)
            patience = draw.randrange(self._plan.tokens) if draw.random() < self._plan.leaves else None
            await self._ask(prompt, patience, draw)

    async def _ask(self, prompt: str, patience: int | None, draw: random.Random) -> None:
        expected, tokens = self.expected[prompt], list[int]()
        async with contextlib.aclosing(self.stream(prompt)) as stream:
            try:
                async for token in stream:
                    tokens.append(token)
                    if len(tokens) == patience:
                        break
            except _NoWorkerError:
                self._report.asked_again += 1
                await asyncio.sleep(draw.uniform(0.5, 1.5))
                return
            except (_BrokenError, httpx.HTTPError) as error:
                self._report.wrong.append(f"{prompt[:30]!r} after {len(tokens)} tokens: {error!r}")
                return
        if tokens != expected[: len(tokens)] or (patience is None and len(tokens) < len(expected)):
            self._report.wrong.append(f"{prompt[:30]!r}: {tokens} instead of {expected}")
        elif patience is None:
            self._report.ended += 1
        else:
            self._report.left += 1

    async def stream(self, prompt: str) -> AsyncIterator[int]:
        body = {
            "prompt": prompt,
            "max_tokens": self._plan.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code in (429, 503):
                raise _NoWorkerError
            if response.status_code != 200:
                raise _BrokenError((await response.aread()).decode())
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _BrokenError(line)
                    for token in event["choices"][0].get("token_ids") or ():
                        yield token


class _NoWorkerError(Exception):
    """The stack has answered 429 or 503 before any token: the client may ask again later."""


class _BrokenError(Exception):
    """The stream ended with an error instead of its tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=32, help="spread over prefill, decode, kvtransfer and Redis")
    parser.add_argument("--cuts", type=int, default=12, help="cuts of the link between two hosts")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hosts", type=int, choices=(1, 2), help="number of hosts [first one, then two]")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs [none are kept]")
    arguments = parser.parse_args()
    roles = ("decode", "prefill", "redis", "kvtransfer")
    kills = Counter(roles[index % len(roles)] for index in range(arguments.kills))
    cuts = tuple(CUTS[index % len(CUTS)] for index in range(arguments.cuts))
    plan = Plan(kills, arguments.streams, arguments.tokens, pause=(0.5, 4.0))
    wrong = False
    for number, start in ((1, one_host), (2, two_hosts)):
        if arguments.hosts not in (None, number):
            continue
        with tempfile.TemporaryDirectory() as folder:
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
