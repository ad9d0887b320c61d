"""Send hostile images, videos and audio to a stack, and measure what they cost its processes and other requests.

    python -m bench.gateway.media_hostile --count 10000

The stack has a random model that reads images, videos and audio. It runs in a network of its own, which needs root or
user namespaces (see `bench.gateway.hostile_network`). Hostile requests come at a steady rate from another process,
which yields to the stack. Streams of text run beside, first without the attack, then during it. An answer is wrong if
its status is not one that the item deserves, or an error does not say which item is at fault. Some broken items may be
accepted, such as a file without its end, and then cost as much as good ones; `--refused-only` leaves them out. With
`--cheapest` each item is a URL that is refused at once, which shows what the requests alone cost.

The tables show all answers, the ITL of the streams, the CPU time of each process during the attack, and its anonymous
memory: before the attack, at most during it (looked at every second), and afterwards. A gateway may hold up to
`--media-memory` for the requests that it has at a time. Processes that decode are replaced now and then, so they count
as one: their CPU time is left out, and their memory is that of the largest one.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.common.services import Process, names_by_pid, serving
from bench.common.workloads import FIRST_ID, Request, Workload
from bench.gateway.hostile_media import Attack, Attacks
from bench.gateway.hostile_network import URLS, NoNetworkError, enter, servers
from bench.serving.load import Outcome, Server, new_file, summarize, table
from tests.services.gateway.planning.media.samples import data_url, image_file

STREAMS, STREAM_TOKENS = 4, 200
REQUEST_SECONDS = 120.0
NICENESS = 5
CHEAPEST = Attack("cheapest", "image", "x:bad", frozenset({400}))
GOOD = {"type": "image_url", "image_url": {"url": data_url(image_file())}}


@dataclass
class Answers:
    """The answers that the attacking process has received."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the kind of attack and the status."""
    wrong: list[str] = field(default_factory=list)
    private_connections: int = 0
    seconds: float = 0.0
    """Seconds from sending to the answer, summed over all requests."""


def attack(url: str, count: int, rate: float, seed: int, refused_only: bool, cheapest: bool) -> Answers:
    """Send `count` hostile requests at a rate per second. Runs in a process of its own.

    Args:
        refused_only: whether to leave out items that a stack may accept.
        cheapest: whether to send CHEAPEST instead.
    """
    os.nice(NICENESS)
    attacks = Attacks(seed, URLS)
    made = itertools.repeat(CHEAPEST) if cheapest else iter(attacks.next, None)
    chosen = (item for item in made if not (refused_only and 200 in item.answers))
    return asyncio.run(_attack(url, itertools.islice(chosen, count), rate, seed))


