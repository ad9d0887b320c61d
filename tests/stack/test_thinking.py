"""Budgets of reasoning hold exactly, whatever becomes of the sequences: drafts, handoff, preemption, dying workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.common.mixed import answers
from bench.serving.thinking import complaints, thinking_requests
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.stack.processes import Stack
from tests.stack.stacks import Way, on

pytestmark = [pytest.mark.model, pytest.mark.stack]


@on(thorough=["two workers", "aggregated", "pools"])
async def test_reasoning_is_as_long_as_its_budget(stack: Stack, way: Way, real_model: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer(real_model(way.model))
    asked = thinking_requests(8, 1)
    found = await answers(stack.url, way.model, asked, concurrency=8)
    assert complaints(asked, found, tokenizer) == []
    await stack.settled()


@on("two workers")
async def test_a_budget_survives_its_worker(stack: Stack, way: Way, real_model: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer(real_model(way.model))
    asked = [request for request in thinking_requests(32, 2) if request.body["thinking_token_budget"] == 64]
    running = asyncio.create_task(answers(stack.url, way.model, asked, concurrency=8))
    await asyncio.sleep(1.0)
    for worker in stack.living("decode")[:1]:
        os.kill(worker, signal.SIGKILL)
    found = await running
    assert complaints(asked, found, tokenizer) == []
    await stack.settled()
