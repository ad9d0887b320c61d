"""Structural tags become grammars that accept exactly the texts that a tag describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import ConstraintError
from paceline.core.grammar import LIMITS, check_grammar, grammar_of
from paceline.core.types import ConstraintKind
from paceline.services.gateway.planning.answers import structural_tag
from paceline.services.gateway.planning.answers.expressions import Spelling
from paceline.services.gateway.planning.answers.structural_tag import Form, grammar_of_tag
from tests.services.gateway.toy_model import ASSISTANT, END, USER

OWN_TOKENS = {"<|user|>": USER, "<|assistant|>": ASSISTANT}
FORM: TypeAdapter[Form] = TypeAdapter(Form)
Json = dict[str, Any]

POINT: Json = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
ANY: Json = {"type": "any_text"}
X, Y = '<f=x>{"a":1}</f>', '<f=y>{"a":2}</f>'


def text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def tag(name: str, content: Json = POINT, end: str | list[str] = "</f>") -> Json:
    return {"type": "tag", "begin": f"<f={name}>", "content": content, "end": end}


TAGS = [tag("x"), tag("y")]
TRIGGERED: Json = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED: Json = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}
TOKEN_TAG = {"type": "tag", "begin": "<|user|>f", "content": POINT, "end": "<|assistant|>"}

FORMS: list[tuple[Json, list[str], list[str]]] = [
    (text("hi"), ["hi"], ["h", "hii"]),
    (ANY, ["", "hi\nx"], ["<|user|>"]),
    ({**ANY, "excludes": ["bad", "no"]}, ["", "ba d\nn o"], ["a bad x", "no"]),
    (tag("x"), [X], ['<f=x>{"a":"1"}</f>', "x" + X, X + "x", "<f=x></f>"]),
    (tag("x", ANY), ["<f=x>hi <b></f>", "<f=x></f>"], ["<f=x>hi", "<f=x>a</f>b"]),
    (tag("x", {**ANY, "excludes": ["zz"]}), ["<f=x>hi</f>"], ["<f=x>hzzi</f>"]),
    (tag("x", ANY, ["</a>", "</b>"]), ["<f=x>q</a>", "<f=x>q</b>"], ["<f=x>q</c>"]),
    ({"type": "sequence", "elements": [tag("t", ANY), ANY]}, ["<f=t>x</f>more", "<f=t></f>"], ["more"]),
    ({"type": "or", "elements": [POINT, text("none")]}, ['{"a": 3}', "none"], ["x", ""]),
    ({"type": "optional", "content": tag("x")}, ["", X], ["x", X + X]),
    ({"type": "plus", "content": tag("x")}, [X, X + X], ["", "x"]),
    ({"type": "star", "content": tag("x")}, ["", X, X + X], ["x"]),
    (TRIGGERED, ["", "hi", f"a {X} b", Y + X, "a < f=x"], ["a <f=z>", 'a <f=x>{"b":1}</f>', "<f="]),
    ({**TRIGGERED, "at_least_one": True}, [X + " b", f"{Y} k{X}"], ["", "a", f"a {X} b"]),
    ({**TRIGGERED, "stop_after_first": True}, ["", "hi", "b" + X], ["a <f=z>", f"a {X}b"]),
    ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, [X, Y], ["", "a" + X, X + X]),
    ({**TRIGGERED, "excludes": ["bad"]}, ["", "b" + X], ["bad", "a bad " + X, X + " bad"]),
    (
        tag("out", TRIGGERED, "<end>"),
        ["<f=out><end>", "<f=out>q<end>", f"<f=out>q{X}z<end>"],
        ["<f=out>", '<f=out>q<f=x>{"b":1}</f>z<end>', "<f=out>q<end>x"],
    ),
    (SEPARATED, ["", X, f"{X},{Y}"], [X + ",", "a", X + Y]),
    ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, [X], ["", f"{X},{Y}"]),
    (
        {"type": "triggered_tags", "triggers": ["<|user|>"], "tags": [TOKEN_TAG]},
        ["", 'x<|user|>f{"a":1}<|assistant|>y'],
        ["<|user|>x", "<|assistant|>", '<|user|>f{"a":1}'],
    ),
    (
        {"type": "tag", "begin": "<|user|>", "content": ANY, "end": "<|assistant|>"},
        ["<|user|>abc<|assistant|>"],
        ["<|user|>abc", "<|user|><|user|><|assistant|>"],
    ),
    ({"type": "regex", "pattern": "[ab]+"}, ["ab"], ["c", ""]),
    ({"type": "grammar", "grammar": 'root ::= "x" "y"?'}, ["x", "xy"], ["y"]),
]


@pytest.fixture(scope="module")
def tokenizer(toy_model: Path) -> LLTokenizer:
    return LLTokenizer(str(toy_model / "tokenizer.json"), eos_token=END)


def written(form: Json) -> str:
    grammar = grammar_of_tag(FORM.validate_python(form), Spelling(OWN_TOKENS), {"whitespace_pattern": " ?"})
    check_grammar(ConstraintKind.ANSWER, grammar)
    return grammar_of(ConstraintKind.ANSWER, grammar)


@pytest.mark.parametrize(("form", "fitting", "others"), FORMS)
def test_what_fits_a_form(form: Json, fitting: list[str], others: list[str], tokenizer: LLTokenizer) -> None:
    start = LLMatcher(tokenizer, written(form), log_level=0, limits=LIMITS)
    assert not start.is_error(), start.get_error()
    for answer in (*fitting, *others):
        matcher = start.deep_copy()
        fits = matcher.consume_tokens(_tokens(answer)) and matcher.is_accepting()
        assert (answer, fits) == (answer, answer in fitting)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({**TRIGGERED, "triggers": ["<g="]}, "no trigger is the beginning of the tag '<f=x>'"),
        ({"type": "sequence", "elements": [ANY, text("x")]}, "only be the last element"),
        ({"type": "star", "content": ANY}, "the content of star"),
        (tag("x", ANY, "a<|user|>"), "must begin with it"),
        ({"type": "json_schema", "json_schema": False}, "allows nothing"),
        ({"type": "json_schema", "json_schema": {"type": "nonsense"}}, "nonsense"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {}}}, "x-guidance"),
        ({"type": "regex", "pattern": "("}, "unclosed"),
    ],
)
def test_what_cannot_be_enforced_is_refused(form: Json, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        written(form)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "any_tokens"},
        {**ANY, "max_tokens": 5},
        {**POINT, "style": "qwen_xml"},
        {**SEPARATED, "tags": []},
        {**TRIGGERED, "triggers": [""]},
    ],
)
def test_what_is_not_known_is_never_dropped(form: Json) -> None:
    with pytest.raises(ValidationError):
        FORM.validate_python(form)


def _tokens(answer: str) -> list[int]:
    for own, token_id in OWN_TOKENS.items():
        before, found, after = answer.partition(own)
        if found:
            return [*_tokens(before), token_id, *_tokens(after)]
    return list(answer.encode())


def nested(depth: int) -> Json:
    content = nested(depth - 1) if depth else POINT
    tags = [{"type": "tag", "begin": "a", "content": content, "end": "b"}]
    return {"type": "triggered_tags", "triggers": ["a"], "at_least_one": True, "tags": tags}


@pytest.mark.parametrize(
    "form",
    [
        nested(14),  # which doubles with each level
        {**TRIGGERED, "triggers": ["<f="] * 300, "tags": TAGS * 150},
        tag("x", {"type": "or", "elements": [text("a")] * 700}, [f"{number}" for number in range(700)]),
    ],
    ids=["nested", "triggers", "ends"],
)
def test_small_requests_cannot_need_huge_grammars(form: Json) -> None:
    with pytest.raises(ConstraintError, match="a grammar of more than 128 KiB; send fewer"):
        grammar_of_tag(FORM.validate_python(form), Spelling(OWN_TOKENS), {})


def test_equal_parts_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(structural_tag, "check_grammar", lambda *own: checked.append(own))
    grammar_of_tag(FORM.validate_python(nested(5)), Spelling(OWN_TOKENS), {})
    assert len(checked) == 1
