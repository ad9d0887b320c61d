"""Content, reasoning and calls of an answer, however it is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.services.gateway.planning.answers.answer import (
    Answer,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    calls_of,
)
from paceline.services.gateway.planning.answers.form import ReasoningMarks
from paceline.services.gateway.planning.answers.forms.hermes import Hermes
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from paceline.services.gateway.planning.answers.reader import Steps
from tests.services.gateway.planning.answers.pieces import CALLS, TEXT, cut, parse

THINK = ReasoningMarks("<think>", "</think>")
MARKERS = (THINK.start, THINK.end, *Hermes.markers)
WORDS = st.sampled_from([*MARKERS, "<", "</", "tool_call>", "{", '"name"', ":", "x", " ", "\n", "[", "]"])
CALL = '<tool_call>{"name": "f", "arguments": {}}'
PARTS: list[Part] = [CallBegin(0, "id", "f"), CallArguments(0, "{}")]


def plain(text: str) -> str:
    return "".join(character for character in text if character not in "<>").strip()


@given(st.data(), TEXT.map(plain), TEXT.map(plain), CALLS)
def test_parts_come_in_order_without_their_markers(
    data: st.DataObject, thought: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    written = "\n".join(Hermes().write(name, json.dumps(arguments)) for name, arguments in calls)
    text = f"<think>\n{thought}\n</think>\n\n{content}\n{written}"
    parts = parse(data.draw(cut(text)), Hermes(), THINK)
    expected = [*([Reasoning(thought)] if thought else []), *([Content(content)] if content else [])]
    assert parts[: len(expected)] == expected
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(parts)] == calls
    assert all(isinstance(part, CallBegin | CallArguments) for part in parts[len(expected) :])


def _without_markers(text: str) -> str:
    return re.sub(rf"\s*({'|'.join(MARKERS)})\s*", "", text)


@given(st.data(), st.lists(WORDS))
def test_no_answer_leaks_a_marker_or_depends_on_its_cuts(data: st.DataObject, words: list[str]) -> None:
    text = "".join(words)
    parts = parse([text], Hermes(), THINK)
    assert parse(data.draw(cut(text)), Hermes(), THINK) == parts
    # A text such as "<</think>tool_call>" has a marker only without the one in its middle.
    assume(not any(marker in _without_markers(text) for marker in MARKERS))
    assert not any(marker in part.text for part in parts if isinstance(part, Content) for marker in MARKERS)


def test_an_answer_without_markers_is_content_as_it_is() -> None:
    assert parse([*"  a < b\n"], Hermes(), THINK) == [Content("  a < b\n")]


def test_an_answer_may_begin_within_reasoning() -> None:
    assert parse([*"so\n</think>\n42"], None, THINK, is_open=True) == [Reasoning("so"), Content("42")]
    assert parse([*"so"], None, THINK, is_open=True) == [Reasoning("so")]


@pytest.mark.parametrize(
    ("text", "by_itself", "cut_off"),
    [
        ("a <", [Content("a <")], [Content("a")]),
        ("<tool_call", [Content("<tool_call")], []),
        ("<think>abc</thi", [Reasoning("abc</thi")], [Reasoning("abc")]),
        ("<think>abc<tool_c", [Reasoning("abc<tool_c")], [Reasoning("abc")]),
        (f"{CALL}\n</tool_", PARTS, PARTS),
        (f"{CALL}</tool_call>\n<tool", PARTS, PARTS),
        (f"{CALL}</tool_call>so <", [*PARTS, Content("so <")], [*PARTS, Content("so")]),
    ],
)
def test_half_a_marker_is_text_only_where_the_model_has_ended_with_it(
    text: str, by_itself: list[Part], cut_off: list[Part]
) -> None:
    assert parse([*text], Hermes(), THINK) == by_itself
    assert [_stripped(part) for part in parse([*text], Hermes(), THINK, is_cut_off=True)] == cut_off


@pytest.mark.parametrize(
    ("text", "stop", "parts"),
    [
        ("a <", " so", [Content("a <")]),
        ("a <", "tool", [Content("a")]),
        ("a <tool", "_call> {", [Content("a")]),
        ("a <tool", "_box>", [Content("a <tool")]),
        ("a <<", "tool_", [Content("a <")]),
        ("<think>abc <", "so", [Reasoning("abc <")]),
        ("<think>abc <", "/", [Reasoning("abc")]),
    ],
)
def test_a_stop_string_may_show_that_no_marker_has_begun(text: str, stop: str, parts: list[Part]) -> None:
    read = parse([*text], Hermes(), THINK, is_cut_off=True, follows=stop)
    assert [_stripped(part) for part in read] == parts


def _stripped(part: Part) -> Part:
    return Content(part.text.rstrip()) if isinstance(part, Content) else part


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    parts = parse([*'<tool_call>\n{"name": "find", "arguments": {"text": "ra'], Hermes())
    assert parts == [CallBegin(0, "id", "find"), CallArguments(0, '{"text": "ra')]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"a": 1.0}, "name": "f"}', '{"a": 1.0}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('[{"name": "f", "arguments": {}}]', "{}"),
    ],
)
def test_forms_that_models_write_besides_the_documented_one(call: str, arguments: str) -> None:
    parts = parse([*f"<tool_call>{call}</tool_call>"], Hermes())
    assert parts == [CallBegin(0, "id", "f"), CallArguments(0, arguments)]


def test_what_is_no_call_is_content() -> None:
    for text in ("see above", '{"age": 1}'):
        assert parse([*f"<tool_call>{text}</tool_call>!"], Hermes()) == [Content(f"{text}!")]


def test_text_that_is_no_call_is_read_once_more_and_not_once_for_each_trigger_in_it() -> None:
    class Counted(Hermes):
        reads = 0

        def read(self, answer: Answer) -> Steps[None]:
            self.reads += 1
            yield from super().read(answer)

    form, count = Counted(), 50
    parts = parse([*('<tool_call>{"x":[' * count + "]}" * count + CALL)], form)
    assert form.reads == 2
    assert parts == [Content('{"x":[' * count + "]}" * count), *PARTS]


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (("<think>", "a", " b", "</", "c", "</", "think", ">", "d", "e"), 4),
        (("<th", "ink>a", "b", "c</think>", "d"), 2),
        (("<think>", "a", "</", "th", "</", "think", ">", "d"), 3),  # a budget ended within a marker
        (("<think>", "a", "", "", "🐉", "</think>"), 4),
        (("<think>", "a", "", "", "\ufffd</", "think>"), 3),  # a budget ended within a character
        (("<think>", "a", "</", "th"), 3),
        (("<think>", "</think>", "a"), 0),
        (("<think>", "a", "b", "<tool_call>", '{"name": "f"}'), 2),
        (("<think>", "\n", "\n", "</think>", "a"), 2),
    ],
)
def test_reasoning_tokens_are_those_between_the_markers(tokens: tuple[str, ...], count: int) -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, THINK, Hermes(), False))
    for token in tokens:
        parser.push(token)
    parser.finish()
    assert parser.reasoning_tokens == count


def test_the_name_of_a_call_comes_before_its_arguments_are_complete() -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, None, Hermes(), False), lambda: "id")
    assert parser.push('<tool_call>{"name": "f", ') == [CallBegin(0, "id", "f")]
    assert parser.push('"arguments": {"a": "b') == [CallArguments(0, '{"a": "b')]
