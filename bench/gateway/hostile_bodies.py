"""Find the worst request of each route of the API, and measure what it costs other clients if one key repeats it.

    python -m bench.gateway.hostile_bodies --out bodies.json

The stack has a random chat model, encoder and reranker, and two keys. First, each route gets requests that are at the
limits in one field: the longest texts, the most numbers and objects, and the deepest nesting, for fields that
/openapi.json names; then the worst of them together (`bench.gateway.hostile_forms`). The request with the largest delay
of GET /health, which is the delay of the gateway's event loop, counts as the worst one. Then one key sends it from
another process as fast as its limits allow, while the other key has open streams of tokens and a third client asks for
/health. Ratios are to the same streams without an attack. The exit code is 1 if a goal is missed: an ITL p99 of at most
1.2 times, and /health within 50 ms (p99).
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import http.client
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.common.services import serving
from bench.common.workloads import Request, Workload
from bench.gateway.hostile_forms import Attack, attacks, combined, routes
from bench.serving.load import Outcome, Server, new_file, percentile, summarize, table

Json = dict[str, Any]

KEYS = """
[others]
key = "others"

[hostile]
key = "hostile"
requests_per_minute = {rate}
max_concurrent = {connections}
"""
MODEL: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
"""The random chat model. Each of its tokens takes some milliseconds."""
ENCODERS: Mapping[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
"""The encoder and the reranker. Their vectors are as long as those of small models that people serve."""
WORST = 3
"""Number of requests that are combined with each other."""
BUSY_TRIES = 20
CONNECTIONS = 4
STREAMS, STREAM_TOKENS = 4, 100
ITL_GOAL, HEALTH_GOAL = 1.2, 0.05
"""The largest ratio of ITL p99, and the longest time of GET /health in seconds."""
PROBE_PAUSE = 0.005
ANSWER_SECONDS = 120.0
NICENESS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a body."""

    path: str
    what: str
    status: str
    seconds: float
    """Time to its answer when it is sent alone."""
    loop_delay: float
    """Longest time of GET /health meanwhile, in seconds."""
    itl_ratio: float = 0.0
    """ITL p99 of others while it is sent again and again, relative to a quiet time."""
    health_p99: float = 0.0
    """99th percentile of GET /health while it is sent again and again, in seconds."""
    sent: int = 0

    @property
    def meets_goal(self) -> bool:
        return self.itl_ratio <= ITL_GOAL and self.health_p99 <= HEALTH_GOAL


