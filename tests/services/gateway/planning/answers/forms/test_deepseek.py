"""DeepSeek's calls in both of its forms."""

from __future__ import annotations

import pytest

from paceline.services.gateway.planning.answers.answer import Content, calls_of
from paceline.services.gateway.planning.answers.forms.deepseek import DeepSeek, DeepSeekV3, DeepSeekV31
from tests.services.gateway.planning.answers.pieces import parse

CALLS = [("f", '{"a": "```"}'), ("g", "{}")]


@pytest.mark.parametrize("writer", [DeepSeekV3(), DeepSeekV31()])
def test_one_parser_reads_both_forms(writer: DeepSeek) -> None:
    parts = parse([*f"so{writer.write_all(CALLS)}"], DeepSeek())
    assert parts[0] == Content("so")
    assert [(call.name, call.arguments) for call in calls_of(parts)] == CALLS


def test_a_name_without_arguments_is_content_without_the_markers() -> None:
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>none<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert parse([*text], DeepSeek()) == [Content("fnone")]
