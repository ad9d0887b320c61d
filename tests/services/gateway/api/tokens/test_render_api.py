"""The routes render and derender, and the way from one to the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.grammar import grammar_of
from paceline.core.types import Constraint
from paceline.services.common.wire import sampling_from_pb
from paceline.services.gateway.api.tokens.render_api import render
from paceline.services.gateway.planning.answers.registry import TOOL_FORMS, choose_forms
from paceline.services.gateway.planning.plan import ServedModel
from paceline.services.gateway.planning.planning import plan_chat
from paceline.services.gateway.planning.schemas import ChatRequest
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.planning.constraints.making import chat_constraint, completion_constraint
from tests.services.gateway.toy_model import END, write_toy_model

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
}
TOOLS_TEMPLATE = "{{ tools | length if tools else 0 }}<|im_start|><think>" + (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)


def constraints(stack: Stack) -> list[Constraint | None]:
    return [sampling_from_pb(call.work.sampling).constraint for call in stack.workers["prefill-0"].calls]


async def test_a_rendered_chat_has_all_that_generate_needs(stack: Stack) -> None:
    fields = {"messages": HELLO, "top_p": 0.5, "stop": "x", "max_completion_tokens": 9, "logprobs": True}
    rendered = (await stack.post(f"{CHAT}/render", request_id="r", cache_salt="s", seed=5, **fields)).json()
    assert (rendered["request_id"], rendered["model"], rendered["cache_salt"]) == ("r", "toy", "s")
    assert rendered["token_ids"] == [257, *b"hello", 258]
    params = rendered["sampling_params"]
    assert (params["temperature"], params["top_p"], params["max_tokens"], params["logprobs"]) == (1.0, 0.5, 9, 0)
    assert (params["stop"], params["seed"], params["structured_outputs"]) == (["x"], 5, None)
    assert "priority" not in rendered  # that of the key is its default
    urgent = (await stack.post(f"{CHAT}/render", priority=-2, **fields)).json()
    assert urgent["priority"] == -2
    assert not any(worker.calls for worker in stack.workers.values())
    answer = (await stack.post(GENERATE, **rendered)).json()
    assert len(answer["choices"][0]["token_ids"]) == 9


async def test_a_rendered_completion_is_a_list(stack: Stack) -> None:
    one, two = (await stack.post("/v1/completions/render", prompt=["a", "bc"], request_id="r")).json()
    assert [(each["request_id"], each["token_ids"]) for each in (one, two)] == [("r-0", [*b"a"]), ("r-1", [*b"bc"])]
    assert one["sampling_params"]["max_tokens"] == 16
    assert "seed" not in one["sampling_params"]
    refused = await stack.post("/v1/completions/render", prompt="a", max_tokens=0, echo=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_tokens_have_their_places_in_the_text(stack: Stack) -> None:
    text = "aé✓b"  # its tokens are bytes
    places = [[0, 1], [1, 2], [1, 2], *[[2, 3]] * 3, [3, 4]]
    wanted = {"return_token_offsets": True}
    for fields, expected in (
        ({}, [places]),
        ({"prompt": [text, "b"]}, [places, [[0, 1]]]),
        ({"prompt": [*text.encode()]}, [None]),
        ({"truncate_prompt_tokens": 2}, [places[-2:]]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [places[:2]]),
        ({"return_token_offsets": False}, [None]),
    ):
        rendered = (await stack.post("/v1/completions/render", **{"prompt": text, **wanted, **fields})).json()
        assert [each["token_offsets"] for each in rendered] == expected, fields
    chat = (await stack.post(f"{CHAT}/render", messages=HELLO, max_tokens=2, **wanted)).json()
    ends = len("<|user|>"), len("<|user|>hello"), len("<|user|>hello<|assistant|>")
    assert chat["token_offsets"][0] == [0, ends[0]]
    assert chat["token_offsets"][-2:] == [[ends[1] - 1, ends[1]], [ends[1], ends[2]]]
    assert (await stack.post(GENERATE, **chat)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": ["a", 'b"']}},
        {"structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_regex": "[ab]+"},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "thinking_token_budget": 7, "response_format": {"type": "json_object"}},
    ],
)
async def test_constraints_survive_the_way_over_render(start_stack: StartStack, tmp_path: Path, fields: Any) -> None:
    model = write_toy_model(tmp_path / "toy", chat_template=TOOLS_TEMPLATE)
    stack = await start_stack(model=str(model))
    chat = {"messages": HELLO, "max_tokens": 3, **fields}
    rendered = await stack.post(f"{CHAT}/render", **chat)
    assert rendered.status_code == 200, rendered.text
    assert (await stack.post(CHAT, **chat)).status_code == 200
    assert (await stack.post(GENERATE, **rendered.json())).status_code == 200
    direct, over_render = constraints(stack)
    assert direct is not None
    assert over_render is not None
    assert over_render.text in (direct.text, f"start: %json {direct.text}")
    assert over_render.end_token_ids == direct.end_token_ids


@pytest.mark.parametrize("form", sorted(TOOL_FORMS))
def test_grammars_of_all_forms_survive_the_way_over_render(form: str, toy_model: Path) -> None:
    forms, tokenizer = choose_forms(form, "auto", "", {}), Tokenizer(toy_model)
    strange = {"name": "go", "parameters": {"properties": {"x": {"type": "nothing"}}}}
    tools = [TOOL, {"type": "function", "function": strange}]
    opened = {"response_format": {"type": "json_object"}, "structured_outputs": {"allow_additional_properties": True}}
    for fields in ({}, opened):
        request = ChatRequest.model_validate({"messages": HELLO, "tools": tools, **fields})
        made = chat_constraint(request, forms, tokenizer, "")
        assert made is not None
        plan = plan_chat(request, ServedModel(tokenizer, 4096, forms))
        sampling = replace(plan.prompts[0].sampling, constraint=made)
        (rendered,) = render(request, replace(plan, prompts=[replace(plan.prompts[0], sampling=sampling)]), "r", "toy")
        again = TokensRequest.model_validate(rendered).sampling_params
        over_render = completion_constraint(again, forms, tokenizer, [1])
        assert over_render is not None
        assert over_render.text == made.text
        assert grammar_of(over_render.kind, over_render.text) == grammar_of(made.kind, made.text)


def answer(text: str, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [*text.encode(), END], "finish_reason": "stop", **fields}
    return {"request_id": "r", "choices": [choice]}


async def test_a_chat_from_tokens(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(model=str(write_toy_model(tmp_path / "toy", chat_template=TOOLS_TEMPLATE)))
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    body = {"chat_request": {"messages": HELLO, "tools": [TOOL]}, "prompt_tokens": 6}
    parsed = await stack.post(f"{CHAT}/derender", generate_response=answer(f"hm</think>well{call}"), **body)
    chat = parsed.json()
    message = chat["choices"][0]["message"]
    assert (chat["id"], chat["object"], chat["choices"][0]["finish_reason"]) == ("r", "chat.completion", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"place": "here"}'}
    assert chat["usage"]["total_tokens"] == 6 + len(f"hm</think>well{call}") + 1
    thought = await stack.post(f"{CHAT}/derender", generate_response=answer("<think>hm</think>well"), **body)
    assert thought.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    plain = (await stack.post(f"{CHAT}/derender", generate_response=answer("hm</think>well"))).json()
    assert plain["choices"][0]["message"]["content"] == "hm</think>well"
    assert plain["usage"]["prompt_tokens"] == 0


async def test_logprobs_get_their_texts(stack: Stack) -> None:
    params = {"max_tokens": 3, "seed": 0, "logprobs": 2}
    tokens = (await stack.post(GENERATE, token_ids=[1], sampling_params=params)).json()
    chat = (await stack.post(f"{CHAT}/derender", generate_response=tokens)).json()
    direct = (await stack.post(GENERATE, token_ids=[1], sampling_params=params, output_mode="text")).json()
    assert chat["choices"][0]["logprobs"] == direct["choices"][0]["logprobs"]
    assert chat["choices"][0]["message"]["content"] == "The"


async def test_completions_from_tokens_are_numbered_over_all_prompts(stack: Stack) -> None:
    two = answer("one, two")
    two["choices"].append({**two["choices"][0], "index": 1, "finish_reason": "length"})
    body = {"generate_responses": [two, answer("three")], "prompt_tokens": [4, 5]}
    whole = (await stack.post("/v1/completions/derender", **body)).json()
    choices = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert choices == [(0, "one, two", "stop"), (1, "one, two", "length"), (2, "three", "stop")]
    assert whole["usage"]["total_tokens"] == 9 + 9 + 9 + 6
    request = {"prompt": ["p", "q"], "stop": ",", "echo": True}
    cut = (await stack.post("/v1/completions/derender", completion_request=request, **body)).json()
    assert [choice["text"] for choice in cut["choices"]] == ["pone", "pone", "qthree"]


async def derendered(stack: Stack, path: str, events: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of events that are sent one by one, each with the state after the one before."""
    chunks, state = [], None
    for event in events:
        body = {"stream": True, "generate_chunk": event, "stream_state": state, **fields}
        found = await stack.post(f"{path}/derender", **body)
        assert found.status_code == 200, found.text
        again = (await stack.post(f"{path}/derender", **body)).json()
        before, state = state, found.json()["stream_state"]
        known = before["last_tool_call_ids"] if before is not None else []
        assert state["last_tool_call_ids"][: len(known)] == known
        if (
            not state["last_tool_call_ids"]
            or state["last_tool_call_ids"] == again["stream_state"]["last_tool_call_ids"]
        ):
            assert again["chunk"]["choices"] == found.json()["chunk"]["choices"]
        chunks.append(found.json()["chunk"])
    return chunks


