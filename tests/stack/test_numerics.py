"""Decode workers with different instruction sets. One of them is killed while it serves a stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.serving.equality import shorten
from paceline.kernels import instruction_set_of, select_kernels
from paceline.kernels.native.library import instruction_sets
from tests.stack.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

TOKENS = 200
"""Enough that a worker is killed long before the end of its stream."""

MOST_REQUESTS = 20
"""Requests until one is placed at a certain worker. The router may prefer others while the machine is busy."""

CPU = torch.device("cpu")
USUAL = instruction_set_of(select_kernels(CPU), CPU)
OTHER = next(name for name in reversed(instruction_sets()) if name != USUAL)
"""The instruction set that workers of this environment use, and another one."""


@pytest.fixture
def cluster(tmp_path: Path, real_model: Callable[[str], Path]) -> Iterator[Cluster]:
    """A cluster in which all workers but decode-1 have the usual instruction set."""
    shorten(real_model("smollm2-135m-instruct"), 2, tmp_path / "model")
    with Cluster(tmp_path, tmp_path / "model") as running:
        names = [running.start_worker(role, 0) for role in ("prefill", "decode")]
        names += [running.start_worker("decode", 1, isa=OTHER), running.start_worker("decode", 2)]
        running.start_gateway()
        running.wait_ready(*names)
        yield running


async def changes(cluster: Cluster) -> float:
    """Return how many attempts of ended requests went on with other numerics."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=10) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    (line,) = (line for line in lines if line.startswith("paceline:request_numerics_changes_total"))
    return float(line.split()[-1])


async def idle(cluster: Cluster) -> None:
    """Wait until no living worker reports a request, because the router avoids workers that seem busy."""

    def is_busy(worker: dict[str, Any]) -> bool:
        return bool(worker["state"] == "ready" and worker["running"] + worker["in_flight"])

    async with asyncio.timeout(30):
        while any(map(is_busy, (await cluster.fleet())["workers"])):
            await asyncio.sleep(0.1)


async def stream_over_a_death(
    cluster: Cluster, request_id: str, victims: Collection[str]
) -> tuple[str, list[str], list[str]]:
    """Send a request, and kill the worker that decodes it when its first tokens have come.

    A request at a worker that is not among `victims` ends undisturbed, and the next one is sent.

    Returns the text, the decode workers of the two attempts, and the lines of the trace about changed numerics.
    """
    for number in range(MOST_REQUESTS):
        await idle(cluster)
        begun, own_id = asyncio.Event(), f"{request_id}-{number}"

        def on_token(count: int, begun: asyncio.Event = begun) -> None:
            if count == 3:
                begun.set()

        running = asyncio.create_task(cluster.stream(on_token, max_tokens=TOKENS, request_id=own_id))
        async with asyncio.timeout(120):
            await begun.wait()
            first = await cluster.decodes(own_id)
            if first in victims:
                cluster.processes[first].popen.kill()
            text = await running
            if first not in victims:
                continue
            while "end" not in (lines := await cluster.trace(own_id))[-1]:
                await asyncio.sleep(0.1)
        assert f"length; {TOKENS} tokens in 2 attempts" in lines[-1]
        attempts = [line for line in lines if " attempt " in line]
        workers = [name for line in attempts for name in re.findall(r"decode-\d", line)]
        assert len(workers) == 2
        assert workers[0] == first
        return text, workers, [line for line in lines if " numerics " in line]
    raise AssertionError(f"none of {MOST_REQUESTS} requests was placed at {victims}")


async def test_a_stream_goes_on_with_the_same_numerics_or_else_says_so(cluster: Cluster) -> None:
    await cluster.wait_workers(4)
    workers = {worker["worker_id"]: worker["numerics"] for worker in (await cluster.fleet())["workers"]}
    usual, other = f"{USUAL} bfloat16", f"{OTHER} bfloat16"
    assert workers == {"prefill-0": usual, "decode-0": usual, "decode-1": other, "decode-2": usual, "host-0": None}
    assert f", computes with {other}\n" in cluster.processes["decode-1"].text

    expected = await cluster.stream(max_tokens=TOKENS)
    text, placed, changed = await stream_over_a_death(cluster, "same", ("decode-0", "decode-2"))
    assert text == expected
    assert sorted(placed) == ["decode-0", "decode-2"]
    assert changed == []
    assert await changes(cluster) == 0

    # Only one worker of each instruction set is left.
    left = ("decode-1", placed[1])
    _, placed, changed = await stream_over_a_death(cluster, "other", left)
    assert sorted(placed) == sorted(left)
    before, now = (workers[name] for name in placed)
    assert len(changed) == 1
    assert changed[0].endswith(f"of decode: {before} before, {now} now; tokens may differ")
    assert await changes(cluster) == 1
    await cluster.settled()
