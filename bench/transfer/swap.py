"""Measure the cost of moving blocks between a worker's pool and the tier below it.

    python -m bench.transfer.swap --rounds 5

Two stacks of `paceline serve --kv-pool device` get the same requests in turns, eight at a time. The tier already has
the blocks of the prompts. In the first stack the workers' pools have little more room than running requests need.
Every request then loads its prompt's blocks, in the prefill worker and again in the decode worker, and stores the
blocks that it generates. In the second stack the pools have room for all blocks, and nothing is loaded after the first
round. The difference is the cost of swapping. The decode worker reports how long loading took. "join" is the gap after
a request's first token, "later" are the other gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.services import serving
from bench.common.systems import ending_on_sigterm
from bench.common.workloads import Request, Workload
from bench.serving.load import Server, ServerError, new_file, percentile, summarize, table

FIGURES = (
    *(f"itl_ms_p{percent}" for percent in (50, 90, 99)),
    *("join_ms_p50", "join_ms_p90", "later_ms_p50", "later_ms_p99"),
    *("ttft_ms_p50", "output_tokens_per_s"),
)
HEARTBEAT_SECONDS = 2.5
"""Time until the gateway has the workers' newest figures."""

_BUCKET = re.compile(r'paceline:kv_swap_in_seconds_bucket\{le="([^"]+)".*role="decode".*\} (\S+)')
_TIMES = re.compile(r'paceline:num_(swap_outs|preemptions)_total\{.*role="decode".*\} (\S+)')
_BYTES = re.compile(r'paceline:kv_offload_bytes_total\{direction="load".*role="decode".*\} (\S+)')


def make_rounds(prompts: int, prompt_tokens: int, tokens: int, rounds: int, concurrency: int = 8) -> list[Workload]:
    """Return `rounds + 1` workloads with the same prompts. The first one computes them."""
    source = random.Random(5)
    asked = [tuple(source.choices(range(1000, 20_000), k=prompt_tokens)) for _ in range(prompts)]
    return [
        Workload("swap", tuple(Request(prompt, tokens) for prompt in source.sample(asked, prompts)), concurrency)
        for _ in range(rounds + 1)
    ]


def buckets(metrics: str) -> dict[float, float]:
    """Parse the histogram of load times: how often a request's blocks were loaded within each bound in seconds."""
    return {float(bound): float(count) for bound, count in _BUCKET.findall(metrics)}


def quantile(counts: dict[float, float], share: float) -> float:
    """Return the seconds within which this share of loads was done, linear within a bucket."""
    total, low, below = counts[float("inf")], 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= share * total > 0:
            return low if bound == float("inf") else low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return float("nan")


def gaps(requests: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return percentiles of the gaps between chunks, in milliseconds.

    "join" is the gap after the first token, when a request joins the decode batch. "later" are all other gaps.

    Args:
        requests: the arrival times of each request's chunks, in seconds.
    """
    pairs = [[later - earlier for earlier, later in itertools.pairwise(times)] for times in requests]
    first, others = [pair[0] for pair in pairs if pair], [gap for pair in pairs for gap in pair[1:]]
    return {
        f"{name}_ms_p{percent}": 1000 * percentile(values, percent)
        for name, values in (("join", first), ("later", others))
        for percent in (50, 90, 99)
    }


async def measure(urls: dict[str, str], rounds: list[Workload]) -> dict[str, Any]:
    """Run the rounds on both stacks and return the figures. Raises ServerError if a request fails."""
    found: dict[str, Any] = {name: [] for name in urls}
    before: dict[float, float] = {}
    for number, workload in enumerate(rounds):
        for name, url in urls.items():
            async with Server(url) as server:
                outcomes = await server.run(workload)
                figures = summarize(outcomes)["all"]
                if figures["failures"]:
                    raise ServerError(f"{name}: {figures['failures']:.0f} requests failed")
                figures |= gaps([outcome.chunks for outcome in outcomes])
                await asyncio.sleep(HEARTBEAT_SECONDS)
                metrics = await server.metrics()
            print(f"round {number} of {len(rounds) - 1}: {name}", file=sys.stderr)
            figures["loaded_mib"] = float(_BYTES.findall(metrics)[0]) / 2**20
            if number:
                found[name].append(figures)
            if name == "small":
                after = buckets(metrics)
                before = before or after
                found |= {kind: float(count) for kind, count in _TIMES.findall(metrics)}
    found["swap_in_seconds"] = {bound: count - before[bound] for bound, count in after.items()}
    return found


def report(found: dict[str, Any]) -> str:
    rows = []
    for figure in FIGURES:
        small, large = (statistics.median(each[figure] for each in found[name]) for name in ("small", "large"))
        rows.append([figure, f"{small:.1f}", f"{large:.1f}", f"{small / large:.3f}"])
    return (
        table(["figure", "swapping", "room for all", "ratio"], rows)
        + f"\n{loading_times(found['swap_in_seconds'])}"
        + f"\nswapped out: {found['swap_outs']:.0f}, preempted and computed again: {found['preemptions']:.0f}"
    )


def loading_times(swaps: dict[float, float]) -> str:
    """Return a text with the number of loads of a request's blocks, and their times."""
    if not (count := swaps[float("inf")]):
        return "no block was loaded, so nothing was measured: give a smaller --small, or more prompts"
    times = ", ".join(f"p{share * 100:.0f} {quantile(swaps, share) * 1000:.1f} ms" for share in (0.5, 0.95, 0.99))
    return f"blocks of a request loaded: {count:.0f} times, {times}; {swaps[0.01] / count:.1%} within 10 ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer.swap", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder of the model [%(default)s]")
    parser.add_argument("--prompts", type=int, default=32, help="number of prompts [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--small", default="160MiB", help="size of a worker's pool with room for running requests only")
    parser.add_argument("--large", default="640MiB", help="size of a pool with room for all requests")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`, after --")
    options = parser.parse_args()
    ending_on_sigterm()
    pool = ("--kv-pool=device", "--kv-memory=1GiB", *options.flags)
    sizes = (options.prompts, options.prompt_tokens, options.tokens, options.rounds, options.concurrency)
    rounds = make_rounds(*sizes)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder, "small"), options.model, f"--kv-pool-memory={options.small}", *pool) as (_, small),
            serving(Path(folder, "large"), options.model, f"--kv-pool-memory={options.large}", *pool) as (_, large),
        ):
            found = asyncio.run(measure({"small": small, "large": large}, rounds))
    except (RuntimeError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report(found))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
