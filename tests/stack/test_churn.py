"""Hundreds of mixed requests, many of them cancelled at random, leak nothing."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM, on

pytestmark = [pytest.mark.model, pytest.mark.stack]

REQUESTS = 500
CONCURRENCY = 16
GROWTH_BYTES = 64 << 20
"""Allowed growth of one process. Allocators keep some memory; leaking a row of logits for each request would take more.
"""


@on("default")
async def test_hundreds_of_requests_leave_nothing_behind(stack: Stack) -> None:
    rng = random.Random(2)
    shared = "A long shared introduction that many requests have in common. " * 6
    outcomes: dict[str, int] = {"done": 0, "cancelled": 0}
    slots = asyncio.Semaphore(CONCURRENCY)

    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:

        async def request(index: int) -> None:
            body = {
                "model": SMOLLM,
                "prompt": (shared if rng.random() < 0.3 else "") + f"Request {index} says",
                "max_tokens": rng.choice((1, 2, 4, 8)),
                "temperature": rng.choice((0, 0.8)),
                "stream": rng.random() < 0.5,
                "n": 2 if rng.random() < 0.1 else 1,
                "logprobs": 2 if rng.random() < 0.1 else None,
                "stop": ["a"] if rng.random() < 0.2 else None,
                "presence_penalty": 0.5 if rng.random() < 0.1 else 0,
            }
            # On any machine, some clients disconnect before their request can be placed.
            patience = rng.choice((0.02, 0.2, 1.0)) * rng.random() if rng.random() < 0.4 else 120
            async with slots:
                try:
                    async with asyncio.timeout(patience):
                        response = await client.post("/v1/completions", json=body)
                    assert response.status_code == 200, response.text
                    outcomes["done"] += 1
                except TimeoutError:
                    outcomes["cancelled"] += 1

        await asyncio.gather(*(request(index) for index in range(REQUESTS // 5)))
        await settled(stack)
        before = private_bytes(stack)
        await asyncio.gather(*(request(index) for index in range(REQUESTS // 5, REQUESTS)))
    await settled(stack)
    after = private_bytes(stack)

    assert outcomes["done"] + outcomes["cancelled"] == REQUESTS
    assert outcomes["done"] > 150
    assert outcomes["cancelled"] > 25
    assert {name: grown for name in after if (grown := after[name] - before[name]) > GROWTH_BYTES} == {}


async def settled(stack: Stack) -> None:
    """Wait until no block is leased or in flight, and check that no call is left."""
    await stack.settled()
    workers = [worker for worker in stack.fleet()["workers"] if worker["role"] in ("prefill", "decode")]  # type: ignore[attr-defined]
    assert [worker["in_flight"] for worker in workers] == [0] * len(workers)


def private_bytes(stack: Stack) -> dict[int, int]:
    """Return by pid the memory that a process shares with no other, so without the arena and the model's file."""
    return {process.pid: process.memory_full_info().uss for process in stack.family()}
