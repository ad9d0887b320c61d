"""A disk tier below the arena: evicted blocks are read from the disk, and give the same tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.stack.processes import Stack
from tests.stack.stacks import Way, on

pytestmark = [pytest.mark.model, pytest.mark.stack]

PROMPTS = {"aggregated": (1, 700), "pools": (5, 400)}
"""By stack: how many prompts of how many tokens fit into its memory. Three times as many do not fit."""


@on("aggregated", thorough=["pools"])
async def test_an_evicted_prompt_comes_back_from_the_disk(
    stack: Stack, way: Way, request: pytest.FixtureRequest
) -> None:
    count, length = PROMPTS[request.node.callspec.params["way"]]
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(3 * count)]
    written, read = counter(stack, "disk_written_blocks"), counter(stack, "disk_read_blocks")
    first = []
    for prompt in prompts:
        first.append(complete(stack.url, way.model, prompt))
        if len(first) % count == 0:
            await reaches(stack, "disk_written_blocks", written + length // 16 * len(first))
    assert [cached for cached, _ in first] == [0] * len(prompts)
    again = [complete(stack.url, way.model, prompt) for prompt in prompts]
    assert [tokens for _, tokens in again] == [tokens for _, tokens in first]
    assert all(cached > length - 100 for cached, _ in again), again
    await reaches(stack, "disk_read_blocks", read + length // 16)
    await stack.settled()


def counter(stack: Stack, name: str) -> float:
    """Return a counter of the host's disk tier as of its last heartbeat."""
    (stats,) = (each["stats"] for each in stack.fleet()["workers"] if each["role"] == "kvtransfer")
    return float(stats.get(name, 0))


async def reaches(stack: Stack, name: str, blocks: float) -> None:
    """Wait until a counter has reached a value."""
    async with asyncio.timeout(30):
        while counter(stack, name) < blocks:
            await asyncio.sleep(0.1)


def complete(url: str, model: str, prompt: list[int]) -> tuple[int, list[int]]:
    """Return how many tokens of the prompt were cached, and the tokens of the answer."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]
