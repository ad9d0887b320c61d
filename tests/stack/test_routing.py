"""Two hosts with a prefill and a decode worker each: requests find the cache that has their prefix."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.namespaces import ONE_HOST
from paceline.core.block_pool import BlockEvent
from paceline.core.hashing import HashChain
from paceline.services.common.block_stream import BlockBatch, blocks_stream
from paceline.services.common.registry import read_members
from tests.stack.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

ANSWER = 24


@pytest.fixture
async def cluster(tmp_path: Path, real_model: Callable[[str], Path]) -> AsyncIterator[Cluster]:
    with Cluster(tmp_path, real_model("smollm2-135m-instruct"), ONE_HOST) as running:
        workers = [running.start_worker(role, host, host=host) for host in (0, 1) for role in ("prefill", "decode")]
        running.start_gateway()
        running.wait_ready(*workers)
        await running.wait_workers(4)
        yield running


@pytest.fixture
async def hints(cluster: Cluster) -> AsyncIterator[redis.Redis]:
    client: redis.Redis = redis.Redis.from_url(cluster.redis_url)
    yield client
    await client.aclose()


def tokens(seed: int, count: int = 320) -> list[int]:
    return random.Random(seed).choices(range(1000, 30_000), k=count)


class Answer:
    """What came of a prompt, and how much of it was not computed."""

    def __init__(self, body: dict[str, Any]) -> None:
        (choice,) = body["choices"]
        self.token_ids: list[int] = choice["token_ids"]
        self.cached: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]


async def ask(cluster: Cluster, prompt: Sequence[int], salt: str = "") -> Answer:
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt or None,
    }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    # Blocks are known to the gateway some tenths of a second after they are full.
    await asyncio.sleep(1)
    return Answer(answer.json())


async def same_as_cold(cluster: Cluster, prompt: Sequence[int], answer: Answer) -> None:
    """Another tenant asks the same: nothing of it is cached, and the tokens are the same."""
    cold = await ask(cluster, prompt, salt="another tenant")
    assert cold.cached == 0
    assert answer.token_ids == cold.token_ids


async def test_each_conversation_stays_with_its_cache(cluster: Cluster, hints: redis.Redis) -> None:
    conversations = [tokens(seed) for seed in range(4)]
    for turn in range(3):
        for number, conversation in enumerate(conversations):
            answer = await ask(cluster, conversation)
            # All of the turns before, answers too, but for what fills no block.
            before = len(conversation) - 40 - 1 if turn else 0
            assert answer.cached == before // 16 * 16, (turn, number)
            last = list(conversation)
            conversation += answer.token_ids + tokens(100 * number + turn, 40)
        if turn == 0:
            await hints.flushall()
        if turn == 1:
            # A gateway that starts anew asks the hosts what they have.
            cluster.processes["gateway"].stop()
            await hints.flushall()
            cluster.start_again("gateway")
            await cluster.wait_workers(4)
            await asyncio.sleep(2)
    hosts = (await cluster.fleet())["hosts"]
    assert all(host["cached"] > 0 for host in hosts)  # they have spread
    await same_as_cold(cluster, last, answer)
    await cluster.settled()


async def test_a_prefix_comes_from_a_host_that_computes_no_more(cluster: Cluster) -> None:
    conversation = tokens(7)
    answer = await ask(cluster, conversation)
    hosts = (await cluster.fleet())["hosts"]
    holder = next(int(host["host_id"].removeprefix("host-")) for host in hosts if host["cached"])
    for role in ("decode", "prefill"):
        assert cluster.processes.pop(f"{role}-{holder}").stop() == 0
    await cluster.wait_workers(2)
    before = len(conversation) + len(answer.token_ids) - 1
    conversation += answer.token_ids + tokens(8, 40)
    answer = await ask(cluster, conversation)
    assert answer.cached == before // 16 * 16
    await same_as_cold(cluster, conversation, answer)
    await cluster.settled()


async def test_a_wrong_hint_costs_a_miss(cluster: Cluster, hints: redis.Redis) -> None:
    await ask(cluster, tokens(1))
    stream = blocks_stream("default")
    (_, newest), *_ = await hints.xrevrange(stream, count=1)
    batch = BlockBatch.from_entry(newest)
    assert batch is not None
    layout = next(member.layout for member in await read_members(hints, "default") if member.role == "decode")
    prompt, chain = tokens(2), HashChain(layout)
    chain.extend(prompt)
    lies = tuple(BlockEvent("stored", 0, digest) for digest in chain.hashes)
    lie = BlockBatch(batch.host_id, batch.pool, batch.first + len(batch.events), lies)
    await hints.xadd(stream, lie.to_entry())
    await asyncio.sleep(1)
    answer = await ask(cluster, prompt)
    assert answer.cached == 0
    await same_as_cold(cluster, prompt, answer)
    await cluster.settled()
