"""POST /v1/chat/completions through the official client."""

from __future__ import annotations

import json

import pytest

from tests.services.gateway.conftest import Stack
from tests.services.gateway.toy_workers import TEXT

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_a_whole_answer(stack: Stack) -> None:
    answer = await stack.openai.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=12, seed=0)  # type: ignore[arg-type]
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT[:12], "length")
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 12)
    assert list(stack.workers["prefill-0"].calls[0].work.token_ids) == [257, *b"hello", 258]


async def test_a_streamed_answer(stack: Stack) -> None:
    stream = await stack.openai.chat.completions.create(
        model="toy",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=12,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *middle, last, usage = [chunk async for chunk in stream]
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in (*middle, last)) == TEXT[:12]
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (TEXT[11], "length")
    assert usage.choices == []
    assert usage.usage
    assert usage.usage.completion_tokens == 12


async def test_several_streamed_choices(stack: Stack) -> None:
    stream = await stack.openai.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_tokens=6,
        seed=0,
        n=3,
        stream=True,  # type: ignore[arg-type]
    )
    texts, roles = {0: "", 1: "", 2: ""}, []
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] if choice.delta.role else []
    assert texts == {i: TEXT[i : i + 6] for i in range(3)}
    assert sorted(roles) == [0, 1, 2]


async def test_logprobs(stack: Stack) -> None:
    answer = await stack.openai.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        max_tokens=2,
        seed=0,
        logprobs=True,
        top_logprobs=1,  # type: ignore[arg-type]
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs
    assert logprobs.content
    assert [(entry.token, entry.bytes, entry.logprob) for entry in logprobs.content] == [
        ("T", [84], -1),
        ("h", [104], -1),
    ]
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["A"]


async def test_without_a_limit_the_answer_fills_the_context(stack: Stack) -> None:
    body = (await stack.post("/v1/chat/completions", messages=MESSAGES)).json()
    assert body["usage"]["total_tokens"] == stack.workers["decode-0"].max_model_len
    assert body["choices"][0]["finish_reason"] == "length"


async def test_prompt_logprobs_and_ids_stand_beside_the_choices(stack: Stack) -> None:
    options = {"prompt_logprobs": 0, "return_token_ids": True, "max_tokens": 2, "seed": 0}
    body = (await stack.post("/v1/chat/completions", messages=MESSAGES, **options)).json()
    assert body["prompt_token_ids"] == [257, *b"hello", 258]
    assert [report and list(report) for report in body["prompt_logprobs"]] == [
        None,
        *([str(b)] for b in b"hello"),
        ["258"],
    ]
    assert body["choices"][0]["token_ids"] == list(b"Th")
    plain = (await stack.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)).json()
    assert (plain["prompt_token_ids"], plain["prompt_logprobs"], plain["choices"][0]["token_ids"]) == (None, None, None)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}])
@pytest.mark.parametrize("echo", [False, True])
async def test_continuing_the_last_message(stack: Stack, options: dict[str, bool], echo: bool) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "I was"}]}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 3, "seed": 0, "echo": echo, **options}
    answer = (await stack.post("/v1/chat/completions", **body)).json()
    assert list(stack.workers["prefill-0"].calls[0].work.token_ids) == [257, *b"hello", 258, *b"I was"]
    expected = ("I was" if echo else "") + TEXT[:3]
    assert answer["choices"][0]["message"]["content"] == expected
    events = (await stack.post("/v1/chat/completions", **body, stream=True)).text.split("\n\n")[:-2]
    assert "".join(json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events) == expected


async def test_only_the_assistant_s_own_message_is_echoed(stack: Stack) -> None:
    answer = (await stack.post("/v1/chat/completions", messages=MESSAGES, max_tokens=3, seed=0, echo=True)).json()
    assert answer["choices"][0]["message"]["content"] == TEXT[:3]


async def test_continuous_usage_grows_with_every_chunk(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": MESSAGES, "max_tokens": 4, "seed": 0, "stream": True, "stream_options": options}
    events = (await stack.post("/v1/chat/completions", **body)).text.split("\n\n")[:-2]
    assert [json.loads(event[6:])["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 4, 4]
