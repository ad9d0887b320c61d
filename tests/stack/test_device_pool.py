"""Decode workers with pools that are too small for all requests, above an arena that is always full.

Their tokens equal those of workers that compute in the arena, in spite of evictions, swaps and restarts.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from bench.common.mixed import Outcome, Request, answers
from tests.stack.processes import Stack
from tests.stack.stacks import Way, on
from tests.stack.test_equality import Outcomes, differences

pytestmark = [pytest.mark.model, pytest.mark.stack]

REQUESTS = 10
MAX_TOKENS = 80
LEAST = {"swap_outs": 0, "swap_ins": REQUESTS, "stored_blocks": 0, "device_blocks": 0, "blocks_total": 0}
"""Counters of a decode worker. Each must exceed its value here."""


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    """Outcomes of `crowd` on workers that compute in the arena, by model."""
    return {}


def crowd() -> list[Request]:
    """Return greedy and sampled requests. Every third one begins with the same 96 tokens."""
    rng = random.Random(7)
    shared = [rng.randrange(100, 40_000) for _ in range(96)]
    found = []
    for index in range(REQUESTS):
        own = [rng.randrange(100, 40_000) for _ in range(rng.randint(20, 150))]
        prompt = shared + own if index % 3 == 0 else own
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.0 if index % 2 else 0.7, "seed": index}
        found.append(Request({**body, "ignore_eos": True, "stream": True, "return_token_ids": True}))
    return found


async def ask_all(stack: Stack, model: str) -> list[Outcome]:
    return await answers(stack.url, model, crowd(), concurrency=REQUESTS)


def decode_stats(stack: Stack) -> dict[str, float]:
    (stats,) = (worker["stats"] for worker in stack.fleet()["workers"] if worker["role"] == "decode")
    return dict(stats)


@on("default", thorough=["gemma"])
async def test_a_crowd_gets_its_tokens_in_the_arena(stack: Stack, way: Way, outcomes: Outcomes) -> None:
    found = await ask_all(stack, way.model)
    assert differences(outcomes.setdefault(way.model, found), found) == []
    await stack.settled()


@on("pools", thorough=["gemma pools"])
async def test_a_crowd_gets_the_same_tokens_from_pools_in_spite_of_evictions(
    stack: Stack, way: Way, outcomes: Outcomes
) -> None:
    wanted = outcomes[way.model] if way.model in outcomes else await ask_all(stack, way.model)
    async with asyncio.timeout(400):  # it is random how many requests wait at the same time
        while True:
            assert differences(wanted, await ask_all(stack, way.model)) == []
            await asyncio.sleep(1.5)  # until the next heartbeat
            if all(decode_stats(stack).get(name, 0) > least for name, least in LEAST.items()):
                break
    await stack.settled()


@on("pools")
async def test_tokens_survive_restarts(stack: Stack, way: Way, outcomes: Outcomes) -> None:
    wanted = outcomes[way.model] if way.model in outcomes else await ask_all(stack, way.model)
    running = asyncio.create_task(ask_all(stack, way.model))
    for role in ("kvtransfer", "decode", "prefill"):
        await asyncio.sleep(1)
        assert not running.done()
        os.kill(stack.living(role)[0], signal.SIGKILL)
    assert differences(wanted, await running) == []
    await stack.settled()
