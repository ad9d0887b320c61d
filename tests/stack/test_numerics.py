"""Decode workers with different instruction sets. One of them is killed while it serves a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.equality import shorten
from paceline.kernels import instruction_set_of, select_kernels
from paceline.kernels.native.library import instruction_sets
from tests.stack.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

TOKENS = 200
"""Enough that a worker is killed long before the end of its stream."""

CPU = torch.device("cpu")
USUAL = instruction_set_of(select_kernels(CPU), CPU)
OTHER = next(name for name in reversed(instruction_sets()) if name != USUAL)
"""The instruction set that workers of this environment use, and another one."""


@pytest.fixture
def cluster(tmp_path: Path, real_model: Callable[[str], Path]) -> Iterator[Cluster]:
    """A cluster in which all workers but decode-1 have the usual instruction set. Of equal workers the router chooses
    the one with the lowest number."""
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


async def stream_over_a_death(cluster: Cluster, request_id: str) -> tuple[str, list[str]]:
    """Send a request, and kill the worker that decodes it when its first tokens have come.

    Returns the text, and the lines of the request's trace that name its decode workers and changed numerics.
    """
    await idle(cluster)
    begun = asyncio.Event()

    def on_token(count: int) -> None:
        if count == 3:
            begun.set()

    running = asyncio.create_task(cluster.stream(on_token, max_tokens=TOKENS, request_id=request_id))
    async with asyncio.timeout(120):
        await begun.wait()
        cluster.processes[await cluster.decodes(request_id)].popen.kill()
        text = await running
        while "end" not in (lines := await cluster.trace(request_id))[-1]:
            await asyncio.sleep(0.1)
    assert f"length; {TOKENS} tokens in 2 attempts" in lines[-1]
    return text, [line for line in lines if " attempt " in line or " numerics " in line]


async def test_a_stream_goes_on_with_the_same_numerics_or_else_says_so(cluster: Cluster) -> None:
    await cluster.wait_workers(4)
    workers = {worker["worker_id"]: worker["numerics"] for worker in (await cluster.fleet())["workers"]}
    usual, other = f"{USUAL} bfloat16", f"{OTHER} bfloat16"
    assert workers == {"prefill-0": usual, "decode-0": usual, "decode-1": other, "decode-2": usual, "host-0": None}
    assert f", computes with {other}\n" in cluster.processes["decode-1"].text

    expected = await cluster.stream(max_tokens=TOKENS)
    text, lines = await stream_over_a_death(cluster, "same")
    assert text == expected
    assert ["decode-0" in lines[0], "decode-2" in lines[1], len(lines)] == [True, True, 2]
    assert await changes(cluster) == 0

    # Only one worker of each instruction set is left.
    _, lines = await stream_over_a_death(cluster, "other")
    assert ["decode-1" in lines[0], "decode-2" in lines[1], len(lines)] == [True, True, 3]
    assert lines[2].endswith(f"of decode: {other} before, {usual} now; tokens may differ")
    assert await changes(cluster) == 1
    await cluster.settled()
