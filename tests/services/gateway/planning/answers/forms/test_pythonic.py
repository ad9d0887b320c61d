"""Calls in Python's syntax, and their literals as JSON."""

from __future__ import annotations

import json

import pytest

from paceline.services.gateway.planning.answers.answer import CallArguments, Content, calls_of
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.forms.pythonic import Llama4Pythonic, Olmo3, Pythonic
from paceline.services.gateway.planning.answers.parser import AnswerParser, read_answer
from tests.services.gateway.planning.answers.pieces import parse


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        ("True", "true"),
        ("null", "null"),
        ("1.10", "1.10"),
        ("108.", "108.0"),
        ("-.5", "-0.5"),
        ("1_000", "1000"),
        ("1e400", "1e400"),
        ("metres", '"metres"'),
        ("'it\\'s \"so\"'", '"it\'s \\"so\\""'),
        (r'"\x41\u00e9\U0001F600\d\/"', r'"A\u00e9\ud83d\ude00\\d/"'),
        ("'a\tb\\\nc'", r'"a\tbc"'),
        ("(1, [None,], {})", "[1, [null], {}]"),
        ("{'a': {'b': False}, 1: 2, None: '},'}", '{"a": {"b": false}, "1": 2, "None": "},"}'),
    ],
)
def test_literals_become_json(literal: str, text: str) -> None:
    (call,) = calls_of(parse([*f"[f(a={literal})]"], Pythonic()))
    assert call.arguments == f'{{"a": {text}}}'
    json.loads(call.arguments)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Pythonic(), '[f(a=1, b="x"), g()]'),
        (Pythonic(), '\n[ f( a = 1,\n b="x" ) , g( ) ]'),
        (Llama4Pythonic(), '[f(a=1, b="x"), g()]'),
        (Llama4Pythonic(), '<|python_start|>[f(a=1, b="x"), g()]<|python_end|>'),
        (Olmo3(), '<function_calls>\nf(a=1, b="x")\ng()\n</function_calls>'),
        (Olmo3(), '<function_calls>[f(a=1, b="x"), g()]</function_calls>'),
    ],
)
def test_calls_are_read_with_what_stands_around_them(form: ToolForm, text: str) -> None:
    parts = parse([*text], form)
    assert [(call.name, call.arguments) for call in calls_of(parts)] == [("f", '{"a": 1, "b": "x"}'), ("g", "{}")]
    assert not any(isinstance(part, Content) for part in parts)


@pytest.mark.parametrize("text", ["[1, 2]", "[see](f)", "[f(x)]", "f(a=1)", "[f(1)] is a list", "[]"])
def test_other_text_in_brackets_is_content(text: str) -> None:
    assert parse([*text], Pythonic()) == [Content(text)]


def test_a_text_comes_before_its_end() -> None:
    parser = AnswerParser(lambda answer: read_answer(answer, None, Pythonic(), False))
    parser.push("[f(a='")
    assert parser.push("half") == [CallArguments(0, "half")]


def test_arguments_that_are_nested_too_deeply_are_left_out() -> None:
    assert Pythonic().write("f", '{"a": ' + "[" * 900 + "]" * 900 + "}") == "[f()]"
