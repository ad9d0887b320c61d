"""What a client gets from the compose stack while its containers start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest
from openai import AsyncOpenAI

from .conftest import Stack

pytestmark = pytest.mark.compose

MODEL = "smollm2-135m-instruct"
PROMPT = "Once upon a time, in a village by the sea,"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=240.0) as client:
        yield client


class Stream:
    """A greedy streamed completion of an exact number of tokens."""

    def __init__(self, client: AsyncOpenAI, prompt: str = PROMPT, tokens: int = 120) -> None:
        self.text = ""
        self.completion_tokens = 0
        self.begun = asyncio.Event()
        self._client = client
        self._prompt = prompt
        self._tokens = tokens

    async def read(self) -> Stream:
        chunks = await self._client.completions.create(
            model=MODEL,
            prompt=self._prompt,
            max_tokens=self._tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            self.text += "".join(choice.text for choice in chunk.choices)
            if chunk.usage:
                self.completion_tokens = chunk.usage.completion_tokens
            self.begun.set()
        return self


async def begin(*streams: Stream) -> list[asyncio.Task[Stream]]:
    """Start streams and wait until each has its first token."""
    tasks = [asyncio.create_task(stream.read()) for stream in streams]
    begun = asyncio.gather(*(stream.begun.wait() for stream in streams))
    done, _ = await asyncio.wait([*tasks, begun], timeout=120, return_when=asyncio.FIRST_COMPLETED)
    if begun not in done:
        begun.cancel()
        for task in tasks:
            task.cancel()
        pytest.fail(f"no first token from every stream; ended: {done}")
    return tasks


async def ended(*streams: Awaitable[Stream]) -> list[Stream]:
    async with asyncio.timeout(240):
        return await asyncio.gather(*streams)


def decode_container(stack: Stack) -> str:
    """Return the container of the decode worker with the most streams."""
    busiest = max(stack.workers("decode"), key=lambda worker: worker["in_flight"])
    assert busiest["in_flight"] > 0
    return next(c for c in stack.containers("decode") if c[:12] in busiest["worker_id"])


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0.0
    )
    assert "Paris" in answer.choices[0].text


async def test_chat_stream(client: AsyncOpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=question,  # type: ignore[arg-type]
        max_completion_tokens=30,
        temperature=0.0,
        stream=True,
    )
    assert "Paris" in "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])


async def test_fleet_is_two_by_two_and_its_ledger_balances(stack: Stack) -> None:
    fleet = stack.fleet()
    assert sorted(worker["role"] for worker in fleet["workers"] if worker["role"] != "kvtransfer") == [
        "decode",
        "decode",
        "prefill",
        "prefill",
    ]
    (host,) = fleet["hosts"]
    assert host["balanced"]
    assert host["free"] + host["held"] + host["in_flight"] + host["cached"] == host["total"] > 0
    assert {worker["host_id"] for worker in fleet["workers"]} == {host["host_id"]}


async def test_sixteen_at_once_all_end_and_all_workers_have_a_share(stack: Stack, client: AsyncOpenAI) -> None:
    def sampled() -> dict[str, float]:
        workers = [*stack.workers("prefill"), *stack.workers("decode")]
        return {worker["worker_id"]: worker["stats"]["sampled_tokens"] for worker in workers}

    before = sampled()
    streams = await ended(*(Stream(client, f"Story number {i}. {PROMPT}", tokens=16).read() for i in range(16)))
    assert [stream.completion_tokens for stream in streams] == [16] * 16
    await asyncio.to_thread(
        stack.wait, "work on all four workers", lambda: all(now > before[name] for name, now in sampled().items())
    )
    await asyncio.to_thread(stack.wait, "all blocks given back", lambda: stack.fleet()["hosts"][0]["held"] == 0)


async def test_the_stream_outlives_its_decode_worker(stack: Stack, client: AsyncOpenAI) -> None:
    (undisturbed,) = await ended(Stream(client).read())
    tasks = await begin(Stream(client))
    stack.docker("kill", decode_container(stack))
    assert not tasks[0].done(), "the stream was over before its worker died; make it longer"
    (survivor,) = await ended(*tasks)
    assert survivor.completion_tokens == 120
    assert survivor.text == undisturbed.text
    await asyncio.to_thread(stack.wait, "the dead worker's blocks", lambda: stack.fleet()["hosts"][0]["held"] == 0)


async def test_streams_go_on_while_the_decode_fleet_shrinks_and_grows(stack: Stack, client: AsyncOpenAI) -> None:
    tasks = await begin(*(Stream(client, f"Tale {i}. {PROMPT}", tokens=120) for i in range(4)))
    await asyncio.to_thread(stack.scale, "decode", 1)
    await asyncio.to_thread(stack.wait_for_workers, "decode", 1)
    await asyncio.to_thread(stack.scale, "decode", 2)
    streams = await ended(*tasks)
    assert [stream.completion_tokens for stream in streams] == [120] * 4
    await asyncio.to_thread(stack.wait_for_workers, "decode", 2)


async def test_streams_go_on_while_redis_is_away(stack: Stack, client: AsyncOpenAI) -> None:
    tasks = await begin(Stream(client, tokens=60))
    await asyncio.to_thread(stack.compose, "restart", "-t", "2", "redis")
    tasks += [asyncio.create_task(Stream(client, f"New. {PROMPT}", tokens=20).read())]
    streams = await ended(*tasks)
    assert [stream.completion_tokens for stream in streams] == [60, 20]


async def test_the_fleet_heals_when_the_owner_of_its_memory_restarts(stack: Stack, client: AsyncOpenAI) -> None:
    before = {worker["worker_id"] for worker in stack.fleet()["workers"]}
    await asyncio.to_thread(stack.compose, "restart", "-t", "5", "kvtransfer")

    def healed() -> bool:
        fleet = stack.fleet()
        names = {worker["worker_id"] for worker in fleet["workers"] if worker["state"] == "ready"}
        return len(names) == 5 and not names & before

    await asyncio.to_thread(stack.wait, "five new members", healed)
    (stream,) = await ended(Stream(client, tokens=20).read())
    assert stream.completion_tokens == 20
