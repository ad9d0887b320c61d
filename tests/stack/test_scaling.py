"""Workers are added and drained while streams run. No token, request or attempt is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from bench.common.mixed import Request, answers
from bench.fleet import flips
from tests.stack.processes import Stack
from tests.stack.stacks import Way, on
from tests.stack.test_equality import differences

pytestmark = [pytest.mark.model, pytest.mark.stack]

STREAMS = 8
MAX_TOKENS = 200
ACTIONS = 2
SETTLE_SECONDS = 60.0


def streams() -> list[Request]:
    """Return greedy and sampled requests that run for some seconds."""
    rng = random.Random(11)
    asked = []
    for index in range(STREAMS):
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randint(20, 200))]
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0 if index % 2 else 0.8, "seed": index}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True, "request_id": f"scaled-{index}"}
        asked.append(Request(body))
    return asked


async def scale(stack: Stack, **workers: int) -> None:
    """Request numbers of workers by role. Wait until the gateway sees them all ready and no worker drains."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client:
        (await client.post("/fleet/scale", json=workers)).raise_for_status()
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                state = (await client.get("/fleet/scale")).json()
                seen = Counter(each["role"] for each in stack.fleet()["workers"] if each["state"] == "ready")
                if all(seen[name] == role["wanted"] and not role["draining"] for name, role in state.items()):
                    return
                await asyncio.sleep(0.2)


async def failures(stack: Stack) -> list[list[str]]:
    """Return for each stream the reasons why its attempts ended early."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as client:
        traces = [(await client.get(f"/trace/scaled-{index}")).json() for index in range(STREAMS)]
    parts = [part for trace in traces for part in trace["parts"]]
    return [[each["failure"]["reason"] for each in part["attempts"] if each["failure"]] for part in parts]


@pytest.mark.thorough
@on("default")
async def test_streams_survive_scaling(stack: Stack, way: Way) -> None:
    undisturbed = await answers(stack.url, way.model, streams(), concurrency=STREAMS)
    await scale(stack, decode=2)
    running = asyncio.create_task(answers(stack.url, way.model, streams(), concurrency=STREAMS))
    await asyncio.sleep(0.7)
    await scale(stack, decode=1, prefill=2)
    await scale(stack, prefill=1)
    disturbed = await running
    assert differences(undisturbed, disturbed) == []
    moved = [reasons for reasons in await failures(stack) if reasons]
    assert moved, "no stream was on the worker that drained"
    assert all(reason.startswith("decode worker") and reason.endswith("drains") for (reason,) in moved)
    await stack.settled()


@on("default")
async def test_no_stream_is_lost_or_changed_while_workers_drain_and_change_their_roles(stack: Stack, way: Way) -> None:
    """A decode worker is added, and then two workers exchange their roles. See bench/fleet/flips.py for 200 actions."""
    tally = await flips.measure(stack.url, way.model, actions=ACTIONS, count=8, seed=11)
    assert (tally.lost, tally.changed) == ([], [])
    assert tally.compared > 0
    assert tally.actions == {"up": 1, "exchange": 1}
    await scale(stack, prefill=1, decode=1)
    await stack.settled()
