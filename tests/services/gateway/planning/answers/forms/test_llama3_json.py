"""Llama's JSON calls: whole answers, and what may stand around them."""

from __future__ import annotations

import pytest

from paceline.services.gateway.planning.answers.answer import Content, calls_of
from paceline.services.gateway.planning.answers.expressions import ToolSpelling
from paceline.services.gateway.planning.answers.forms.llama3_json import Llama3Json
from tests.services.gateway.planning.answers.pieces import parse

CALL = '{"name": "f", "parameters": {"a": 1.0}}'


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (CALL, "", 1),
        (f"\n {CALL}", "", 1),
        (f"<|python_tag|>{CALL}", "", 1),
        (f"so: <|python_tag|>{CALL}", "so:", 1),
        (f"{CALL}; {CALL}", "", 2),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{CALL}; that is all", "that is all", 1),
        (CALL.replace("parameters", "arguments"), "", 1),
    ],
)
def test_calls_are_read_where_models_write_them(text: str, content: str, count: int) -> None:
    parts = parse([*text], Llama3Json())
    assert "".join(part.text for part in parts if isinstance(part, Content)) == content
    assert [(call.name, call.arguments) for call in calls_of(parts)] == [("f", '{"a": 1.0}')] * count


@pytest.mark.parametrize("text", ['{"title": "a"}', '{"names": []}', f"so: {CALL}", '["name"]', '{"na'])
def test_other_json_is_content(text: str) -> None:
    assert parse([*text], Llama3Json()) == [Content(text)]


def test_json_with_another_name_is_content() -> None:
    text = '{"name": "Ada", "age": 36}'
    assert parse([*text], Llama3Json(), tools=[ToolSpelling("f", {})]) == [Content(text)]


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_half_a_call_without_a_name_is_content(is_cut_off: bool) -> None:
    for text in ('{"na', '{"name"', '{"name": ', '{"name": "Ad'):
        assert parse([*text], Llama3Json(), is_cut_off=is_cut_off) == [Content(text)]
        assert not parse([*f"<|python_tag|>{text}"], Llama3Json(), is_cut_off=True)
    (call,) = calls_of(parse([*'{"name": "f", "par'], Llama3Json(), is_cut_off=is_cut_off))
    assert (call.name, call.arguments) == ("f", "")


def test_a_call_of_a_built_in_tool_is_content_without_its_marker() -> None:
    assert parse([*'<|python_tag|>search.call(query="x")'], Llama3Json()) == [Content('search.call(query="x")')]
