"""Granite's lists of calls, after either of its markers."""

from __future__ import annotations

import pytest

from paceline.services.gateway.planning.answers.answer import Content, calls_of
from paceline.services.gateway.planning.answers.forms.granite import Granite
from tests.services.gateway.planning.answers.pieces import parse


@pytest.mark.parametrize("marker", ["<|tool_call|>", "<tool_call>", "<|tool_call|> "])
def test_a_list_after_either_marker_is_read(marker: str) -> None:
    text = f'so{marker}[{{"name": "f", "arguments": {{"a": 1}}}}, {{"name": "g", "arguments": {{}}}}]'
    parts = parse([*text], Granite())
    assert parts[0] == Content("so")
    assert [(call.name, call.arguments) for call in calls_of(parts)] == [("f", '{"a": 1}'), ("g", "{}")]
