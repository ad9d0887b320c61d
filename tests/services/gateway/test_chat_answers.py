"""Tools and reasoning in POST /v1/chat/completions, with workers that recite an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from paceline.core.grammar import grammar_of
from paceline.core.types import ConstraintKind
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_model import END, write_toy_model

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or () %}"
    "{{ '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + ' ' + call.id }}"
    "{% endfor %}{{ message.tool_call_id or '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hello"}]
FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [FIND, STOP]
NAMED = {"type": "function", "function": {"name": "find"}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "Öl <b>"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "integer"}}}
THOUGHT = "<think>\nso\n</think>\n\n"

Json = dict[str, Any]


class Chat:
    """A stack whose model thinks and calls tools."""

    def __init__(self, stack: Stack, model: Path) -> None:
        self._stack = stack
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._matching = LLTokenizer(str(model / "tokenizer.json"), eos_token=[END])

    async def whole(self, script: str, **fields: Any) -> Json:
        """Return the body of the response to a request, after the workers have recited a script."""
        response = await self._post(script, fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def error(self, **fields: Any) -> tuple[int, str]:
        """Return the status of the response to a request, and the field that its error names."""
        response = await self._post("", fields)
        return response.status_code, response.json()["error"]["param"]

    async def stream(self, script: str, **fields: Any) -> list[Json]:
        """Return the choices of the events of a streamed answer with one choice."""
        text = (await self._post(script, {"stream": True, **fields})).text
        *events, done = text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]

    @property
    def prompt(self) -> str:
        """The prompt of the last request."""
        work = self._stack.workers["prefill-0"].calls[-1].work
        return str(self._tokenizer.decode(work.token_ids, skip_special_tokens=False))

    def allows(self, text: str) -> bool:
        """Return whether a text is a whole answer under the constraint of the last request."""
        constraint = self._stack.workers["prefill-0"].calls[-1].work.sampling.constraint.text
        matcher = LLMatcher(self._matching, grammar_of(ConstraintKind.ANSWER, constraint), log_level=0)
        for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        return matcher.is_accepting()

    async def _post(self, script: str, fields: Json) -> Any:
        for worker in self._stack.workers.values():
            worker.script = script.encode() or b"x"
            worker.stop_at = len(script.encode())
        return await self._stack.post("/v1/chat/completions", **{"messages": MESSAGES, "seed": 0, **fields})


@pytest.fixture
async def chat(start_stack: StartStack, tmp_path: Path) -> Chat:
    model = write_toy_model(tmp_path / "toy", chat_template=TEMPLATE)
    return Chat(await start_stack(model=str(model)), model)


def joined(choices: list[Json]) -> Json:
    """Return the message that the deltas of a stream add up to, without ids of calls."""
    message: Json = {"content": "", "reasoning": "", "calls": []}
    for delta in (choice["delta"] for choice in choices):
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                message["calls"].append(["", ""])
            call = message["calls"][piece["index"]]
            call[0] += piece["function"].get("name", "")
            call[1] += piece["function"]["arguments"]
    return message


async def test_calls_are_no_content(chat: Chat) -> None:
    body = await chat.whole(f"{CALL}\n{SECOND}", tools=TOOLS)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "find", "arguments": '{"text": "Öl <b>"}'}
    assert second["function"] == {"name": "stop", "arguments": "{}"}
    assert first["id"] != second["id"]


async def test_a_streamed_call_begins_with_its_id_and_name(chat: Chat) -> None:
    choices = await chat.stream(f"{CALL}\n{SECOND}", tools=TOOLS)
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    heads = [piece for piece in pieces if "id" in piece]
    assert [(head["index"], head["type"], head["function"]) for head in heads] == [
        (0, "function", {"name": "find", "arguments": ""}),
        (1, "function", {"name": "stop", "arguments": ""}),
    ]
    assert all(piece.keys() == {"index", "function"} for piece in pieces if piece not in heads)
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    assert joined(choices)["calls"] == [["find", '{"text": "Öl <b>"}'], ["stop", "{}"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize(
    ("script", "fields", "expected"),
    [
        (CALL, {}, "tool_calls"),
        (CALL, {"tool_choice": "required"}, "tool_calls"),
        (CALL, {"tool_choice": NAMED}, "stop"),
        (CALL, {"max_tokens": 50}, "length"),
        (CALL, {"max_tokens": 50, "tool_choice": NAMED}, "length"),
        (CALL, {"stop": "<b"}, "stop"),
        (CALL, {"stop": "</tool_call>"}, "tool_calls"),
        (f"{CALL}{SECOND}", {"stop": '"arguments": {}'}, "stop"),
        ("so", {}, "stop"),
    ],
)
async def test_the_finish_reason_says_how_an_answer_ends(chat: Chat, script: str, fields: Json, expected: str) -> None:
    whole = (await chat.whole(script, tools=TOOLS, **fields))["choices"][0]
    streamed = await chat.stream(script, tools=TOOLS, **fields)
    assert [whole["finish_reason"], streamed[-1]["finish_reason"]] == [expected] * 2
    calls = [
        [call["function"]["name"], call["function"]["arguments"]] for call in whole["message"].get("tool_calls", ())
    ]
    assert joined(streamed)["calls"] == calls


async def test_text_before_a_stop_string_is_kept(chat: Chat) -> None:
    for script, content in (("a <b", "a <"), ("a <tool", "a")):
        choice = (await chat.whole(script, tools=TOOLS, stop=script[3:]))["choices"][0]
        assert choice["message"]["content"].strip() == content
        streamed = await chat.stream(script, tools=TOOLS, stop=script[3:])
        assert joined(streamed)["content"].strip() == content


async def test_a_request_without_tools_gets_no_calls(chat: Chat) -> None:
    """As with vLLM, the text stays as the model wrote it, because the client knows no tool that it could run."""
    function = {"name": "find", "arguments": "{}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "none"}]
    body = await chat.whole(CALL, messages=[{"role": "user", "content": "x"}, *messages])
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


async def test_reasoning_has_two_names_and_is_counted(chat: Chat) -> None:
    body = await chat.whole(f"{THOUGHT}42")
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("so", "so", "42")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("\nso\n")
    streamed = await chat.stream(f"{THOUGHT}42")
    assert joined(streamed) == {"content": "42", "reasoning": "so", "calls": []}
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in (choice["delta"] for choice in streamed))
    # A client that sees a content takes the reasoning to have ended.
    thinking = [choice["delta"] for choice in streamed[1:] if "42" not in choice["delta"].get("content", "")]
    assert not any(delta.get("content") == "" for delta in thinking)


async def test_hidden_reasoning_counts(chat: Chat) -> None:
    body = await chat.whole(f"{THOUGHT}42", include_reasoning=False)
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "42", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert joined(await chat.stream(f"{THOUGHT}42", include_reasoning=False))["reasoning"] == ""


async def test_the_tokens_of_hidden_reasoning_are_hidden(chat: Chat) -> None:
    fields = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    (whole,) = (await chat.whole(f"{THOUGHT}4 < 2", **fields))["choices"]
    streamed = [choice for choice in await chat.stream(f"{THOUGHT}4 < 2", **fields) if choice["logprobs"]]
    token_ids = [token_id for choice in streamed for token_id in choice["token_ids"]]
    assert whole["token_ids"] == token_ids == [*b"\n\n4 < 2", END]
    texts = "".join(entry["token"] for entry in whole["logprobs"]["content"])
    assert texts.startswith("\n\n4 < 2")
    assert [entry for choice in streamed for entry in choice["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert "so" not in texts


async def test_reasoning_that_is_cut_off_is_counted_as_it_came(chat: Chat) -> None:
    body = await chat.whole("<think>soooo", max_tokens=10)
    assert (body["choices"][0]["message"]["reasoning"], body["choices"][0]["message"]["content"]) == ("soo", None)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_half_a_marker_is_text_only_in_an_answer_that_ended_by_itself(chat: Chat) -> None:
    body = await chat.whole("<think>abc</think>", max_tokens=15)
    assert body["choices"][0]["message"]["reasoning"] == "abc"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    for fields, content in (({}, "a <"), ({"max_tokens": 3}, "a ")):
        assert (await chat.whole("a <", **fields))["choices"][0]["message"]["content"] == content


async def test_effort_switches_the_template(chat: Chat) -> None:
    for fields, thinks in (
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ):
        message = (await chat.whole("42", **fields))["choices"][0]["message"]
        assert chat.prompt.endswith("<think></think>") is not thinks, fields
        assert message["content"] == "42"


async def test_an_answer_may_begin_within_reasoning(chat: Chat) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\nfirst"}]
    fields = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 9}
    body = await chat.whole(", then</think>42", **fields)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (", then", "42")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    # Five tokens of the budget are in the prompt.
    assert chat.allows("xxxx</think>42")
    assert not chat.allows("xxxxx</think>42")
    assert not chat.allows("xxxx")


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_a_budget_ends_reasoning(chat: Chat, budget: int) -> None:
    await chat.whole(f"<think>{'x' * budget}</think>42", thinking_token_budget=budget)
    assert chat.allows(f"<think>{'x' * budget}</think>42")
    assert not chat.allows(f"<think>{'x' * (budget + 1)}</think>42")
    assert chat.allows("42")


async def test_a_schema_holds_for_the_content(chat: Chat) -> None:
    body = await chat.whole(f"{THOUGHT}42", response_format=SCHEMA)
    assert body["choices"][0]["message"]["content"] == "42"
    assert [chat.allows(text) for text in ("42", f"{THOUGHT.strip()}42", f"{THOUGHT.strip()}so", "so")] == [
        True,
        True,
        False,
        False,
    ]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


async def test_the_choice_among_tools_is_enforced(chat: Chat) -> None:
    texts = {"text": "so", "find": CALL, "stop": SECOND, "both": f"{CALL}\n{SECOND}", "thought": THOUGHT.strip() + CALL}
    for fields, expected in (
        ({}, set(texts)),
        ({"tool_choice": "none"}, {"text"}),
        ({"tool_choice": "required"}, set(texts) - {"text"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"find", "stop", "thought"}),
        ({"parallel_tool_calls": False}, {"text", "find", "stop", "thought"}),
        ({"tool_choice": NAMED}, {"find", "thought"}),
        ({"tool_choice": allowed("auto", NAMED)}, {"text", "find", "thought"}),
        ({"tool_choice": allowed("required", NAMED)}, {"find", "thought"}),
    ):
        await chat.whole("so", tools=TOOLS, **fields)
        assert {name for name, text in texts.items() if chat.allows(text)} == expected, fields


async def test_calls_and_their_results_come_back_as_history(chat: Chat) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"text": "Öl"}'}}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "barrel"}]},
    ]
    await chat.whole("so", messages=messages, tools=TOOLS)
    assert chat.prompt == (
        '<tool_call>find,stop<|user|>hello<|assistant|><tool_call>find {"text": "Öl"} call_1<|tool|>barrelcall_1'
        "<|assistant|>"
    )


async def test_what_contradicts_itself_is_refused(chat: Chat) -> None:
    for fields, param in (
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", {"function": {"name": "look"}})}, "tool_choice"),
        ({"tool_choice": allowed("auto", NAMED)}, "tool_choice"),
        ({"tools": [FIND, FIND]}, "tools"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ):
        assert await chat.error(**fields) == (400, param)


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Changes a file."}}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\u00e9"}}\n</tool_call>'


async def test_the_input_of_a_custom_tool_is_a_text(chat: Chat) -> None:
    tools = [PATCH, FIND]
    (choice,) = (await chat.whole(f"{PATCH_CALL}\n{CALL}", tools=tools))["choices"]
    custom, function = choice["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": 'a\n"bé'})
    assert (function["type"], function["function"]["name"]) == ("function", "find")
    choices = await chat.stream(f"{PATCH_CALL}\n{CALL}", tools=tools)
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
    own = [piece["custom"] for piece in pieces if piece["index"] == 0]
    assert (own[0]["name"], "".join(piece["input"] for piece in own)) == ("patch", 'a\n"bé')
    assert all("function" in piece for piece in pieces if piece["index"] == 1)
    assert choice["finish_reason"] == "tool_calls"


async def test_the_expression_of_a_custom_tool_is_enforced(chat: Chat) -> None:
    digits, named = {"type": "custom", "custom": {"name": "patch", "format": DIGITS}}, PATCH
    await chat.whole("x", tools=[digits, FIND], tool_choice={"type": "custom", "custom": {"name": "patch"}})
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "%s"}}\n</tool_call>'
    assert [chat.allows(call % text) for text in ("12", "ab")] == [True, False]
    assert not chat.allows(CALL)
    await chat.whole("x", tools=[named], tool_choice="required")
    assert chat.allows(call % "ab")
    lookahead = {**DIGITS, "grammar": {"syntax": "regex", "definition": "(?=a)b"}}
    for custom in ({"name": "p", "format": {"type": "grammar"}}, {"name": "p", "format": lookahead}, {}):
        status, place = await chat.error(tools=[{"type": "custom", "custom": custom}])
        assert (status, place[:5]) == (400, "tools")


async def test_calls_of_custom_tools_are_in_the_conversation(chat: Chat) -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "some text"}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "ok"}]
    await chat.whole("x", messages=turns, tools=[PATCH])
    assert 'patch {"input": "some text"} c' in chat.prompt