def events_of(text: str, sizes: list[int], index: int = 0, finish_reason: str = "stop") -> list[dict[str, Any]]:
    """Return the events of a streamed answer, with numbers of tokens in turn."""
    ids, events = [*text.encode(), END], []
    while ids:
        count = sizes[len(events) % len(sizes)]
        events.append({"request_id": "r", "choices": [{"index": index, "token_ids": ids[:count]}]})
        ids = ids[count:]
    events[-1]["choices"][0]["finish_reason"] = finish_reason
    return events


@pytest.mark.parametrize("sizes", [[1], [3, 1, 7], [500]], ids=str)
async def test_a_streamed_chat_from_tokens_has_what_the_whole_one_has(
    start_stack: StartStack, tmp_path: Path, sizes: list[int]
) -> None:
    stack = await start_stack(model=str(write_toy_model(tmp_path / "toy", chat_template=TOOLS_TEMPLATE)))
    calls = [f'<tool_call>\n{{"name": "look", "arguments": {{"place": "{place}"}}}}\n</tool_call>' for place in "aé"]
    text = f"<think>hé</think>wéll{''.join(calls)}"
    about = {"chat_request": {"messages": HELLO, "tools": [TOOL]}, "prompt_tokens": 6}
    whole = (await stack.post(f"{CHAT}/derender", generate_response=answer(text), **about)).json()["choices"][0]
    usage = {
        "request_id": "r",
        "choices": [],
        "usage": {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10},
    }
    empty = {"request_id": "r", "choices": [{"index": 2}]}
    *chunks, last = await derendered(stack, CHAT, [empty, *events_of(text, sizes, index=2), usage], **about)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert {choice["index"] for choice in choices} == {2}
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    for name in ("content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == whole["message"][name]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert len({part["id"] for part in parts if "id" in part}) == 2
    for number, call in enumerate(whole["message"]["tool_calls"]):
        own = [part["function"] for part in parts if part["index"] == number]
        assert "".join(each.get("name", "") for each in own) == "look"
        assert "".join(each["arguments"] for each in own) == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert (last["choices"], last["usage"]["prompt_tokens"], last["usage"]["total_tokens"]) == ([], 6, 15)
    assert {chunk["id"] for chunk in chunks} == {"r"}


async def test_a_streamed_completion_from_tokens(stack: Stack) -> None:
    events = events_of("one, twö", [2])
    events.append({"request_id": "r", "choices": [{"index": 0, "finish_reason": "stop"}]})
    del events[-2]["choices"][0]["finish_reason"]  # vLLM may send it alone
    chunks = await derendered(stack, "/v1/completions", events, completion_request={"prompt": "p", "echo": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "pone, twö"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


async def test_logprobs_of_a_streamed_completion_go_on_where_they_were(stack: Stack) -> None:
    params = {"max_tokens": 3, "seed": 0, "logprobs": 2}
    tokens = (await stack.post(GENERATE, token_ids=[1], sampling_params=params)).json()
    (choice,) = tokens["choices"]
    request = {"prompt": "p", "logprobs": 2, "max_tokens": 3}
    body = {"generate_responses": [tokens], "completion_request": request}
    whole = (await stack.post("/v1/completions/derender", **body)).json()["choices"][0]["logprobs"]
    events = [
        {"choices": [{"index": 0, "token_ids": [token], "logprobs": {"content": [score]}}]}
        for token, score in zip(choice["token_ids"], choice["logprobs"]["content"])
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    chunks = await derendered(stack, "/v1/completions", events, completion_request=request)
    found = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for each in found for value in each[name]] == whole[name]
    bare = answer("hi")  # a request for logprobs whose answer has none
    assert (
        await stack.post(f"{CHAT}/derender", generate_response=bare, chat_request={"messages": HELLO, "logprobs": True})
    ).status_code == 200


def with_logprobs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events whose tokens have their place as a negative logprob."""
    place = 0
    for event in events:
        (choice,) = event["choices"]
        scores = [{"token_id": own, "logprob": -1.0 - place - at} for at, own in enumerate(choice["token_ids"])]
        choice["logprobs"], place = {"content": scores}, place + len(scores)
    return events


@pytest.mark.parametrize("fields", [{}, {"completion_request": {"prompt": "p", "logprobs": 1}}], ids=["bare", "known"])
async def test_a_stream_without_a_known_limit_shows_each_token_at_once(stack: Stack, fields: dict[str, Any]) -> None:
    events = with_logprobs(events_of("abcdefghijklmnopqrstuvwxyz", [1], finish_reason="length"))
    chunks = await derendered(stack, "/v1/completions", events[:-1], **fields)
    found = [(choice["text"], *choice["logprobs"]["token_logprobs"]) for each in chunks for choice in each["choices"]]
    assert found == [(letter, -1.0 - place) for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz")]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_token_that_waits_for_the_end_keeps_its_logprob(stack: Stack, path: str) -> None:
    events = with_logprobs(events_of("ab", [1]))
    del events[-1]["choices"][0]["finish_reason"]
    events.append({"choices": [{"index": 0, "finish_reason": "stop"}]})
    assert logprobs_of(await derendered(stack, path, events)) == [-1.0, -2.0, -3.0]


async def test_tokens_that_may_begin_a_marker_keep_their_logprobs(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(model=str(write_toy_model(tmp_path / "toy", chat_template=TOOLS_TEMPLATE)))
    request = {"messages": HELLO, "tools": [TOOL], "logprobs": True, "include_reasoning": False}
    text = "<think>h</think>a <tool"
    chunks = await derendered(stack, CHAT, with_logprobs(events_of(text, [1])), chat_request=request)
    first = text.index("a <")
    assert logprobs_of(chunks) == [-1.0 - place for place in range(first, len(text) + 1)]


def logprobs_of(chunks: list[dict[str, Any]]) -> list[float]:
    own = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    return [each for logprobs in own for each in logprobs.get("token_logprobs") or _chat_logprobs(logprobs)]


def _chat_logprobs(logprobs: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in logprobs.get("content", ())]


@pytest.mark.parametrize("count", [None, "x", -1, 2**63])
async def test_a_usage_that_counts_no_tokens_is_refused(stack: Stack, count: object) -> None:
    event = {"choices": [], "usage": {"completion_tokens": count}}
    refused = await stack.post(f"{CHAT}/derender", stream=True, generate_chunk=event, prompt_tokens=3)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "generate_chunk.usage.completion_tokens"


EVENT = events_of("a", [9])[0]

REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (f"{CHAT}/derender", {"stream": True}, 400),
    (f"{CHAT}/derender", {"stream": True, "generate_chunk": {"choices": EVENT["choices"] * 2}}, 400),
    (f"{CHAT}/derender", {"stream": True, "generate_chunk": {**EVENT, "output_mode": "text"}}, 400),
    (f"{CHAT}/derender", {"stream": True, "generate_chunk": EVENT, "stream_state": {"output_token_ids": [1]}}, 400),
    (
        f"{CHAT}/derender",
        {
            "stream": True,
            "generate_chunk": EVENT,
            "stream_state": {"output_token_ids": [300], "output_chunk_lens": [1]},
        },
        400,
    ),
    (
        "/v1/completions/derender",
        {"stream": True, "generate_chunk": {"choices": [{"index": 0, "token_ids": [300]}]}},
        400,
    ),
    (f"{CHAT}/derender", {"generate_response": None}, 400),
    (f"{CHAT}/derender", {"generate_response": {"choices": []}}, 400),
    (f"{CHAT}/derender", {"generate_response": answer("", token_ids=[])}, 400),
    (f"{CHAT}/derender", {"generate_response": answer("", token_ids=[300])}, 400),
    (f"{CHAT}/derender", {"generate_response": {**answer("a"), "output_mode": "text"}}, 400),
    (f"{CHAT}/derender", {"model": "other"}, 404),
    ("/v1/completions/derender", {"generate_responses": []}, 400),
    ("/v1/completions/derender", {"prompt_tokens": [1, 2]}, 400),
    ("/v1/completions/derender", {"completion_request": {"prompt": ["a", "b"]}}, 400),
]


async def test_refusals(stack: Stack) -> None:
    for path, fields, status in REFUSED:
        body = {"generate_response": answer("a"), "generate_responses": [answer("a")], **fields}
        assert (await stack.post(path, **body)).status_code == status, fields


OUTSIDE = {"content": [{"token_id": 65, "logprob": -1.0, "top_logprobs": [{"token_id": 10**6, "logprob": -2.0}]}] * 3}


async def test_what_the_worker_knew_is_told(stack: Stack) -> None:
    told: Any = answer("hi")
    told["choices"][0] |= {"finish_reason": "stop", "stop_reason": "<end>"}
    told["prompt_logprobs"] = [None, {"65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}}]
    chat = (await stack.post(f"{CHAT}/derender", generate_response=told)).json()
    assert (chat["choices"][0]["stop_reason"], chat["prompt_logprobs"]) == ("<end>", told["prompt_logprobs"])
    (choice,) = (await stack.post("/v1/completions/derender", generate_responses=[told])).json()["choices"]
    assert (choice["stop_reason"], choice["prompt_logprobs"]) == ("<end>", told["prompt_logprobs"])
    told["choices"][0]["logprobs"] = OUTSIDE
    refused = await stack.post(f"{CHAT}/derender", generate_response=told)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "generate_response.choices[0].logprobs")


async def test_other_apis_are_rendered_as_chats_are(stack: Stack) -> None:
    chat = (await stack.post(f"{CHAT}/render", messages=HELLO, max_tokens=9, seed=5)).json()
    for path, body in (
        ("/v1/messages/render", {"messages": HELLO, "max_tokens": 9, "seed": 5}),
        ("/v1/responses/render", {"input": "hello", "max_output_tokens": 9, "seed": 5}),
    ):
        rendered = (await stack.post(path, model="toy", **body)).json()
        assert rendered["token_ids"] == chat["token_ids"]
        assert rendered["sampling_params"]["max_tokens"] == 9
        answer = await stack.post(GENERATE, **rendered)
        assert len(answer.json()["choices"][0]["token_ids"]) == 9
    assert (await stack.post("/v1/messages/render", messages=HELLO)).json()["type"] == "error"


SCORE = {"token_id": 65, "logprob": -1.0, "rank": 1}


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_logprobs_that_are_too_few_or_too_many_are_refused(stack: Stack, count: int) -> None:
    own = answer("A", logprobs={"content": [SCORE] * count})
    for path, body in (
        (CHAT, {"generate_response": own}),
        ("/v1/completions", {"generate_responses": [own]}),
        (CHAT, {"stream": True, "generate_chunk": own}),
    ):
        refused = await stack.post(f"{path}/derender", **body)
        assert refused.status_code == 400, refused.text
        assert "one entry for each of token_ids: 2" in refused.json()["error"]["message"]


async def test_all_choices_have_logprobs_or_none(stack: Stack) -> None:
    scored, plain = answer("A", logprobs={"content": [SCORE] * 2}), answer("A")
    mixed = {**scored, "choices": [*scored["choices"], *plain["choices"]]}
    for path, body in (
        (CHAT, {"generate_response": mixed}),
        ("/v1/completions", {"generate_responses": [scored, plain]}),
    ):
        refused = await stack.post(f"{path}/derender", **body)
        assert refused.status_code == 400
        assert "or none" in refused.json()["error"]["message"]


async def test_no_list_of_tokens_is_longer_than_a_context(stack: Stack) -> None:
    longest = (await stack.http.get("/v1/models")).json()["data"][0]["max_model_len"]
    long = {"index": 0, "token_ids": [65] * (longest + 1)}
    state = {"output_token_ids": [65] * (longest + 1), "output_chunk_lens": [longest + 1]}
    event = {"choices": [{"index": 0, "token_ids": [65]}]}
    for path, body in (
        (CHAT, {"generate_response": {"choices": [long]}}),
        (CHAT, {"generate_response": answer("A"), "prompt_token_ids": long["token_ids"]}),
        (CHAT, {"stream": True, "generate_chunk": event, "stream_state": state}),
        ("/v1/completions", {"generate_responses": [{"choices": [long]}]}),
        ("/v1/completions", {"generate_responses": [answer("A")], "prompt_token_ids": [long["token_ids"]]}),
    ):
        refused = await stack.post(f"{path}/derender", **body)
        assert refused.status_code == 400, refused.text
        assert f"the longest context has {longest}" in refused.json()["error"]["message"]
