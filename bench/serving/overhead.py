"""Measure the part of a step that is not the forward pass: CPU time by process and thread of a stack under load.

    python -m bench.serving.overhead --rounds 3 --json /tmp/overhead.json -- --kv-memory 512MiB

Arguments after -- go to `paceline serve`. Requests come over HTTP. The client's own CPU time is shown but not counted.
CPU time is read from the kernel for each thread, so that other work on the machine changes the figures little. The
forward pass is the time of the compute threads and kernels, minus the time that the compute thread spends outside the
model on inputs and sampling, which workers report. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.common.services import names_by_pid, serving
from bench.common.systems import ServerError, ending_on_sigterm
from bench.common.workloads import WORKLOADS, make_workload
from bench.serving.load import Server, table, wake

SETTLE_SECONDS = 2.5
"""Time until the gateway has the latest counters: workers send them every second, and it reads them every half."""

COMPUTING = ("engine-compute", "kernels")
FORWARD, BESIDE = "forward passes", "compute threads, beside the model"
CLIENT = "client"

Times = dict[str, float]
"""CPU seconds, by title."""


def cpu_times(names: dict[int, str]) -> Counter[tuple[str, str]]:
    """Return CPU seconds since the start, by names of process and thread. Threads with the same name are added up.

    Args:
        names: names of processes, by process id.
    """
    seconds: Counter[tuple[str, str]] = Counter()
    for pid, process in names.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                name = (task / "comm").read_text().strip()
                known = name in COMPUTING or name == "engine-host"
                thread = name if known else "event loop" if task.name == str(pid) else "other threads"
                seconds[process, thread] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def split(threads: Counter[tuple[str, str]], beside: float) -> Times:
    """Return the same seconds by purpose. `beside` is the time that compute threads spent outside the model."""
    figures = {FORWARD: -beside, BESIDE: beside}
    for (process, thread), seconds in sorted(threads.items()):
        title = FORWARD if thread in COMPUTING else f"{process}, {thread}"
        figures[title] = figures.get(title, 0.0) + seconds
    return figures


def overhead(figures: Times) -> float:
    """Return the share of the stack's CPU time that is not the forward pass."""
    counted = {title: seconds for title, seconds in figures.items() if title != CLIENT}
    return 1 - counted[FORWARD] / sum(counted.values())


def worker_stats(metrics: str) -> Counter[tuple[str, str]]:
    """Parse metrics in Prometheus format. Return the sum of each worker statistic, by role and name."""
    stats: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "paceline:worker_stat":
                stats[sample.labels["role"], sample.labels["name"]] += sample.value
    return stats


async def measure(url: str, names: dict[int, str], workload: str, seed: int) -> tuple[Times, Times]:
    """Run a workload. Return CPU milliseconds per decode step, and other figures.

    Raises ServerError if a request fails.
    """
    async with Server(url) as server:
        await wake(server, seed, vocab=32_000)
        load = make_workload(workload, seed)
        await asyncio.sleep(SETTLE_SECONDS)
        stats, threads = worker_stats(await server.metrics()), cpu_times(names)
        began, client_cpu = time.perf_counter(), time.process_time()
        outcomes = await server.run(load)
        client_cpu, seconds = time.process_time() - client_cpu, time.perf_counter() - began
        threads = cpu_times(names) - threads
        await asyncio.sleep(SETTLE_SECONDS)
        stats = worker_stats(await server.metrics()) - stats
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise ServerError(f"{len(failed)} requests failed; the first: {failed[0]}")
    tokens = stats["decode", "sampled_tokens"]
    steps = stats["decode", "steps"]
    figures = split(threads, sum(stats[role, "host_cpu_seconds"] for role in ("prefill", "decode"))) | {
        CLIENT: client_cpu
    }
    others = {
        "tokens a step": tokens / steps,
        "ms a step, by the clock": 1000 * seconds / steps,
        # The counters add a step's time once for each request in it, so per token this is the mean time of a step.
        "forward pass of a step, ms by the clock": 1000 * stats["decode", "decode_model_seconds"] / tokens,
        "beside it, ms by the clock": 1000 * stats["decode", "decode_other_seconds"] / tokens,
    }
    return {title: 1000 * figure / steps for title, figure in figures.items()}, others


def medians(rounds: Sequence[Times]) -> Times:
    return {title: statistics.median(round_times.get(title, 0.0) for round_times in rounds) for title in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder of the model [%(default)s]")
    parser.add_argument("--workload", default="eight", choices=list(WORKLOADS), help="workload [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`")
    options = parser.parse_args()
    ending_on_sigterm()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder, "log"), options.model, *options.flags) as (stack, url),
    ):
        rounds = []
        for _ in range(options.rounds):
            seed = time.time_ns() % 10**9
            rounds.append(asyncio.run(measure(url, names_by_pid(stack), options.workload, seed)))
    figures, others = (medians(part) for part in zip(*rounds))
    share = statistics.median(overhead(round_times) for round_times, _ in rounds)
    rows = [[title, f"{value:.3f}"] for title, value in figures.items() if value >= 0.0005]
    rows += [["not the forward pass, % of the stack's", f"{100 * share:.1f}"]]
    print(table(["CPU time", "ms a step"], rows))
    print(table(["figure", "median"], [[title, f"{value:.2f}"] for title, value in others.items()]))
    if options.json:
        data = {"workload": options.workload, "cpu_ms_a_step": figures, "overhead": share, "figures": others}
        options.json.write_text(json.dumps(data, indent=2))


if __name__ == "__main__":
    main()
