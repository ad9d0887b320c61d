"""Checks of a model that sleeps in a real stack: its memory, and its requests in flight."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence

import httpx
import psutil

from tests.stack.processes import Stack, arenas

LONG = 600
"""Tokens of a request that still runs when its model is told to sleep."""


async def stream(client: httpx.AsyncClient, model: str) -> AsyncIterator[tuple[list[int], str | None]]:
    """Yield the tokens of each event of a long answer, and the reason of its end."""
    body = {"prompt": "x", "max_tokens": LONG, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json={"model": model, "stream": True, **body}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                yield choice["token_ids"] or [], choice["finish_reason"]


async def long_answer(client: httpx.AsyncClient, model: str, begun: asyncio.Event) -> tuple[list[int], str | None]:
    """Return the tokens of a long answer and the reason of its end. Set `begun` when the first tokens have come."""
    tokens: list[int] = []
    reason = None
    async for more, ended in stream(client, model):
        tokens += more
        reason = ended or reason
        begun.set()
    return tokens, reason


def workers(stack: Stack, model: str) -> list[psutil.Process]:
    return [psutil.Process(pid) for role in ("prefill", "decode") for pid in stack.living(f"{model}/{role}")]


def weights_in_memory(processes: Sequence[psutil.Process]) -> int:
    """Return the bytes of packed weights that these processes have in memory."""
    maps = (each for process in processes for each in process.memory_maps())
    return sum(each.rss for each in maps if ".shards/" in each.path)


def blocks_in_memory(processes: Sequence[psutil.Process]) -> int:
    """Return the bytes of memory that the arena of these processes takes."""
    (arena,) = arenas(processes)
    return os.stat(arena).st_blocks * 512
