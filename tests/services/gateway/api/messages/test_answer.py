"""Whole messages and streams of the same parts."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api.choice import Delta, join_deltas
from paceline.services.gateway.api.messages.answer import MessageFormat, MessageWriter
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answers.answer import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    join_parts,
)

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 7,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
FORM = MessageFormat("msg_1", "toy", shows_thinking=True)

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
OBJECTS = st.dictionaries(TEXTS, st.integers() | TEXTS | st.lists(TEXTS, max_size=2), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Return the parts of an answer in small pieces."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=5)):
        if kind == "call":
            parts.append(CallBegin(calls, f"id{calls}", "f"))
            text = json.dumps(draw(OBJECTS), ensure_ascii=False)
            place = draw(st.integers(0, len(text)))
            parts += [CallArguments(calls, piece) for piece in (text[:place], text[place:]) if piece]
            calls += 1
        else:
            part = Content if kind == "content" else Reasoning
            parts += [part(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
    return parts


def deltas_of(parts: list[Part], places: list[int]) -> list[Delta]:
    """Return deltas that end at these places of the parts; the last one ends the answer."""
    ends = sorted({place % (len(parts) + 1) for place in places} | {0, len(parts)})
    deltas = [Delta(0, parts=join_parts(parts[start:end])) for start, end in itertools.pairwise(ends)]
    return [*deltas, Delta(0, finish_reason="stop")]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the data of events, after checking that each has its type as its name."""
    events = []
    for text in data.decode().split("\n\n")[:-1]:
        name, _, value = text.partition("\n")
        events.append(json.loads(value.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream's events make, after checking their order."""
    first, ping, *middle, last, stop = events
    assert [first["type"], ping["type"], last["type"], stop["type"]] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: dict[str, Any] | None = None
    for event in middle:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block = event["content_block"]
            open_block |= {"input": ""} if open_block["type"] == "tool_use" else {}
            message["content"].append(open_block)
            continue
        assert open_block is not None
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(open_block["input"] or "{}")
            open_block = None
            continue
        names = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
        name = names.get(event["delta"]["type"], "partial_json")
        open_block["input" if name == "partial_json" else name] += event["delta"][name]
    assert open_block is None
    return {**message, **last["delta"], "usage": last["usage"]}


def test_numbers_that_no_double_holds_are_the_largest_ones() -> None:
    call = [CallBegin(0, "id", "f"), CallArguments(0, '{"a": [1E899, 2], "b": {"c": -1e400}}')]
    (block,) = FORM.whole([Delta(0, parts=call, finish_reason="stop")], USAGE)["content"]
    assert block["input"] == {"a": [sys.float_info.max, 2], "b": {"c": -sys.float_info.max}}
    json.dumps(block, allow_nan=False)


@given(answers(), st.lists(st.integers(0, 30), max_size=6))
def test_a_stream_joins_to_the_whole_message(parts: list[Part], places: list[int]) -> None:
    writer = MessageWriter(FORM, lambda: USAGE)
    deltas = deltas_of(parts, places)
    written = b"".join(map(writer.write, deltas))
    streamed = joined(events_of(writer.begin() + written + writer.end()))
    assert streamed == FORM.whole([join_deltas(deltas)], USAGE)


def test_cached_tokens_are_counted_apart() -> None:
    assert FORM.whole([Delta(0, "x", finish_reason="stop")], USAGE)["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_an_error_within_a_stream() -> None:
    (event,) = events_of(MessageWriter(FORM, lambda: USAGE).error(ApiError(503, "no worker")))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no worker"},
        "request_id": "msg_1",
    }


def test_omitted_thinking_leaves_its_block() -> None:
    form = MessageFormat("msg_1", "toy", shows_thinking=False)
    delta = Delta(0, parts=[Reasoning("hm"), Content("x")], finish_reason="stop")
    writer = MessageWriter(form, lambda: USAGE)
    written = writer.write(delta)
    assert joined(events_of(writer.begin() + written + writer.end())) == form.whole([delta], USAGE)
    assert form.whole([delta], USAGE)["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "x"},
    ]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"finish_reason": "stop"}, "tool_use"),
        ({"finish_reason": "stop", "stop_reason": "x"}, "stop_sequence"),
        ({"finish_reason": "stop", "has_open_call": True}, "end_turn"),
        ({"finish_reason": "length"}, "max_tokens"),
        ({"finish_reason": "abort"}, "max_tokens"),
        ({"finish_reason": "repetition"}, "max_tokens"),
    ],
)
def test_only_a_whole_call_is_to_be_carried_out(end: dict[str, Any], expected: str) -> None:
    delta = Delta(0, parts=[CallBegin(0, "id", "f"), CallArguments(0, "{}")], **end)
    assert FORM.whole([delta], USAGE)["stop_reason"] == expected
