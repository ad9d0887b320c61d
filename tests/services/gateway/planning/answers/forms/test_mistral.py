"""Mistral's calls: lists and named calls, and ids that its templates accept."""

from __future__ import annotations

import re

import pytest

from paceline.services.gateway.planning.answers.answer import Call, Content, calls_of
from paceline.services.gateway.planning.answers.forms.mistral import Mistral
from tests.services.gateway.planning.answers.pieces import parse


@pytest.mark.parametrize(
    ("text", "call_id"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "a1b2c3d4e"}]', "id"),
        ('[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "f"}]', "id"),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "id"),
        ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "a1b2c3d4e"),
        ('[TOOL_CALLS]f{"a": 1}', "id"),
    ],
)
def test_calls_are_read_as_all_versions_write_them(text: str, call_id: str) -> None:
    assert calls_of(parse([*text], Mistral())) == [Call(call_id, "f", '{"a": 1}')]


def test_its_templates_accept_new_ids() -> None:
    assert re.fullmatch("[A-Za-z0-9]{9}", Mistral().new_call_id())


@pytest.mark.parametrize("text", ["[TOOL_CALLS]f and so on", '[TOOL_CALLS]{"a": 1}', "[TOOL_CALLS]f[ARGS]1"])
def test_what_is_no_call_is_content(text: str) -> None:
    parts = parse([*text], Mistral())
    assert parts == [Content(text.replace("[TOOL_CALLS]", "").replace("[ARGS]", ""))]
