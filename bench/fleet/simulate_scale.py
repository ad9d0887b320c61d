"""Simulate a large fleet, and print the time and the memory that the simulation takes.

    python -m bench.fleet.simulate_scale --trace mooncake_conversation.jsonl
    python -m bench.fleet.simulate_scale --trace mooncake_conversation.jsonl --workers 100 --requests 10000

The trace is repeated, with other blocks and denser arrivals, until there are enough requests. Every worker is a GPU
with estimated times of an 8-billion-parameter model. Three quarters of them are prefill workers, as prompts of 12,000
tokens and answers of 340 need.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.step_times import Curve, Delay, Profile, Spread, StepTimes, WorkerTimes
from paceline.simulator.gateway import GatewayOptions
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import simulate
from paceline.simulator.trace import LoadTrace, TraceRequest
from paceline.simulator.trace_files import read_trace

RATE_OF_A_WORKER = 0.8
"""Requests per second for each worker of the fleet."""

_STEPS = StepTimes(
    prefill=Curve(points=((0, 0.012), (2048, 0.10), (8192, 0.39))),
    prefill_pair=1.2e-9,
    decode=Curve(points=((1, 0.008), (32, 0.010), (256, 0.024))),
    decode_context=5e-8,
    shared=0.008,
    prefill_spread=Spread(quantiles=(0.9, 0.97, 1.0, 1.03, 1.3)),
    decode_spread=Spread(quantiles=(0.9, 0.97, 1.0, 1.03, 1.5)),
)
_WORKER = WorkerTimes(steps=_STEPS, max_seqs=64, max_batched_tokens=8192, join=Delay(seconds=0.001))
PROFILE = Profile(
    machine="H100, estimated",
    model="8B",
    token_bytes=131_072,
    host_tokens=8 * 400_000,
    transfer_bytes=4e10,
    prefill=_WORKER,
    decode=_WORKER,
    gateway=Delay(seconds=0.002, per_token=2e-7),
    handoff=Delay(seconds=0.002),
    first_token=Delay(seconds=0.001),
)


def repeated(trace: LoadTrace, count: int, rate: float) -> Iterator[TraceRequest]:
    """Yield `count` requests at a steady rate. Each round through the trace has blocks of its own."""
    known = list(trace)
    first = 1 + max((max(request.blocks) for request in known if request.blocks), default=0)
    for number in range(count):
        turn, place = divmod(number, len(known))
        request = known[place]
        blocks = [name + turn * first for name in request.blocks]
        yield request._replace(arrival=number / rate, blocks=blocks)


def announced(requests: Iterator[TraceRequest], count: int) -> Iterator[TraceRequest]:
    """Yield the requests. After each twentieth of them, print the time and memory so far."""
    for number, request in enumerate(requests):
        if number and number % max(1, count // 20) == 0:
            print(f"{number / count:.0%} have come: {time.process_time():.0f} s of CPU, {_most_memory()}", flush=True)
        yield request


def _most_memory() -> str:
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a trace in Mooncake's format")
    parser.add_argument("--workers", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument(
        "--cache-policy",
        default="lru",
        help="cache policy of the hosts [%(default)s]. The product's default, adaptive, takes more memory, as each "
        "host remembers the blocks that it has evicted",
    )
    options = parser.parse_args()
    trace = read_trace(options.trace)
    decode = max(1, options.workers // 4)
    # One simulated gateway stands for all that such a fleet has, each with a queue of its own.
    gateway = GatewayOptions(max_waiting=max(256, options.workers))
    scenario = Scenario(PROFILE, options.workers - decode, decode, cache_policy=options.cache_policy, gateway=gateway)
    rate = RATE_OF_A_WORKER * options.workers
    begin, cpu = time.perf_counter(), time.process_time()
    requests = announced(repeated(trace, options.requests, rate), options.requests)
    result = simulate(scenario, LoadTrace(trace.block_tokens, requests))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{options.workers} workers, {options.requests} requests, {result.seconds:.0f} s simulated")
    print(f"{seconds:.0f} s, {cpu:.0f} s of CPU ({cpu / options.requests * 1000:.2f} ms a request)")
    print(_most_memory())
    for found in result.classes.values():
        print(f"TTFT p50 {found.ttft.p50:.3f} s, p99 {found.ttft.p99:.3f} s; ITL p99 {found.itl.p99 * 1000:.1f} ms")
        print(
            f"{found.finished} ended, {found.refused} refused ({found.refused / found.requests:.2%}; {found.refusals})"
        )
        print(f"{found.attempts} attempts, {found.hit_rate:.1%} cached, waited p99 {found.queued.p99:.3f} s")
    print(", ".join(f"{role} busy {share:.0%}" for role, share in result.busy.items()))


if __name__ == "__main__":
    sys.exit(main())
