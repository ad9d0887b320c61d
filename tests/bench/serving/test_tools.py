from __future__ import annotations

import json
import random

import pytest

from bench.serving.tools import Answer, Call, complaint, random_tools
from paceline.core.grammar import check_grammar
from paceline.core.types import ConstraintKind

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
GOOD = Call("find", '{"a": 1}', heads=1)


def test_random_tools_can_be_enforced_and_come_from_the_seed() -> None:
    sets = [random_tools(random.Random(seed)) for seed in range(100)]
    for tools in sets:
        for tool in tools:
            check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(tool["function"]["parameters"]))
    assert sets == [random_tools(random.Random(seed)) for seed in range(100)]
    assert len({json.dumps(tools) for tools in sets}) > 90


def test_a_call_is_joined_from_its_fragments() -> None:
    answer = Answer()
    head = {"index": 0, "id": "x", "type": "function", "function": {"name": "find", "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": text}} for text in ('{"a"', ": 1}")]
    for piece in (head, *pieces):
        answer.add({"choices": [{"delta": {"tool_calls": [piece]}, "finish_reason": None}]})
    answer.add({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    answer.add({"choices": [], "usage": {"completion_tokens": 9}})
    assert (answer.calls, answer.tokens) == ({0: GOOD}, 9)
    assert complaint(TOOLS, answer) == ""


@pytest.mark.parametrize(
    "answer",
    [
        Answer(),
        Answer({}, finish_reason="tool_calls"),
        Answer({0: GOOD}, finish_reason="stop"),
        Answer({0: GOOD}, content="x", finish_reason="tool_calls"),
        Answer({0: Call("look", '{"a": 1}', heads=1)}, finish_reason="length"),
        Answer({0: Call("find", '{"a": 1}', heads=2)}, finish_reason="tool_calls"),
        Answer({0: Call("find", '{"a": "1"}', heads=1)}, finish_reason="tool_calls"),
        Answer({0: Call("find", '{"a": 1', heads=1)}, finish_reason="tool_calls"),
        Answer({0: GOOD}, finish_reason="tool_calls", error="status 500"),
    ],
)
def test_every_way_to_be_wrong_is_a_complaint(answer: Answer) -> None:
    assert complaint(TOOLS, answer)


def test_what_is_cut_off_may_end_anywhere() -> None:
    assert complaint(TOOLS, Answer({0: Call("find", '{"a"', heads=1)}, finish_reason="length")) == ""
