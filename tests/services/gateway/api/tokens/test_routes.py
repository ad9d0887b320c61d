"""POST /inference/v1/generate and POST /abort_requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from paceline.core.types import ConstraintKind
from paceline.services.common.wire import sampling_from_pb
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_kvtransfer import salt_of
from tests.services.gateway.toy_model import END
from tests.services.gateway.toy_workers import TEXT

PATH = "/inference/v1/generate"
PROMPT = [257, *b"hello", 258]


async def events(stack: Stack, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, without [DONE], which must be the last one."""
    async with stack.http.stream("POST", path, json=body) as response:
        *lines, done = [line.removeprefix("data: ") async for line in response.aiter_lines() if line[:5] == "data:"]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_tokens_in_tokens_out(stack: Stack) -> None:
    body = {"request_id": "mine", "sampling_params": {"max_tokens": 4, "seed": 0}, "cache_salt": "s", "priority": -3}
    answer = (await stack.post(PATH, token_ids=PROMPT, return_token_ids=True, kv_transfer_params={}, **body)).json()
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "token_ids": list(TEXT[:4].encode()),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert (answer["request_id"], answer["output_mode"], answer["prompt_token_ids"]) == ("mine", "tokens", PROMPT)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 4)
    work = stack.workers["prefill-0"].calls[0].work
    assert (list(work.token_ids), work.cache_salt, work.priority) == (PROMPT, salt_of("s"), -3)


async def test_the_model_s_own_end_and_the_longest_answer_are_defaults(stack: Stack) -> None:
    stack.workers["decode-0"].stop_at = stack.workers["prefill-0"].stop_at = 2
    answer = (await stack.post(PATH, token_ids=PROMPT, sampling_params={"seed": 0})).json()
    assert answer["choices"][0]["token_ids"] == [*TEXT[:2].encode(), END]
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", None)
    assert stack.workers["decode-0"].calls[0].work.sampling.max_tokens == 512 - len(PROMPT)


async def test_text_ends_before_a_stop_string_and_tokens_do_not(stack: Stack) -> None:
    params = {"max_tokens": 20, "seed": 0, "stop": ["k b"]}
    answer = (await stack.post(PATH, token_ids=PROMPT, sampling_params=params, output_mode="text")).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quic", "stop", "k b")
    assert bytes(choice["token_ids"]) == b"The quick b"


async def test_logprobs_are_ids_or_texts(stack: Stack) -> None:
    params = {"max_tokens": 1, "seed": 0, "logprobs": 1, "prompt_logprobs": 0}
    tokens, text = [
        (await stack.post(PATH, token_ids=[1, 2], sampling_params=params, output_mode=mode)).json()
        for mode in ("tokens", "text")
    ]
    chosen, likely = {"token_id": 84, "logprob": -1, "rank": 2}, {"token_id": 65, "logprob": -0.5, "rank": 1}
    assert tokens["choices"][0]["logprobs"]["content"] == [{**chosen, "top_logprobs": [chosen, likely]}]
    assert text["choices"][0]["logprobs"]["content"][0]["token"] == "T"
    assert [entry and list(entry) for entry in tokens["prompt_logprobs"]] == [None, ["2"]]


async def test_a_stream(stack: Stack) -> None:
    params = {"max_tokens": 5, "seed": 0, "n": 2, "logprobs": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, usage = await events(stack, PATH, token_ids=PROMPT, sampling_params=params, output_mode="text", **options)
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join(choice["text"] for choice in choices)
        assert text.encode() == bytes(token for choice in choices for token in choice["token_ids"])
        assert len(text) == sum(len(choice["logprobs"]["content"]) for choice in choices) == 5
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[-1]["token_ids"]
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 2
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 10)


async def test_structured_outputs_are_enforced(stack: Stack) -> None:
    params = {"max_tokens": 2, "structured_outputs": {"regex": "a+"}}
    assert (await stack.post(PATH, token_ids=PROMPT, sampling_params=params)).status_code == 200
    constraint = sampling_from_pb(stack.workers["prefill-0"].calls[0].work.sampling).constraint
    assert constraint is not None
    assert (constraint.kind, constraint.text) == (ConstraintKind.REGEX, "a+")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [300]}, "token_ids"),
    ({"token_ids": [1] * 512}, "token_ids"),
    ({"sampling_params": None}, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"sampling_params": {"min_tokens": 9, "max_tokens": 5}}, "sampling_params.min_tokens"),
    ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
    ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"features": {}}, "features"),
    ({"output_mode": "parsed"}, "output_mode"),
    ({"request_id": "a b"}, "request_id"),
]


