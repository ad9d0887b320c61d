"""POST /v1/completions through the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from paceline.services.gateway.api import respond
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_kvtransfer import salt_of
from tests.services.gateway.toy_model import END
from tests.services.gateway.toy_workers import TEXT


async def test_a_whole_answer(stack: Stack) -> None:
    answer = await stack.openai.completions.create(model="toy", prompt="hello", max_tokens=20, seed=0)
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "toy", "cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT[:20], "length")
    usage = answer.usage
    assert usage
    assert usage.prompt_tokens_details
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 20, 25)
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_a_streamed_answer(stack: Stack) -> None:
    stream = await stack.openai.completions.create(model="toy", prompt="hello", max_tokens=20, seed=0, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT[:20]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    assert chunks[-1].choices[0].text, "the last token and the end come together"
    assert {chunk.usage for chunk in chunks} == {None}


async def test_the_synchronous_client(stack: Stack) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="toy", prompt="hello", max_tokens=9, seed=0, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == TEXT[:9]


async def test_usage_at_the_end_of_a_stream_and_all_along(stack: Stack) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await stack.post(
        "/v1/completions", prompt="hi", max_tokens=3, seed=0, stream=True, stream_options=options
    )
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [3, 4, 5, 5]


async def test_continuous_usage_needs_usage(stack: Stack) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    response = await stack.post(
        "/v1/completions", prompt="hi", max_tokens=3, seed=0, stream=True, stream_options=options
    )
    assert "usage" not in response.text


async def test_choices_have_seeds_of_their_own_and_a_prompt_is_computed_once(stack: Stack) -> None:
    stack.workers["prefill-0"].pause_after = 1
    request = stack.openai.completions.create(model="toy", prompt=["ab", "cd"], n=2, max_tokens=4, seed=0)
    task = asyncio.create_task(request)
    prefill = stack.workers["prefill-0"]
    await eventually(lambda: len(prefill.calls) == 4)
    order = [call.work.key.request_id[-2:] for call in prefill.calls]
    assert order.index("-0") < order.index("-1")
    assert order.index("-2") < order.index("-3")
    assert {call.work.kept_tokens for call in prefill.calls} == {1}  # where the second choice goes on
    prefill.resume.set()
    answer = await task
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [TEXT[i : i + 4] for i in (0, 1, 0, 1)], "as if alone"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 16)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_several_tokens(stack: Stack, stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 60, "seed": 0, "stop": ["never", "brown"], "stream": stream}
    response = await stack.post("/v1/completions", **body, stream_options={"include_usage": True} if stream else None)
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event and "[DONE]" not in event]
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "The quick "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "brown")
    assert chunks[-1]["usage"]["completion_tokens"] == len("The quick brown")
    call = stack.workers["decode-0"].calls[0]
    await asyncio.wait_for(call.ended.wait(), 10)
    assert call.outcome in ("cancelled", "finished")


async def test_the_end_of_sequence(stack: Stack) -> None:
    for worker in stack.workers.values():
        worker.stop_at = 3
    body = {"prompt": "x", "max_tokens": 60, "seed": 0}
    choice = (await stack.post("/v1/completions", **body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The", "stop", None)
    ignoring = (await stack.post("/v1/completions", **body, ignore_eos=True, stop_token_ids=[ord("q")])).json()
    choice = ignoring["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The", "stop", ord("q"))
    shown = await stack.post("/v1/completions", **body, include_stop_str_in_output=True)
    assert shown.json()["choices"][0]["text"] == "The<|end|>"


async def test_a_first_token_that_is_also_the_last(stack: Stack) -> None:
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=1, seed=0)).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("T", "length")
    call = stack.workers["decode-0"].calls[0]
    await asyncio.wait_for(call.ended.wait(), 10)
    assert call.commands == []


async def test_without_a_prefill_worker_decode_computes_the_prompt(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0)
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=5, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:5]
    assert stack.workers["decode-0"].calls[0].commands == ["prefill_here"]


async def test_logprobs_and_echo(stack: Stack) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "seed": 0, "logprobs": 2, "echo": True}
    choice = (await stack.post("/v1/completions", **body)).json()["choices"][0]
    assert choice["text"] == "abcTh"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "T", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][3] == {"A": -0.5, "T": -1.0}
    streamed = [
        json.loads(e[6:]) for e in (await stack.post("/v1/completions", **body, stream=True)).text.split("\n\n")[:-2]
    ]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "abcTh"
    offsets = [o for chunk in streamed for o in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4]


async def test_echo_alone_generates_nothing(stack: Stack) -> None:
    answer = (await stack.post("/v1/completions", prompt="abc", max_tokens=0, echo=True, logprobs=1)).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("abc", 0)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_prompt_logprobs(start_stack: StartStack, prefill: int) -> None:
    stack = await start_stack(prefill=prefill)
    choice = (await stack.post("/v1/completions", prompt="abcdefgh", max_tokens=2, prompt_logprobs=1)).json()[
        "choices"
    ][0]
    reports = choice["prompt_logprobs"]
    assert reports[0] is None
    assert [report[str(token)]["decoded_token"] for report, token in zip(reports[1:], b"bcdefgh")] == list("bcdefgh")


async def test_token_ids_are_returned_where_asked_for(stack: Stack) -> None:
    body = {
        "prompt": [97, END, 98],
        "max_tokens": 3,
        "seed": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = (await stack.post("/v1/completions", **body, logprobs=0)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, END, 98], list(b"The"))
    assert choice["logprobs"]["tokens"] == ["token_id:84", "token_id:104", "token_id:101"]
    streamed = [
        json.loads(e[6:]) for e in (await stack.post("/v1/completions", **body, stream=True)).text.split("\n\n")[:-2]
    ]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == [97, END, 98]
    assert "prompt_token_ids" not in streamed[1]["choices"][0]
    assert [i for chunk in streamed for i in chunk["choices"][0]["token_ids"]] == list(b"The")


async def test_what_was_not_asked_for_is_null(stack: Stack) -> None:
    answer = await stack.openai.completions.create(model="toy", prompt="x", max_tokens=1)
    choice = answer.choices[0].model_dump()
    extras = ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids", "stop_reason")
    assert [choice[name] for name in extras] == [None] * 5


async def test_every_chunk_has_the_logprobs_and_ids_that_were_asked_for(start_stack: StartStack) -> None:
    stack = await start_stack()
    for worker in stack.workers.values():
        worker.stop_at = 3
    body = {"prompt": "x", "max_tokens": 9, "seed": 0, "logprobs": 1, "return_token_ids": True, "stream": True}
    response = await stack.post("/v1/completions", **body)
    choices = [json.loads(event[6:])["choices"][0] for event in response.text.split("\n\n")[:-2]]
    assert [choice["token_ids"] for choice in choices] == [[84], [104], [101], [END]]
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["T"], ["h"], ["e"], ["<|end|>"]]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_every_chunk_is_a_line_of_json(stack: Stack, prompt: dict[str, object], with_usage: bool) -> None:
    text = 'a\x85b\u2028c\u2029d\r\ne\x0bf"g\\h\0i'
    for worker in stack.workers.values():
        worker.script = text.encode()
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = {**prompt, "n": 2, "max_tokens": len(text.encode()), "seed": 0, "stream": True, **options}
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    *lines, end = [line for line in (await stack.post(path, **body)).text.splitlines() if line]
    assert end == "data: [DONE]"
    texts = {0: "", 1: ""}
    line_breaks = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
    for line in (line.removeprefix("data: ") for line in lines):
        chunk = json.loads(line)
        assert json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).translate(line_breaks) == line
        assert ("usage" in chunk) is with_usage
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"] if "prompt" in prompt else choice["delta"]["content"]
    assert texts == {0: text, 1: text[1:] + text[:1]}


async def test_characters_of_several_tokens_arrive_whole_and_each_token_shows(stack: Stack) -> None:
    start = TEXT.encode().index("ünï".encode())
    stream = await stack.openai.completions.create(model="toy", prompt="x", max_tokens=9, seed=start, stream=True)
    texts = [chunk.choices[0].text async for chunk in stream]
    assert texts == ["", "ü", "n", "", "ï", "c", "", "ö", "d"]


async def test_the_sampling_reaches_the_workers(stack: Stack) -> None:
    asked = {"temperature": 0.5, "top_k": 3, "cache_salt": "me", "priority": -2, "seed": 7}
    await stack.post("/v1/completions", prompt="x", max_tokens=5, **asked)
    for worker in stack.workers.values():
        work = worker.calls[0].work
        assert (work.sampling.temperature, work.sampling.top_k, work.sampling.seed) == (0.5, 3, 7)
        assert (work.cache_salt, work.priority, work.prompt_tokens, work.sampling.max_tokens) == (
            salt_of("me"),
            -2,
            1,
            5,
        )


async def test_the_headers_of_vllm(stack: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 2, "priority": 7}
    headers = {"X-Vllm-Priority": "-3", "X-Session-ID": "talk", "X-Request-Id": "asked"}
    await stack.http.post("/v1/completions", json=body, headers=headers)
    assert stack.workers["decode-0"].calls[0].work.priority == -3
    assert (await stack.http.get("/trace/asked")).json()["session_id"] == "talk"
    own = {"X-Request-Id": "own"}
    await stack.http.post("/v1/completions", json={**body, "session_id": "mine"}, headers={**headers, **own})
    assert (await stack.http.get("/trace/own")).json()["session_id"] == "mine"
    for name, value in (("X-Vllm-Priority", "high"), ("X-Vllm-Priority", "9" * 10), ("X-Session-ID", "x" * 257)):
        refused = await stack.http.post("/v1/completions", json=body, headers={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_usage_may_be_forced(start_stack: StartStack) -> None:
    stack = await start_stack(enable_force_include_usage=True)
    text = (await stack.post("/v1/completions", prompt="x", max_tokens=2, seed=0, stream=True)).text
    chunks = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


async def test_what_changes_the_tokens_reaches_the_workers(stack: Stack) -> None:
    body = {"prompt": "x", "max_tokens": 2, "logprobs": 0, "bad_words": ["ab"], "logprob_token_ids": [9, 7, 9]}
    assert (await stack.post("/v1/completions", **body)).status_code == 200
    sampling = stack.workers["decode-0"].calls[0].work.sampling
    assert [list(word.token_ids) for word in sampling.bad_words] == [[97, 98], [32, 97, 98]]
    assert list(sampling.logprob_token_ids) == [9, 7]


async def test_the_logprobs_of_prompts_have_a_limit(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "MOST_PROMPT_LOGPROBS", 4 * 3 * 2)
    asked: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 2, "n": 2}
    assert (await stack.post("/v1/completions", prompt="abcd", **asked)).status_code == 200
    for more in ({"prompt": "abcde"}, {"prompt": "abcd", "n": 3}, {"prompt": ["abcd", "a"]}):
        refused = await stack.post("/v1/completions", **{**asked, **more})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    echoed = await stack.post("/v1/completions", prompt="abcd" * 9, max_tokens=0, echo=True, logprobs=2)
    assert echoed.status_code == 400
