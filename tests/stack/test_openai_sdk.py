"""A real stack through the `openai` SDK, sync and async."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.stack.collector import Collector
from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM as MODEL
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack, on("default")]

QUESTION = [{"role": "user", "content": "Name the capital of France in one short sentence."}]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
async def async_client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_answers_and_a_repeated_prompt_is_cached(client: OpenAI) -> None:
    system = {"role": "system", "content": "You are a helpful assistant who knows geography well. " * 4}
    messages = [system, *QUESTION]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in str(first.choices[0].message.content)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) >= 16
    assert again.usage.total_tokens == again.usage.prompt_tokens + again.usage.completion_tokens


def test_a_stream_gives_the_same_text_and_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_is_kept_and_goes_on(client: OpenAI) -> None:
    said: Any = [{"type": "message", "role": "user", "content": text} for text in ("My name is Ada.", "And mine?")]
    options: Any = {"model": MODEL, "max_output_tokens": 16, "temperature": 0}
    kept = client.conversations.create(items=said[:1])
    asked = client.responses.create(input=said[1:], conversation=kept.id, **options)
    whole = client.responses.create(input=said, **options)
    assert asked.output_text == whole.output_text
    assert asked.usage is not None
    assert whole.usage is not None
    assert asked.usage.input_tokens == whole.usage.input_tokens
    roles = [item.role for item in client.conversations.items.list(kept.id, order="asc")]  # type: ignore[union-attr]
    assert roles == ["user", "user", "assistant"]
    client.conversations.delete(kept.id)


def test_a_batch_of_messages_has_results(stack: Stack) -> None:
    """A batch by Anthropic's client, whose `top_p` of 0 leaves the best token alone."""
    params: Any = {"model": MODEL, "max_tokens": 12, "messages": QUESTION, "top_p": 0, "temperature": 1}
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=120) as client:
        batch = client.messages.batches.create(requests=[{"custom_id": name, "params": params} for name in "ab"])
        while client.messages.batches.retrieve(batch.id).processing_status != "ended":
            time.sleep(0.2)
        told = [each.result.message.content[0].text for each in client.messages.batches.results(batch.id)]  # type: ignore[union-attr]
        client.messages.batches.delete(batch.id)
    assert told[0] == told[1]
    assert "Paris" in told[0]


def test_seeds_fix_a_sample_and_choices_differ(client: OpenAI) -> None:
    def sample(seed: int, n: int) -> list[str]:
        done = client.completions.create(
            model=MODEL, prompt="My favourite animal is", max_tokens=12, temperature=1.2, seed=seed, n=n
        )
        return [choice.text for choice in done.choices]

    first = sample(7, 3)
    assert first == sample(7, 3)
    assert len(set(first)) > 1
    assert sample(8, 1) != first[:1]


def test_logprobs_and_echo(client: OpenAI) -> None:
    done = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=2, temperature=0, logprobs=3, echo=True
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert done.choices[0].text == "".join(logprobs.tokens)
    assert done.choices[0].text.startswith("The capital of France is Paris")
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])


def test_stop_strings_end_the_text_before_them(client: OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=40, temperature=0, stop=[" 9"])
    assert done.choices[0].finish_reason == "stop"
    assert "8" in done.choices[0].text
    assert "9" not in done.choices[0].text


def test_min_tokens_and_logit_bias_reach_the_sampler(client: OpenAI) -> None:
    token = 1234
    done = client.completions.create(
        model=MODEL,
        prompt="Hello",
        max_tokens=3,
        temperature=0,
        logit_bias={str(token): 100},
        extra_body={"return_token_ids": True},
    )
    assert done.choices[0].model_extra is not None
    assert done.choices[0].model_extra["token_ids"] == [token] * 3


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function", "function": {}}]}, openai.BadRequestError, "tools[0].function.name"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
def test_errors_are_those_of_the_api(
    client: OpenAI, change: dict[str, object], kind: type[openai.APIStatusError], param: str
) -> None:
    request: dict[str, object] = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **change}
    with pytest.raises(kind) as error:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert error.value.param == param
    assert param in error.value.message or "model" in error.value.message


async def test_async_streams_side_by_side(async_client: AsyncOpenAI) -> None:
    async def stream(number: int) -> str:
        chunks = await async_client.completions.create(
            model=MODEL, prompt=f"The number {number} is", max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

    together = await asyncio.gather(*(stream(number) for number in range(16)))
    assert together[3] == await stream(3)
    assert all(together)


async def test_a_client_that_leaves_frees_everything(async_client: AsyncOpenAI, stack: Stack) -> None:
    chunks = await async_client.completions.create(
        model=MODEL, prompt="Count: 1 2 3", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    received = 0
    async for _ in chunks:
        received += 1
        if received == 3:
            break
    await chunks.close()
    await stack.settled()


def test_every_service_logs_the_request_id_and_joins_the_trace(
    client: OpenAI, stack: Stack, collector: Collector
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    client.completions.create(
        model=MODEL,
        prompt="Hi",
        max_tokens=3,
        extra_headers={"X-Request-Id": "find-me", "traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        extra_body={"ignore_eos": True},
    )

    def lines() -> list[dict[str, str]]:
        logged = (json.loads(line) for line in stack.process.text.split("\n")[:-1] if line.startswith("{"))
        return [line for line in logged if "find-me" in str(line["request_id"])]

    workers = [each for each in stack.fleet()["workers"] if each["role"] in ("prefill", "decode")]
    services = {"gateway", *(each["worker_id"] for each in workers)}
    deadline = time.monotonic() + 10  # services log a request after it has ended, maybe after the client has its answer
    while {line["service"] for line in lines()} != services and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {line["service"] for line in lines()} == services
    assert {line["trace_id"] for line in lines()} == {trace}
    reporting = {f"paceline-{service}" for service in (*services, "kvtransfer")}
    deadline = time.monotonic() + 20  # spans are exported every five seconds
    while collector.services_by_trace.get(trace, set()) != reporting and time.monotonic() < deadline:
        time.sleep(0.1)
    assert collector.services_by_trace[trace] == reporting