async def _attack(url: str, attacks: Iterable[Attack], rate: float, seed: int) -> Answers:
    answers, rng = Answers(), random.Random(seed)
    async with (
        servers() as private,
        httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        begun = time.perf_counter()
        for number, item in enumerate(attacks):
            await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
            group.create_task(_send(client, item, rng.choice((0, 0, 0, 1)), answers))
    answers.private_connections = private.total()
    return answers


async def _send(client: httpx.AsyncClient, own: Attack, good: int, answers: Answers) -> None:
    """Send a hostile item after a number of good images, and count the answer."""
    item = {"type": f"{own.kind}_url", f"{own.kind}_url": {"url": own.url}}
    content = [*[GOOD] * good, item, {"type": "text", "text": "What is this?"}]
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    body["mm_processor_kwargs"] = {"max_soft_tokens": 70}
    begun, name = time.perf_counter(), uuid.uuid4().hex
    try:
        answer = await client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": name})
        status, text = str(answer.status_code), answer.text
    except httpx.HTTPError as error:
        status, text = type(error).__name__, str(error)
    answers.seconds += time.perf_counter() - begun
    answers.counts[own.name, status] += 1
    places = (f"{own.kind} {1 + good * (own.kind == 'image')}: ", f"messages[0].content[{good}]")
    is_right = status.isdecimal() and int(status) in own.answers
    if not is_right or (status != "200" and not json.loads(text)["error"]["message"].startswith(places)):
        answers.wrong.append(f"{own.name}: {status} {text[:300]}, {own.url[:1000]}, {await _trace(client, name)}")


async def _trace(client: httpx.AsyncClient, name: str) -> str:
    """Return the trace of a request, which shows its place when its answer was given up."""
    try:
        return (await client.get(f"/trace/{name}")).text
    except httpx.HTTPError as error:
        return f"no trace: {error!r}"


class Usage:
    """Reads the anonymous memory in MiB and the CPU seconds of a stack's processes, by their names."""

    def __init__(self, stack: Process) -> None:
        self._root = psutil.Process(stack.popen.pid)
        self._names = names_by_pid(stack)
        self.most: dict[str, float] = {}

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time until now, without processes that decode."""
        return {name: sum(psutil.Process(pid).cpu_times()[:2]) for pid, name in self._names.items()}

    def memory(self) -> dict[str, float]:
        """Return the memory now, and remember it if it is the most. Processes that decode count as one, the largest."""
        found: dict[str, float] = {}
        for process in (self._root, *self._root.children(recursive=True)):
            # Not the resident size: an arena, which processes share, counts to the one that touches a page.
            with contextlib.suppress(OSError):  # a process may have just ended
                status = Path(f"/proc/{process.pid}/status").read_text()
                if (line := re.search(r"RssAnon:\s+(\d+) kB", status)) is not None:
                    name = self._names.get(process.pid, "decoder")
                    found[name] = max(int(line[1]) / 1024, found.get(name, 0.0))
        self.most = {name: max(self.most.get(name, 0.0), found.get(name, 0.0)) for name in self.most | found}
        return found

    async def watch(self) -> None:
        """Read the memory every second until cancelled."""
        while True:
            await asyncio.sleep(1)
            await asyncio.to_thread(self.memory)


def beside(seed: int, vocab: int) -> Workload:
    """Return streams of text."""
    rng = random.Random(seed)
    prompts = [tuple(rng.choices(range(FIRST_ID, vocab), k=64)) for _ in range(STREAMS)]
    return Workload("beside", tuple(Request(prompt, STREAM_TOKENS) for prompt in prompts), STREAMS)


async def measure(stack: Process, url: str, options: argparse.Namespace, vocab: int) -> dict[str, Any]:
    """Return all figures of the streams, of the answers, and of memory."""
    figures: dict[str, Any] = {"itl_ms": {}, "memory_mib": {}}
    usage, seeds = Usage(stack), iter(range(options.seed, sys.maxsize))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as attackers:
        async with Server(url) as server:

            async def streams(name: str, is_over: Callable[[], bool]) -> None:
                outcomes: list[Outcome] = []
                while not outcomes or not is_over():
                    outcomes += await server.run(beside(next(seeds), vocab))
                figures["itl_ms"][name] = summarize(outcomes)["all"]

            async def alone(name: str) -> None:
                end = time.monotonic() + options.quiet_seconds
                await streams(name, lambda: time.monotonic() > end)

            kinds = options.refused_only, options.cheapest

            async def attacked(count: int, name: str) -> Answers:
                job = attackers.submit(attack, url, count, options.rate, next(seeds), *kinds)
                await streams(name, job.done)
                return job.result()

            # The first items start processes and fill caches.
            await attacked(options.warm_up, "warm-up")
            figures["memory_mib"]["before"] = usage.memory()
            await alone("before")
            watching = asyncio.create_task(usage.watch())
            begun, cpu_before = time.perf_counter(), usage.cpu_seconds()
            answers = await attacked(options.count, "attack")
            figures["attack_seconds"] = time.perf_counter() - begun
            figures["cpu_s"] = {name: cpu - cpu_before[name] for name, cpu in usage.cpu_seconds().items()}
            watching.cancel()
            await alone("after")
            figures["memory_mib"] |= {"most": usage.most, "after": usage.memory()}
    figures["answers"] = [[*key, number] for key, number in sorted(answers.counts.items())]
    return figures | {
        "wrong": answers.wrong,
        "private_connections": answers.private_connections,
        "mean_seconds": answers.seconds / options.count,
    }


def report(figures: dict[str, Any]) -> None:
    """Print all figures as tables."""
    print(table(["attack", "status", "requests"], [[kind, status, str(n)] for kind, status, n in figures["answers"]]))
    names = ("itl_ms_p50", "itl_ms_p99", "failures")
    rows = [[name, *(f"{row[each]:.1f}" for each in names)] for name, row in figures["itl_ms"].items()]
    print(table(["streams", "ITL p50 ms", "ITL p99 ms", "failures"], rows))
    looks = figures["memory_mib"]
    lines = [
        [
            name,
            *(f"{looks[when].get(name, math.nan):.0f}" for when in ("before", "most", "after")),
            f"{figures['cpu_s'].get(name, math.nan):.1f}",
        ]
        for name in sorted(looks["most"])
    ]
    print(table(["process", "MiB before", "at most", "after", "CPU s in the attack"], lines))
    ratio = figures["itl_ms"]["attack"]["itl_ms_p99"] / figures["itl_ms"]["before"]["itl_ms_p99"]
    print(
        f"{figures['attack_seconds']:.0f} s of attack, {1000 * figures['mean_seconds']:.0f} ms a request,"
        f" {len(figures['wrong'])} wrong answers, {figures['private_connections']} connections to private servers,"
        f" ITL p99 {ratio:.2f} times that before"
    )
    print(*figures["wrong"][:20], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.media_hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="hostile requests [%(default)s]")
    parser.add_argument("--rate", type=float, default=20.0, help="hostile requests in a second [%(default)s]")
    parser.add_argument("--refused-only", action="store_true", help="leave out items that may be accepted")
    parser.add_argument("--cheapest", action="store_true", help="send only URLs that are refused at once")
    parser.add_argument("--warm-up", type=int, default=200, help="hostile requests before anything is measured")
    parser.add_argument("--quiet-seconds", type=float, default=30.0, help="time of the streams alone [%(default)s]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    try:
        enter()
    except NoNetworkError as error:
        print(f"bench.gateway.media_hostile: {error}", file=sys.stderr)
        return 1
    # Imported here, because the attacking process, which imports this module, needs no torch.
    from bench.common.media_model import SMALL_AUDIO, SMALL_VISION, VOCAB, write_media_model

    with tempfile.TemporaryDirectory() as folder:
        write_media_model(Path(folder, "model"), SMALL_VISION, SMALL_AUDIO)
        with serving(Path(folder, "log"), str(Path(folder, "model")), "--kv-memory=256MiB") as (stack, url):
            figures = asyncio.run(measure(stack, url, options, VOCAB))
    report(figures)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    is_bad = figures["wrong"] or figures["private_connections"] or figures["itl_ms"]["attack"]["failures"]
    return 1 if is_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
