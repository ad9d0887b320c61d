"""POST /reset_prefix_cache: arena, disk and devices forget, and requests get the same tokens."""

from __future__ import annotations

import random

import httpx
import pytest

from tests.stack.processes import Stack
from tests.stack.stacks import Way, on
from tests.stack.test_disk import complete

pytestmark = [pytest.mark.model, pytest.mark.stack]


@on("pools")
async def test_a_prompt_is_computed_again_after_the_caches_were_reset(stack: Stack, way: Way) -> None:
    rng = random.Random(11)
    prompt = [rng.randrange(100, 40_000) for _ in range(100)]
    asked = [complete(stack.url, way.model, prompt) for _ in range(2)]
    async with httpx.AsyncClient(timeout=30) as client:
        reset = (await client.post(f"{stack.url}/reset_prefix_cache")).raise_for_status().json()
    assert reset["blocks"] >= 6
    assert reset["device_blocks"] > 0
    asked.append(complete(stack.url, way.model, prompt))
    assert [cached for cached, _ in asked] == [0, 96, 0]
    assert len({tuple(tokens) for _, tokens in asked}) == 1
    await stack.settled()