def attack(url: str, body: Attack, seconds: float, connections: int = CONNECTIONS) -> Counter[str]:
    """Send a body again and again. Runs in a process of its own. Returns the number of answers by status.

    Args:
        seconds: 0 sends it once.
    """
    if os.nice(0) < NICENESS:
        os.nice(NICENESS)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    place = urlsplit(url)
    assert place.hostname is not None

    def send() -> None:
        while True:
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_SECONDS)
            pause = 0.0
            try:
                kind = {"Content-Type": body.content_type} if body.body else {}
                connection.request(body.method, body.path, body.body, {**kind, "Authorization": "Bearer hostile"})
                answer = connection.getresponse()
                counts[str(answer.status)] += 1
                answer.read()
                pause = float(answer.getheader("Retry-After") or 0)
            except OSError as error:
                counts[type(error).__name__] += 1
            finally:
                connection.close()
            if time.monotonic() >= end:
                return
            time.sleep(min(pause, max(0.0, end - time.monotonic())))

    threads = [threading.Thread(target=send) for _ in range(connections if seconds else 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


class Measurement:
    """A running stack, its streams and its attacker."""

    def __init__(self, url: str, attackers: concurrent.futures.Executor, server: Server) -> None:
        self._url = url
        self._attackers = attackers
        self._server = server
        self._rng = random.Random(1)

    async def alone(self, body: Attack) -> Cost:
        """Send a request once, again if the key has used up its limit, and ask for /health meanwhile."""
        for _ in range(BUSY_TRIES):
            begun = time.perf_counter()
            job = self._attackers.submit(attack, self._url, body.without_parts(), 0)
            times = await self._health(job.done)
            status = ", ".join(job.result())
            seconds = time.perf_counter() - begun
            if status != "429":
                break
            await asyncio.sleep(1.0)
        return Cost(body.route, body.what, status, seconds, max(times))

    async def again(self, body: Attack, cost: Cost, seconds: float, quiet: float) -> Cost:
        """Send a body for some seconds beside streams."""
        job = self._attackers.submit(attack, self._url, body.without_parts(), seconds)
        times, itl = await asyncio.gather(self._health(job.done), self.streams(job.done))
        figures = {"itl_ratio": itl / quiet, "health_p99": percentile(times, 99), "sent": job.result().total()}
        return Cost(**{**asdict(cost), **figures})

    async def streams(self, is_over: Callable[[], bool]) -> float:
        """Return the ITL p99 of streams that run until `is_over` returns True; infinity if one of them fails."""
        outcomes: list[Outcome] = []
        while not outcomes or not is_over():
            prompts = [tuple(self._rng.choices(range(200), k=16)) for _ in range(STREAMS)]
            requests = tuple(Request(prompt, STREAM_TOKENS) for prompt in prompts)
            outcomes += await self._server.run(Workload("beside", requests, STREAMS))
        if failed := [each.error for each in outcomes if each.error]:
            print(f"{len(failed)} streams of another key failed: {failed[0]}", flush=True)
            return math.inf
        return summarize(outcomes)["all"]["itl_ms_p99"]

    async def _health(self, is_over: Callable[[], bool]) -> list[float]:
        times: list[float] = []
        place = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        while not times or not is_over():
            begun = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(PROBE_PAUSE)
        writer.close()
        return times


async def measure(url: str, options: argparse.Namespace) -> list[Cost]:
    """Return the cost of the worst request of each route."""
    context = multiprocessing.get_context("spawn")
    costs: list[Cost] = []
    with concurrent.futures.ProcessPoolExecutor(1, context) as attackers:
        async with Server(url, model="chat", api_key="others") as server:
            async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS) as client:
                openapi = (await client.get("/openapi.json")).json()
            stack, rng = Measurement(url, attackers, server), random.Random(options.seed)
            for path in options.only or dict.fromkeys(itertools.chain(*routes(openapi))):
                tried = await _try(stack, attacks(openapi, path, rng, options.bodies))
                tried += await _try(stack, combined([body for _, body in tried[:WORST]]))
                cost, body = max(tried, key=_badness)
                end = time.monotonic() + options.seconds
                quiet = await stack.streams(lambda end=end: time.monotonic() > end)
                costs.append(await stack.again(body, cost, options.seconds, quiet))
                told = costs[-1]
                print(f"== {path} {told.what}: {told.itl_ratio:.2f}, {1000 * told.health_p99:.0f} ms", flush=True)
    return costs


async def _try(stack: Measurement, bodies: Iterable[Attack]) -> list[tuple[Cost, Attack]]:
    """Send requests one after the other. Return them with their costs, the worst one first."""
    tried: list[tuple[Cost, Attack]] = []
    for body in bodies:
        cost = await stack.alone(body)
        print(
            f"{body.route} {body.what}: {cost.status}, {cost.seconds:.2f} s, {1000 * cost.loop_delay:.0f} ms",
            flush=True,
        )
        tried.append((cost, body))
    return sorted(tried, key=_badness, reverse=True)


def _badness(tried: tuple[Cost, Attack]) -> float:
    return tried[0].loop_delay


def report(costs: list[Cost]) -> None:
    """Print a table in Markdown."""
    head = ["route", "worst body", "status", "time, ms", "loop delay, ms", "sent", "ITL p99 ratio", "/health p99, ms"]
    rows = [
        [
            each.path,
            each.what,
            each.status,
            f"{1000 * each.seconds:.0f}",
            f"{1000 * each.loop_delay:.0f}",
            str(each.sent),
            f"{each.itl_ratio:.2f}",
            f"{1000 * each.health_p99:.0f}",
        ]
        for each in costs
    ]
    print(table(head, rows))
    if missed := [each.path for each in costs if not each.meets_goal]:
        print(f"{len(missed)} of {len(costs)} routes miss a goal: {', '.join(missed)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.hostile_bodies", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--bodies",
        type=int,
        default=60,
        help="bodies with one field at its limit that are tried for each route [%(default)s]",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each attack [%(default)s]")
    parser.add_argument("--rate", type=int, default=600, help="requests per minute of the hostile key [%(default)s]")
    parser.add_argument("--only", action="append", metavar="PATH", help="a route to measure [all]")
    parser.add_argument("--no-goal", action="store_true", help="end with 0 even if a goal is missed")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything that is random [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    # Imported here, because the attacking process, which imports this module, needs no torch.
    from tests.fuzz.pooling import write_models

    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder), dict(MODEL), **ENCODERS)
        keys = Path(folder, "keys.toml")
        keys.touch(0o600)
        keys.write_text(KEYS.format(rate=options.rate, connections=CONNECTIONS))
        gateway = (f"--api-keys-file={keys}", "--kv-memory=256MiB", f"--store={folder}/store.db")
        with serving(Path(folder, "log"), f"--models-file={models}", *gateway) as (_, url):
            costs = asyncio.run(measure(url, options))
    report(costs)
    if options.out:
        options.out.write_text(json.dumps([asdict(each) for each in costs], indent=1) + "\n")
    return 0 if options.no_goal or all(each.meets_goal for each in costs) else 1


if __name__ == "__main__":
    sys.exit(main())