async def test_refusals(stack: Stack) -> None:
    for fields, param in REFUSED:
        answer = await stack.post(PATH, **{"token_ids": PROMPT, "sampling_params": {}, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_an_aborted_request_ends_with_the_tokens_that_have_come(stack: Stack) -> None:
    stack.pause_decode(after=3)
    params = {"max_tokens": 50, "seed": 0, "n": 3}
    asked = [
        asyncio.create_task(stack.post(path, **body))
        for path, body in (
            (PATH, {"request_id": "r", "token_ids": PROMPT, "sampling_params": params}),
            ("/v1/completions", {"request_id": "r", "prompt": "x", "max_tokens": 50, "seed": 0}),
            ("/v1/completions", {"request_id": "other", "prompt": "x", "max_tokens": 50, "seed": 0}),
        )
    ]
    decode = stack.workers["decode-0"]
    await eventually(lambda: len(decode.calls) == 5)
    await eventually(lambda: all(call.commands for call in decode.calls))
    assert (await stack.post("/abort_requests", request_ids=["r", "unknown"])).status_code == 200
    ids, text = [(await answer).json() for answer in asked[:2]]
    assert [choice["finish_reason"] for choice in ids["choices"]] == ["abort"] * 3
    assert text["choices"][0]["finish_reason"] == "abort"
    assert TEXT.startswith(text["choices"][0]["text"])
    await eventually(stack.has_load(1))  # the workers' calls have ended, too
    assert (await stack.http.get("/trace/r")).json()["state"] == "aborted"
    decode.resume.set()
    assert (await asked[2]).json()["choices"][0]["finish_reason"] == "length"


async def test_a_request_that_waits_for_a_worker_can_be_aborted(stack: Stack) -> None:
    for worker in stack.workers.values():
        worker.max_seqs = 0
    asked = asyncio.create_task(
        events(stack, PATH, request_id="r", token_ids=PROMPT, sampling_params={"max_tokens": 5}, stream=True)
    )
    await eventually(stack.has_load(1))
    assert (await stack.post("/abort_requests", request_ids=["r"])).status_code == 200
    (chunk,) = await asked
    assert (chunk["choices"][0]["token_ids"], chunk["choices"][0]["finish_reason"]) == ([], "abort")
    assert (await stack.post("/abort_requests")).status_code == 400


INVOKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
    ("/generative_scoring", {"query": "q", "items": ["a"], "label_token_ids": [1]}),
    ("/rerank", {"query": "q", "documents": ["a"]}),
    ("/score", {"text_1": "q", "text_2": "a"}),
]


async def test_invocations_are_answered_as_their_routes_do(start_stack: StartStack) -> None:
    stack = await start_stack(score_tokens="y, n", store="none")

    def lasting(answer: httpx.Response) -> dict[str, Any]:
        return {name: value for name, value in answer.json().items() if name not in ("id", "request_id", "output")}

    for path, body in INVOKED:
        asked = {**body, "model": "toy", "seed": 1} if "sampling_params" not in body else {**body, "model": "toy"}
        direct, invoked = [await stack.post(each, **asked) for each in (path, "/invocations")]
        assert (direct.status_code, invoked.status_code) == (200, 200), invoked.text
        assert lasting(direct).keys() == lasting(invoked).keys()
    streamed = await stack.post("/invocations", prompt="x", max_tokens=3, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    for content, param in ((b"{}", "messages"), (b"[]", "messages"), (b"x", "messages"), (b'{"prompt": 3}', "prompt")):
        refused = await stack.http.post("/invocations", content=content, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_tokenizer_s_settings_are_told(stack: Stack) -> None:
    told = (await stack.http.get("/tokenizer_info")).json()
    assert (told["tokenizer_class"], told["eos_token"]) == ("PreTrainedTokenizerFast", "<|end|>")
    assert "messages" in told["chat_template"]
