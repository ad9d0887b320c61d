"""Two hosts with a prefill and a decode worker each. Requests find the cache that has their prefix."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.common.namespaces import ONE_HOST
from paceline.core.block_pool import BlockEvent
from paceline.core.context import Context
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import read_members
from paceline.services.common.streams import BlockBatch, blocks_stream
from tests.services.gateway.toy_kvtransfer import salt_of
from tests.stack.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.stack]

ANSWER = 24


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, real_model: Callable[[str], Path]) -> Iterator[Cluster]:
    """The two hosts with their workers, which all tests share, without a gateway."""
    with Cluster(tmp_path_factory.mktemp("cluster"), real_model("smollm2-135m-instruct"), ONE_HOST) as running:
        names = [running.start_worker(role, host, host=host) for host in (0, 1) for role in ("prefill", "decode")]
        running.wait_ready(*names)
        yield running


@pytest.fixture
async def cluster(workers: Cluster) -> AsyncIterator[Cluster]:
    """All workers, restarted if an earlier test stopped them, and a new gateway that has no hints yet."""
    stopped = [name for name, process in workers.processes.items() if not process.alive]
    for name in stopped:
        workers.start_again(name)
    gateway = workers.start_gateway()
    workers.wait_ready(*stopped)
    await workers.wait_workers(4)
    yield workers
    assert workers.processes.pop(gateway).stop() == 0


class Hints:
    """The block events of all hosts, as Redis gives them to gateways."""

    def __init__(self, client: redis.Redis, layout: str) -> None:
        self.client = client
        self.layout = layout

    async def batches(self) -> list[BlockBatch]:
        """Return the batches of events, the newest last."""
        batches = [BlockBatch.from_entry(entry) for _, entry in await self.client.xrange(blocks_stream("default"))]
        return [batch for batch in batches if batch is not None]

    async def tell_of(self, context: Sequence[int]) -> None:
        """Wait until the gateway knows all full blocks of a context."""
        links = Context(context[:-1], salt_of()).links(self.layout)  # the KV of the newest token is not computed yet
        async with asyncio.timeout(10):
            while links[-1] not in [event.hash for batch in await self.batches() for event in batch.events]:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)  # the gateway reads the events as soon as Redis has them


@pytest.fixture
async def hints(cluster: Cluster) -> AsyncIterator[Hints]:
    client: redis.Redis = redis.Redis.from_url(cluster.redis_url)
    layout = next(
        member.layout for member in await read_members(client, "default", UNSIGNED) if member.role == "decode"
    )
    yield Hints(client, layout)
    await client.aclose()


def tokens(seed: str, count: int = 320) -> list[int]:
    return random.Random(seed).choices(range(1000, 30_000), k=count)


class Answer:
    """The answer to a prompt, and how many of the prompt's tokens were cached."""

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
    return Answer(answer.json())


async def cached_blocks(cluster: Cluster) -> dict[int, int]:
    """Return the number of cached blocks of each host, by host number."""
    hosts = (await cluster.fleet())["hosts"]
    return {int(host["host_id"].removeprefix("host-")): host["cached"] for host in hosts}


async def same_as_cold(cluster: Cluster, prompt: Sequence[int], answer: Answer) -> None:
    """Check that an answer equals that of another tenant, for whom nothing is cached."""
    cold = await ask(cluster, prompt, salt="another tenant")
    assert cold.cached == 0
    assert answer.token_ids == cold.token_ids


async def test_each_conversation_stays_with_its_cache(cluster: Cluster, hints: Hints) -> None:
    at_first = await cached_blocks(cluster)
    conversations = [tokens(f"conversation {number}") for number in range(4)]
    for turn in range(3):
        for number, conversation in enumerate(conversations):
            # A finished request is load until the next report, by which the router could choose another worker.
            await cluster.idle()
            answer = await ask(cluster, conversation)
            # All earlier prompts and answers are cached, except for the tokens that fill no block.
            before = len(conversation) - 40 - 1 if turn else 0
            assert answer.cached == before // 16 * 16, (turn, number)
            last = list(conversation)
            conversation += answer.token_ids
            await hints.tell_of(conversation)
            conversation += tokens(f"turn {turn} of {number}", 40)
        if turn == 0:
            await asyncio.sleep(1)  # the flush drops events that the gateway has not read yet
            await hints.client.flushall()
        if turn == 1:
            # A new gateway asks the hosts for their lists of blocks.
            cluster.processes["gateway"].stop()
            await hints.client.flushall()
            cluster.start_again("gateway")
            await cluster.wait_workers(4)
            await asyncio.sleep(2)
    at_last = await cached_blocks(cluster)
    assert all(at_last[host] > at_first[host] for host in (0, 1))  # both hosts got conversations
    await same_as_cold(cluster, last, answer)
    await cluster.settled()


async def test_a_wrong_hint_costs_a_miss(cluster: Cluster, hints: Hints) -> None:
    told = tokens("told")
    answer = await ask(cluster, told)
    await hints.tell_of(told + answer.token_ids)
    *_, batch = await hints.batches()
    prompt = tokens("not there")
    links = Context(prompt, salt_of()).links(hints.layout)
    lies = tuple(BlockEvent("stored", 0, digest) for digest in links)
    lie = BlockBatch(batch.host_id, batch.pool, batch.first + len(batch.events), lies)
    await hints.client.xadd(blocks_stream("default"), lie.to_entry())
    await asyncio.sleep(1)
    answer = await ask(cluster, prompt)
    assert answer.cached == 0
    await same_as_cold(cluster, prompt, answer)
    await cluster.settled()


async def test_a_prefix_comes_from_a_host_that_computes_no_more(cluster: Cluster, hints: Hints) -> None:
    before = await cached_blocks(cluster)
    conversation = tokens("moves")
    answer = await ask(cluster, conversation)
    await hints.tell_of(conversation + answer.token_ids)
    (holder,) = (host for host, blocks in (await cached_blocks(cluster)).items() if blocks > before[host])
    for role in ("decode", "prefill"):
        assert cluster.processes[f"{role}-{holder}"].stop() == 0
    await cluster.wait_workers(2)
    known = len(conversation) + len(answer.token_ids) - 1
    conversation += answer.token_ids + tokens("moved", 40)
    answer = await ask(cluster, conversation)
    assert answer.cached == known // 16 * 16
    await same_as_cold(cluster, conversation, answer)
    await cluster.settled()
