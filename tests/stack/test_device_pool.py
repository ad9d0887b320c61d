"""Workers with pools of their own, too small for all, above a tier that is always full: tokens are those of workers
that compute in the arena, over evictions, parkings and restarts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.processes import Stack, serve

REQUESTS = 12
MAX_TOKENS = 120
LEAST = {"parkings": 0, "swap_ins": REQUESTS, "stored_blocks": 0, "device_blocks": 0, "blocks_total": 0}
"""What a decode worker's counters have to exceed."""
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


def asked(model: str) -> list[dict[str, Any]]:
    """Prompts of which some begin alike, greedy and sampled."""
    rng = random.Random(7)
    shared = [rng.randrange(100, 40_000) for _ in range(96)]
    bodies = []
    for index in range(REQUESTS):
        own = [rng.randrange(100, 40_000) for _ in range(rng.randint(20, 150))]
        bodies.append(
            {
                "model": model,
                "prompt": shared + own if index % 3 == 0 else own,
                "max_tokens": MAX_TOKENS,
                "temperature": 0.0 if index % 2 else 0.7,
                "seed": index,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
    return bodies


async def answers(stack: Stack, bodies: list[dict[str, Any]]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:

        async def answer(body: dict[str, Any]) -> list[int]:
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return list(response.json()["choices"][0]["token_ids"])

        return list(await asyncio.gather(*map(answer, bodies)))


def decode_stats(stack: Stack) -> dict[str, float]:
    (stats,) = (worker["stats"] for worker in stack.fleet()["workers"] if worker["role"] == "decode")
    return dict(stats)


@pytest.mark.model
@pytest.mark.stack
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "gemma-3-270m"])
async def test_tokens_are_those_of_workers_without(
    model: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    real_model(model)
    bodies = asked(model)
    with serve(tmp_path / "log", model, "--kv-memory=1GiB") as stack:
        wanted = await answers(stack, bodies)
        await stack.settled()
    # For two or three contexts in a pool, and for all that are held at a time in the tier.
    options = ("--kv-pool=device", "--kv-memory=12MiB", "--kv-tier-memory=96MiB", f"--speculative-config={DRAFTS}")
    with serve(tmp_path / "log", model, *options) as stack:
        async with asyncio.timeout(150):  # how many wait at a time is a matter of luck
            while not all(decode_stats(stack).get(name, 0) > least for name, least in LEAST.items()):
                assert await answers(stack, bodies) == wanted
                await asyncio.sleep(1.5)  # for the next heartbeat
        running = asyncio.create_task(answers(stack, bodies))
        for role in ("kvtransfer", "decode", "prefill"):
            await asyncio.sleep(1)
            assert not running.done()
            os.kill(stack.living(role)[0], signal.SIGKILL)
        assert await running == wanted
        await stack.settled()
