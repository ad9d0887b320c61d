"""A disk tier below the shared memory: what was evicted from that is found again, and gives the same tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.processes import Stack, serve

MODEL = "smollm2-135m-instruct"


@pytest.mark.model
@pytest.mark.stack
@pytest.mark.parametrize("pool", ["arena", "device"])
async def test_an_evicted_prompt_comes_back_from_the_disk(
    pool: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    real_model(MODEL)
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40_000) for _ in range(700)] for _ in range(3)]
    memory = ["--kv-memory=24MiB"] if pool == "arena" else ["--kv-memory=32MiB", "--kv-tier-memory=24MiB"]
    options = [f"--kv-pool={pool}", *memory, "--kv-disk-size=256MiB", f"--kv-disk-dir={tmp_path}"]
    with serve(tmp_path / "log", MODEL, *options) as stack:
        first = []
        for prompt in prompts:
            first.append(complete(stack.url, prompt))
            await counted(stack, "disk_written_blocks", 700 // 16 * len(first))
        assert [cached for cached, _ in first] == [0] * len(prompts)
        again = [complete(stack.url, prompt) for prompt in prompts]  # one context fits into the memory, and no more
        assert [tokens for _, tokens in again] == [tokens for _, tokens in first]
        assert all(cached > 600 for cached, _ in again), again
        await counted(stack, "disk_read_blocks", 700 // 16)  # of one prompt at least
        await stack.settled()


async def counted(stack: Stack, counter: str, blocks: int) -> None:
    """Waits until the disk's counter is at least there."""
    async with asyncio.timeout(30):
        while True:
            (stats,) = (each["stats"] for each in stack.fleet()["workers"] if each["role"] == "kvtransfer")
            if stats.get(counter, 0) >= blocks:  # it has none before its first heartbeat
                return
            await asyncio.sleep(0.1)


def complete(url: str, prompt: list[int]) -> tuple[int, list[int]]:
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]
