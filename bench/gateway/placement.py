"""CPU time of a placement in a large fleet, with warm and with cold caches of the processor.

    python -m bench.gateway.placement [--workers 2000] [--placements 500]

Half of the workers are prefill workers, and eight of them share a host. Before each placement, some workers report.
For each request, none, a few or all hosts have cached a part of its prompt. Cold means that a buffer which is larger
than the caches is read before each placement, as if other processes had used the core.
"""

from __future__ import annotations

import argparse
import random
import time

from bench.serving.load import percentile, table
from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.registry import Member
from paceline.services.gateway.routing.candidate_table import CandidateTable
from paceline.services.gateway.routing.candidates import Candidate, Need
from paceline.services.gateway.routing.router import place

WORKERS_PER_HOST = 8
REPORTS = 5
"""Workers that report before a placement."""
CACHES = b"\1" * (64 << 20)
"""More bytes than the processor's caches hold. Zeros would not do: the system maps them all to one page."""
LINE = 64
"""Bytes of a line of a cache."""


def candidate(number: int, draw: random.Random) -> Candidate:
    """Return a worker with a random load."""
    load = LoadReport(
        running=draw.randint(0, 40),
        queued_tokens=draw.choice([0, 0, draw.randint(0, 4000)]),
        prefill_tokens_per_second=draw.choice([1000.0, 1100.5, 2000.0]),
    )
    member = Member(
        worker_id=f"w{number}",
        role="prefill" if number % 2 else "decode",
        epoch=1,
        address="",
        host_id=f"h{number // WORKERS_PER_HOST}",
        state="ready",
        layout="layout",
        max_model_len=8192,
        max_seqs=64,
        load=load,
    )
    recent, fetch = draw.choice([0.0, 300.0, 77.7]), draw.choice([0.0, 1234.0, 20_000.0])
    return Candidate(member, in_flight=1, recent_tokens=recent, fetch_tokens_per_second=fetch)


def request(hosts: int, draw: random.Random) -> Need:
    """Return a request whose prompt is partly cached on some hosts."""
    holders = draw.sample(range(hosts), min(hosts, draw.choice([0, 1, 5, hosts])))
    cached = {f"h{host}": draw.choice([64, 64, 64, 512]) for host in holders}
    return Need(2000, prompt_tokens=draw.randint(600, 1900), cached=cached)


def measure(workers: int, placements: int, is_cold: bool) -> list[float]:
    """Return the CPU seconds of each placement."""
    draw = random.Random(1)
    fleet = CandidateTable(half_life=10.0, clock=time.monotonic)
    for number in range(workers):
        fleet.put(candidate(number, draw))
    times = []
    for _ in range(placements):
        need = request(max(1, workers // WORKERS_PER_HOST), draw)
        for _ in range(REPORTS):
            fleet.put(candidate(draw.randrange(workers), draw))
        if is_cold:
            sum(CACHES[::LINE])
        begun = time.thread_time()
        assert place(need, fleet) is not None
        times.append(time.thread_time() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.placement", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--placements", type=int, default=500)
    options = parser.parse_args()
    rows = []
    for name in ("warm", "cold"):
        times = [1e3 * each for each in measure(options.workers, options.placements, name == "cold")]
        rows.append([name, *(f"{percentile(times, share):.2f}" for share in (50, 90, 99))])
    print(table(["caches", "p50, ms of CPU", "p90", "p99"], rows))


if __name__ == "__main__":
    main()
