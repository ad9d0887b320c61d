"""POST /v1/responses through the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from paceline.services.gateway.api.responses import planning
from paceline.services.gateway.api.responses.items import read_items
from paceline.services.gateway.api.responses.planning import _cuts, _shortened
from tests.services.gateway.api.responses.conftest import SEED, StartAgents, ask, call, prompt_of, recite
from tests.services.gateway.conftest import Stack, eventually
from tests.services.gateway.toy_model import END

Json = dict[str, Any]

FIND = {
    "type": "function",
    "name": "find",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
STRICT = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}, "strict": True}


async def stream_of(stack: Stack, **options: Any) -> list[Any]:
    events = await stack.openai.responses.create(model="toy", stream=True, extra_body=SEED, **options)
    return [event async for event in events]


async def test_a_whole_response(agents: Stack) -> None:
    response = await ask(agents, "hi", "Hello!", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)
    assert prompt_of(agents) == "<|system|>Be kind.<|user|>hi<|assistant|>"
    assert (response.object, response.status, response.output_text) == ("response", "completed", "Hello!")
    assert (response.metadata, response.temperature, response.instructions) == ({"a": "b"}, 0.5, "Be kind.")
    assert response.usage
    assert (response.usage.output_tokens, response.usage.output_tokens_details.reasoning_tokens) == (7, 0)
    assert response.usage.input_tokens == len("<|system|>Be kind.hi") + 2
    assert response.usage.total_tokens == response.usage.input_tokens + 7


async def test_what_the_model_saw_and_wrote(agents: Stack) -> None:
    answer = "<think>hm</think>Hello!"
    fields = {"input": "hi", "enable_response_messages": True, **SEED}
    recite(agents, answer)
    whole = (await agents.post("/v1/responses", **fields)).json()
    events = (await agents.post("/v1/responses", stream=True, **fields)).text
    *_, last = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    (prompt,) = (call.work.token_ids for call in agents.workers["prefill-0"].calls[-1:])
    for body in (whole, last["response"], (await agents.http.get(f"/v1/responses/{whole['id']}")).json()):
        (given,), (written,) = body["input_messages"], body["output_messages"]
        assert (given["message"], given["tokens"]) == ("<|user|>hi<|assistant|>", list(prompt))
        assert (written["message"], written["tokens"]) == (f"{answer}<|end|>", [*answer.encode(), END])
        assert given["type"] == written["type"] == "raw_message_tokens"
    silent = (await agents.post("/v1/responses", input="hi", **SEED)).json()
    assert not {"input_messages", "output_messages"} & silent.keys()


async def test_a_response_has_every_field_of_the_client_s_type(agents: Stack) -> None:
    recite(agents, "ok")
    body = (await agents.post("/v1/responses", input="hi", **SEED)).json()
    assert Response.model_fields.keys() <= body.keys()
    Response.model_validate(body)


async def test_the_order_and_numbers_of_events(agents: Stack) -> None:
    recite(agents, "<think>hm</think>a\n" + call("find", text="b"))
    events = await stream_of(agents, input="x", tools=[FIND])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1].response
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert final.output == done
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {item.id for item in done}
    thought, message, function = final.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.content[0].text) == ("message", "a")
    assert (function.type, function.name, json.loads(function.arguments)) == ("function_call", "find", {"text": "b"})
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        (whole,) = [event for event in events if event.type == f"response.{kind}.done"]
        assert "".join(pieces) == (whole.arguments if kind.startswith("function") else whole.text)


async def test_the_events_have_names(agents: Stack) -> None:
    recite(agents, "\u2028x")
    text = (await agents.post("/v1/responses", input="x", stream=True, **SEED)).text
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


class Weather(BaseModel):
    city: str
    rain: bool


async def test_the_client_s_helper_for_streams(agents: Stack) -> None:
    recite(agents, '{"city": "Rome", "rain": false}')
    manager = agents.openai.responses.stream(model="toy", input="x", text_format=Weather, extra_body=SEED)
    async with manager as stream:
        response = await stream.get_final_response()
    assert response.output_parsed == Weather(city="Rome", rain=False)
    constraint = agents.workers["decode-0"].calls[-1].work.sampling.constraint
    assert '"city"' in constraint.text


async def test_an_answer_that_is_cut_off_is_incomplete(agents: Stack) -> None:
    recite(agents, call("find", text="long"), ends=False)
    options = {"input": "x", "tools": [FIND], "max_output_tokens": 50}
    *_, last = await stream_of(agents, **options)
    assert last.type == "response.incomplete"
    assert (last.response.status, last.response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (item,) = last.response.output
    assert (item.status, item.arguments[:6]) == ("incomplete", '{"text')
    whole = await agents.openai.responses.create(model="toy", extra_body=SEED, **options)  # type: ignore[call-overload]
    assert whole.output[0].arguments == item.arguments


async def test_an_empty_answer_has_an_empty_message(agents: Stack) -> None:
    for worker in agents.workers.values():
        worker.stop_at = 0
    response = await agents.openai.responses.create(model="toy", input="x", extra_body=SEED)
    assert (response.output_text, response.output[0].type) == ("", "message")


async def test_a_failure_after_the_start_ends_the_stream(start_agents: StartAgents) -> None:
    agents = await start_agents(max_attempts=1)
    recite(agents, "abcdefgh")
    agents.workers["decode-0"].fail_after = 3
    *_, done, last = await stream_of(agents, input="x")
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "given up because it failed once" in last.response.error.message
    assert (await agents.openai.responses.retrieve(last.response.id)).status == "failed"


async def test_a_failure_before_the_start_has_its_own_status(agents: Stack) -> None:
    for worker in agents.workers.values():
        worker.fail_after = 0
    with pytest.raises(openai.InternalServerError) as caught:
        await stream_of(agents, input="x")
    assert caught.value.status_code == 503


async def test_logprobs(agents: Stack) -> None:
    recite(agents, "<think>t</think>ok")
    include = ["message.output_text.logprobs"]
    events = await stream_of(agents, input="x", include=include, top_logprobs=2)
    message = events[-1].response.output[1]
    assert [entry.token for entry in message.content[0].logprobs] == ["o", "k"]
    assert len(message.content[0].logprobs[0].top_logprobs) == 2
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == ["o", "k"]


async def test_a_custom_tool_gets_its_input_as_text(agents: Stack) -> None:
    patch = '*** Begin Patch\n+"ünï" \\ 🌂\n*** End Patch'
    recite(agents, call("apply_patch", input=patch))
    events = await stream_of(agents, input="x", tools=[PATCH])
    assert "Edits files." in prompt_of(agents)
    item = events[-1].response.output[0]
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", patch)
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in deltas) == patch
    assert len(deltas) > 20


async def test_a_tool_of_a_namespace_is_called_by_both_names(agents: Stack) -> None:
    namespace = {"type": "namespace", "name": "mcp__db", "description": "A database.", "tools": [FIND, PATCH]}
    recite(agents, call("mcp__db__find", text="x") + call("mcp__db__apply_patch", input="y"))
    first, second = (await stream_of(agents, input="x", tools=[namespace]))[-1].response.output
    assert (first.type, first.namespace, first.name) == ("function_call", "mcp__db", "find")
    assert (second.type, second.namespace, second.name) == ("custom_tool_call", "mcp__db", "apply_patch")
    assert "A database." in prompt_of(agents)


async def test_tools_of_other_servers_are_left_out(agents: Stack, caplog: pytest.LogCaptureFixture) -> None:
    tools: list[Any] = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "made_up", "x": [1]}]
    response = await ask(agents, "x", "ok", tools=tools, tool_choice="auto")
    assert prompt_of(agents) == "<|user|>x<|assistant|>"
    assert [tool.type for tool in response.tools] == ["web_search", "local_shell", "made_up"]
    assert "cannot run; the model is not told of them: 'web_search', 'local_shell', 'made_up'" in caplog.text


@pytest.mark.parametrize(
    ("choice", "called", "shown"),
    [
        ("required", {"find", "apply_patch"}, {"find", "apply_patch"}),
        ({"type": "function", "name": "find"}, {"find"}, {"find", "apply_patch"}),
        ({"type": "custom", "name": "apply_patch"}, {"apply_patch"}, {"find", "apply_patch"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "find"}]},
            {"find"},
            {"find"},
        ),
    ],
)
async def test_the_choice_of_a_tool(agents: Stack, choice: Any, called: set[str], shown: set[str]) -> None:
    recite(agents, "{}")
    response = await agents.openai.responses.create(
        model="toy",
        input="x",
        tools=[FIND, PATCH],  # type: ignore[list-item]
        tool_choice=choice,
        extra_body=SEED,
    )
    grammar = agents.workers["decode-0"].calls[-1].work.sampling.constraint.text
    assert {name for name in ("find", "apply_patch") if name in grammar} == called
    assert {name for name in ("find", "apply_patch") if f'"name": "{name}"' in prompt_of(agents)} == shown
    echoed = response.tool_choice
    assert (echoed if isinstance(echoed, str) else echoed.model_dump(exclude_unset=True)) == choice


BAD_REQUESTS: list[tuple[Json, str]] = [
    ({}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "input_text", "text": "x"}, {"role": "user", "content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": [FIND, FIND]}, "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tools": [FIND], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"input": "x", "tools": [FIND], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": STRICT}}, "text.format.schema"),
    ({"input": "x", "max_output_tokens": 1 << 20}, "max_output_tokens"),
    ({"input": "x" * (1 << 14)}, "input"),
    ({"input": []}, "input"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
    ({"input": "x", "background": True, "store": False}, "background"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
    ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
]


async def test_a_bad_request_names_its_field(agents: Stack) -> None:
    for body, param in BAD_REQUESTS:
        answer = await agents.post("/v1/responses", **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), body
        assert "messages" not in error["message"]
        assert "max_completion_tokens" not in error["message"]


async def test_fields_of_agents_are_accepted(agents: Stack) -> None:
    extra = {"client_metadata": {"x": 1}, "prompt_cache_options": {"mode": "implicit"}, "made_up": 1}
    response = await ask(
        agents,
        "x",
        "ok",
        extra_body=extra,
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="flex",
        user="u",
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="auto",
        store=False,
        tools=[],
    )
    assert (response.prompt_cache_key, response.reasoning.effort, response.text.verbosity) == ("k", "low", "low")  # type: ignore[union-attr]


async def test_truncation_drops_the_oldest_turns(start_agents: StartAgents) -> None:
    agents = await start_agents(tool_call_parser="none", reasoning_parser="none")
    turns = [{"role": role, "content": f"{role[0]}{turn}" * 512} for turn in range(6) for role in ("user", "assistant")]
    items: list[Any] = [{"role": "system", "content": "be"}, *turns, {"role": "user", "content": "end"}]
    recite(agents, "ok")
    await agents.openai.responses.create(
        model="toy", input=items, truncation="auto", max_output_tokens=10, extra_body=SEED
    )
    prompt = prompt_of(agents)
    assert prompt.startswith("<|system|>be<|user|>u3")
    assert prompt.endswith("<|user|>end<|assistant|>")
    with pytest.raises(openai.BadRequestError) as caught:
        await agents.openai.responses.create(model="toy", input=items, extra_body=SEED)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


async def test_the_tokens_of_an_input_are_counted(agents: Stack) -> None:
    count = await agents.openai.responses.input_tokens.count(model="toy", input="hi", instructions="be")
    assert count.input_tokens == len("<|system|>behi") + 2


async def test_an_expression_for_a_custom_tool_is_enforced_or_refused(agents: Stack) -> None:
    tool: Any = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{3}"}}
    recite(agents, call("apply_patch", input="abc"))
    await stream_of(agents, input="x", tools=[tool])
    assert "[a-z]{3}" in agents.workers["decode-0"].calls[-1].work.sampling.constraint.text
    tool["format"]["definition"] = r"(?<=a)\1"
    answer = await agents.post("/v1/responses", input="x", tools=[tool])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].parameters")


async def test_a_call_that_a_stop_string_cuts_off_is_incomplete(agents: Stack) -> None:
    extra = {**SEED, "stop": ["STOP"]}
    response = await ask(agents, "x", call("find", text="a STOP b"), tools=[FIND], extra_body=extra)  # type: ignore[list-item]
    assert (response.status, response.incomplete_details) == ("incomplete", None)
    assert (response.output[0].type, response.output[0].status) == ("function_call", "incomplete")


async def test_an_answer_that_repeats_itself_or_is_aborted_is_incomplete(agents: Stack) -> None:
    wanted = {"max_pattern_size": 2, "min_count": 5}
    looping = await ask(agents, "x", "ab" * 50, extra_body={"repetition_detection": wanted})
    assert (looping.status, looping.incomplete_details) == ("incomplete", None)
    agents.pause_decode(2)
    running = asyncio.create_task(ask(agents, "x", "abcdef", extra_body={"request_id": "r"}))
    await eventually(lambda: len(agents.workers["decode-0"].calls) == 2)
    await agents.post("/abort_requests", request_ids=["r"])
    assert (await running).status == "incomplete"


def test_only_the_name_of_a_field_at_the_beginning_of_an_error_is_translated() -> None:
    texts = {
        "messages: no message": "input: no message",
        "tools[0].function.parameters: messages": "tools[0].parameters: messages",
        "tools: 'messages' is there twice": "tools: 'messages' is there twice",
        "messages_of: x": "messages_of: x",
    }
    assert {text: planning._in_client_fields(text) for text in texts} == texts


async def test_a_tool_s_output_that_is_no_text_becomes_a_note(agents: Stack) -> None:
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": "data:image/png;base64,A"}]
    made = {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
    items: Any = [
        {"role": "user", "content": "x"},
        made,
        {"type": made["type"] + "_output", "call_id": "c", "output": output},
    ]
    first = await ask(agents, items, "ok")
    note = "<|tool|>seen\n[image: this model takes text alone]<|assistant|>"
    assert prompt_of(agents).endswith(note)
    await ask(agents, "y", "ok", previous_response_id=first.id)
    assert f"{note}ok<|user|>y" in prompt_of(agents)


async def test_the_request_id_of_the_body_is_used_or_refused(agents: Stack) -> None:
    recite(agents, "ok")
    answer = await agents.post("/v1/responses", input="x", request_id="mine", **SEED)
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"].startswith("resp_")
    refused = await agents.post("/v1/responses", input="x", request_id="two words")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


async def test_truncation_drops_the_oldest_calls_of_a_long_turn(start_agents: StartAgents) -> None:
    agents = await start_agents(tool_call_parser="none", reasoning_parser="none")
    calls = [
        {"type": kind, "call_id": f"c{index}", **fields}
        for index in range(6)
        for kind, fields in (
            ("function_call", {"name": f"f{index}", "arguments": "{}"}),
            ("function_call_output", {"output": f"r{index}" * 1000}),
        )
    ]
    items: list[Any] = [{"role": "user", "content": "old"}, {"role": "user", "content": "do"}, *calls]
    recite(agents, "ok")
    body = {"input": items, "instructions": "be", "max_output_tokens": 10, **SEED}
    answer = await agents.post("/v1/responses", truncation="auto", **body)
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(agents)
    assert prompt.startswith("<|system|>be<|user|>do<|assistant|>")
    assert [f"r{index}" in prompt for index in range(6)] == [False] * 2 + [True] * 4
    # A result without its call would be a riddle to the model.
    assert prompt.index("<|tool|>") > prompt.index("<|assistant|>")


def items_of(text: str) -> list[Any]:
    """Return the items of letters.

    u, s, a: messages of the user, of the system and of the assistant. f0, o0: a call and its result. m: a call of an
    MCP server.
    """
    made = {
        "u": {"role": "user", "content": "u"},
        "s": {"role": "system", "content": "s"},
        "a": {"role": "assistant", "content": "a"},
        "m": {"type": "mcp_call", "id": "m", "server_label": "x", "name": "f", "arguments": "{}", "output": "o"},
    }
    call, output = {"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "function_call_output"}
    named = {"f": call, "o": {**output, "output": ""}}
    fields = [made.get(name) or {**named[name[0]], "call_id": name[1:]} for name in text.split()]
    return read_items(fields)


@pytest.mark.parametrize(
    ("conversation", "shorter"),
    [
        ("u a u", ["u"]),
        ("s u a u a u", ["s u a u", "s u"]),
        # The calls of the oldest turn go before its message.
        ("u f0 o0 f1 o1 a u", ["u f1 o1 a u", "u a u", "u"]),
        ("u f0 f1 o0 f2 o1 o2 a", ["u a"]),
        ("u f0 f1 o0 o1 f2 o2", ["u f2 o2"]),
        ("u m m m", ["u m m", "u m"]),
        ("u m f0 o0 m", ["u f0 o0 m", "u m"]),
        ("u f0", []),
        ("s", []),
    ],
)
def test_the_oldest_items_go_first_and_no_result_without_its_call(conversation: str, shorter: list[str]) -> None:
    items = items_of(conversation)
    assert [_shortened(items, cut) for cut in _cuts(items)] == [items_of(each) for each in shorter]


@pytest.mark.parametrize("fields", [{"user": "\ud800"}, {"tools": [{**FIND, "description": "\ud800"}]}])
async def test_what_cannot_be_repeated_is_refused(agents: Stack, fields: Any) -> None:
    content = json.dumps({"model": "toy", "input": "x", **fields})  # which escapes it, as httpx does not
    answer = await agents.http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    (name,) = fields
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
