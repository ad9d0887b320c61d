"""Errors for invalid requests: OpenAI's error body, which names the invalid field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from paceline.services.gateway.http.errors import MESSAGE_CHARACTERS, ApiError
from tests.services.gateway.conftest import Stack, StartStack, eventually
from tests.services.gateway.toy_model import END, VOCAB_SIZE

MESSAGES = [{"role": "user", "content": "hi"}]

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 7}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"request_id": "no good"}, "request_id"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": True}, "min_tokens"),
    ({"temperature": [1]}, "temperature"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"repetition_penalty": 1e30}, "repetition_penalty"),
    ({"top_k": 10**30}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": "7"}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ({"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}, "stop_token_ids"),
    ({"regex": "a+"}, "regex"),
    ({"prompt_embeds": ["x"]}, "prompt_embeds"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"], "allowed_token_ids": [97]}, "bad_words"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprob_token_ids": []}, "logprob_token_ids"),
    ({"repetition_detection": {"max_pattern_size": 5}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern_size": 5, "min_count": 1}}, "repetition_detection"),
    ({"repetition_detection": {"min_pattern_size": 5}}, "repetition_detection"),
    ({"session_id": "x" * 257}, "session_id"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "x"}, "suffix"),  # the model has no tokens for it
    ({"suffix": "x", "prompt": [1]}, "suffix"),
    ({"suffix": "x", "echo": True}, "suffix"),
    ({"logprobs": 1, "logprob_token_ids": [300]}, "logprob_token_ids"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1, 2], [1, "a"]]}, "prompt[1][1]"),
    ({"prompt": ["a", "x" * 600]}, "prompt[1]"),
    ({"prompt": ["a", "b", ""]}, "prompt[2]"),
    ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),  # the model has no reasoning
]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL]}, "tools"),  # the model's chat template shows no form of tool calls
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),  # nor any reasoning
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [7]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages[0].content[0].text"),
    ({"messages": [*MESSAGES, {"role": "user", "content": [7]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"max_completion_tokens": 600}, "max_completion_tokens"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template": "x"}, "chat_template"),
]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_bad_completions(stack: Stack) -> None:
    for fields, param in COMMON + COMPLETION:
        error = error_of(await stack.post("/v1/completions", **{"prompt": "x", **fields}))
        assert (fields, error["param"], error["type"]) == (fields, param, "invalid_request_error")


async def test_bad_chats(stack: Stack) -> None:
    for fields, param in COMMON + CHAT:
        error = error_of(await stack.post("/v1/chat/completions", **{"messages": MESSAGES, **fields}))
        assert (fields, error["param"], error["type"]) == (fields, param, "invalid_request_error")
    assert stack.workers["decode-0"].calls == []


async def test_bad_tools(stack: Stack) -> None:
    for path, fields, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": [{"role": 7}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
    ):
        assert (path, fields, error_of(await stack.post(path, **fields))["param"]) == (path, fields, param)


async def test_too_long_has_a_code_of_its_own(stack: Stack) -> None:
    error = error_of(await stack.post("/v1/completions", prompt="x" * 600))
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]


async def test_messages_name_what_is_wrong(stack: Stack) -> None:
    async def message(**fields: Any) -> str:
        return str(error_of(await stack.post("/v1/completions", **{"prompt": "x", **fields}))["message"])

    assert "301, 302" in (text := await message(stop_token_ids=[301, 1, 302]))
    assert str(VOCAB_SIZE) in text
    assert "'a', 'b'" in await message(logit_bias={"a": 1, "7": 1, "b": 1})
    assert "greater than or equal to 0" in await message(prompt=[[-1]])
    assert len(await message(prompt=[400] * 100)) < 300
    assert "stop: Input should be a valid string or a valid list" in await message(stop=7)
    assert "response_format: Input should be a JSON object" in await message(response_format="json")
    assert len(await message(logit_bias={"x" * 10_000: 101})) < 300


async def test_the_code_names_the_rule_that_was_broken(stack: Stack) -> None:
    error = error_of(await stack.post("/v1/completions", prompt="x", seed=2**63))
    assert error["code"] == "less_than_equal"


async def test_what_asks_for_nothing_is_accepted(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    nothing = {"tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"}, "suffix": ""}
    unsaid = dict.fromkeys(("min_tokens", "ignore_eos", "skip_special_tokens", "priority", "stop", "guided_json"))
    ignored = {"user": "me", "priority": 3, "metadata": {"a": "b"}, "store": False, "made_up": 1, "b\n": 2}
    body = {"prompt": "x", "max_tokens": 1, "best_of": 1, **nothing, **unsaid, **ignored}
    assert (await stack.post("/v1/completions", **body)).status_code == 200
    assert [record.message for record in caplog.records if "unknown field" in record.message] == [
        "a request holds unknown fields, which are ignored: 'made_up', 'b\\n'"
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 40_000,
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "logit_bias": {"1": Infinity}}',
        b'{"prompt": "\\ud800"}',
    ],
)
async def test_bodies_that_are_no_request(stack: Stack, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(await stack.http.post("/v1/completions", content=body, headers=headers))


async def test_a_body_that_is_nested_too_deeply(stack: Stack) -> None:
    schema = b'{"items":' * 5000 + b"{}" + b"}" * 5000
    body = b'{"prompt": "x", "structured_outputs": {"json": ' + schema + b"}}"
    error = error_of(
        await stack.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    )
    assert "nested too deeply" in error["message"]


async def test_a_body_whose_client_leaves_is_no_fault_of_the_gateway(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    caplog.set_level("INFO")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b'content-length: 90\r\n\r\n{"prompt": ')
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await eventually(lambda: "answered 499" in caplog.text)
    assert "unexpected error" not in caplog.text


async def test_a_body_of_another_type(stack: Stack) -> None:
    body = json.dumps({"prompt": "x"})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    error = error_of(await stack.http.post("/v1/completions", content=body, headers=headers))
    assert "Content-Type: application/json" in error["message"]


async def test_half_a_surrogate_in_a_template_argument(stack: Stack) -> None:
    body = b'{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}], "max_tokens": 1}'
    headers = {"content-type": "application/json"}
    assert (await stack.http.post("/v1/chat/completions", content=body, headers=headers)).status_code == 200
    bad = error_of(await stack.http.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers))
    assert bad["param"] == "prompt"


async def test_paths_and_methods(stack: Stack) -> None:
    assert "no such path: GET /v1/nothing" in error_of(await stack.http.get("/v1/nothing"), 404)["message"]
    refused = await stack.http.get("/v1/completions")
    assert "/v1/completions does not take GET" in error_of(refused, 405)["message"]
    assert refused.headers["allow"] == "POST"


async def test_a_model_that_is_not_served(stack: Stack) -> None:
    for response in (
        await stack.post("/v1/completions", model="gpt", prompt="x"),
        await stack.http.get("/v1/models/gpt"),
    ):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await stack.openai.completions.create(model="gpt", prompt="x")


async def test_no_worker(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=1, decode=0, queue_seconds=0.2)
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        response = await stack.post(path, **body, stream=True)
        assert error_of(response, 503)["code"] == "service_unavailable"
        assert int(response.headers["retry-after"]) >= 1


async def test_a_base_model_cannot_chat(start_stack: StartStack, tmp_path: Any) -> None:
    from tests.services.gateway.toy_model import write_toy_model

    stack = await start_stack(model=str(write_toy_model(tmp_path / "base", chat_template=None)))
    assert "base model" in error_of(await stack.post("/v1/chat/completions", messages=MESSAGES))["message"]


def test_a_message_has_bounded_length() -> None:
    error = ApiError(404, "begin" + "a" * 1_000_000 + "end")
    told = error.body["error"]["message"]
    assert (told[:5], told[-3:], str(error)) == ("begin", "end", told)
    assert len(told) < MESSAGE_CHARACTERS + 10
