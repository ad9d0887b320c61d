"""Keywords of JSON schemas in the calls of all forms: each is enforced, or the client is told."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jsonschema
import pytest

from paceline.core.errors import ConstraintError
from paceline.core.grammar import check_grammar, unenforced
from paceline.core.types import ConstraintKind
from paceline.services.gateway.planning.answers.answer import calls_of
from paceline.services.gateway.planning.answers.expressions import Spelling, ToolSpelling, schema
from paceline.services.gateway.planning.answers.form import ToolForm
from paceline.services.gateway.planning.answers.grammar import answer_grammar
from paceline.services.gateway.planning.answers.registry import TOOL_FORMS
from tests.fuzz.schemas import random_schema
from tests.services.gateway.planning.answers.pieces import parse
from tests.services.gateway.planning.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
WHOLE: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
FORMS = [TOOL_FORMS[name]() for name in ("hermes", "pythonic", "functiongemma", "gemma4", "qwen3_coder")]
"""A form of each notation. The arguments of all others are JSON, or Python's."""
_NAME = re.compile(r"[ -;=?-~]{0,64}")
CASES: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "anyOf beside properties": (
        {"properties": {"x": TEXT}, "anyOf": [{"required": ["x"]}, {"properties": {"y": WHOLE}, "required": ["y"]}]},
        [{"x": "a"}, {"y": 1}, {"x": "a", "y": 1}],
        [{}, {"y": "a"}],
    ),
    "oneOf beside type": ({"type": "string", "oneOf": [{"const": "a"}, {"const": "bc"}]}, ["a", "bc"], ["ab", 1]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "4"]),
    "not": ({"type": "string", "not": {"enum": ["a", "b"]}}, ["c", "ab"], ["a", "b"]),
    "if": (
        {
            "properties": {"k": {"enum": ["x", "y"]}, "n": NULL},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["n"]},
        },
        [{"k": "x", "n": None}, {"k": "y"}],
        [{"k": "x"}, {"k": "z"}],
    ),
    "additionalProperties": (
        {"properties": {"x": TEXT}, "additionalProperties": WHOLE},
        [{"x": "a", "y": 1}, {"y": 1, "z": 2}],
        [{"x": 1}, {"y": "a"}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": WHOLE, "^t_": TEXT}},
        [{"n_a": 1, "t_b": "x"}, {}],
        [{"n_a": "1 a"}, {"t_b": 1}, {"other": 1}],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]{2}$"}, "additionalProperties": WHOLE},
        [{"ab": 1}],
        [{"ad": 1}, {"a": 1}],
    ),
    "propertyNames with enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": WHOLE},
        [{"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "minProperties": ({"properties": {"a": WHOLE, "b": WHOLE}, "minProperties": 1}, [{"b": 1}], [{}]),
    "maxProperties": (
        {"properties": {"a": WHOLE, "b": WHOLE}, "maxProperties": 1},
        [{}, {"a": 1}],
        [{"a": 1, "b": 2}],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 1},
        [["a"], ["a", 1]],
        [[], [1], ["a", 1, 2]],
    ),
    "contains": ({"type": "array", "contains": {"const": 7}}, [[7], [1, 7], [7, "x"]], [[], [1]]),
    "uniqueItems": ({"type": "array", "items": WHOLE, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    "dependentRequired": (
        {"properties": {"a": WHOLE, "b": WHOLE}, "dependentRequired": {"a": ["b"]}},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, [0, 15], [7]),
    "multipleOf or text": ({"type": ["integer", "string"], "multipleOf": 5}, [15, "x"], [7]),
    "bounds or text": ({"type": ["number", "string"], "minimum": 5}, [5, 7.5, "x"], [4]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29"]),
    "unknown format": ({"type": "string", "format": "phone"}, ["1"], []),
    "pattern": ({"type": "string", "pattern": r"^[A-Z]\d+$"}, ["A1"], ["a1", "A1x"]),
    "pattern without anchors": ({"type": "string", "pattern": "é|b"}, ["xéy", "b"], ["xy"]),
    "pattern with a reference": ({"type": "string", "pattern": r"(a)\1"}, ["aa"], ["ab"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["äb", "abc", "\n\t"], ["a", "abcd"]),
    "long lengths": ({"type": "string", "maxLength": 3000}, ["a" * 60], []),
    "enum of all types": (
        {"enum": ["x", 3, None, True, 1.5, [1, "a"], {"k": None}]},
        ["x", 3, None, True, 1.5, [1, "a"], {"k": None}],
        ["y", 4, False, [1], {"k": 1}],
    ),
    "const": ({"const": {"k": ["a", {}]}}, [{"k": ["a", {}]}], [{"k": ["a"]}]),
    "nullable": ({"type": "string", "nullable": True}, ["a", None], [1]),
    "a union of objects": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "x": WHOLE}, "required": ["kind", "x"]},
                {"properties": {"kind": {"const": "b"}, "y": NULL}, "required": ["kind", "y"]},
            ],
            "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "a", "x": 1}, {"kind": "b", "y": None}],
        [{"kind": "a", "y": None}, {"kind": "c"}],
    ),
    "a reference to itself": (
        {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/own"}, NULL]}}, "required": ["next"]},
        [{"next": None}, {"next": {"next": None}}],
        [{}, {"next": 1}],
    ),
    "objects without other properties": ({"properties": {"a": WHOLE}}, [{"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    "any": ({}, ["x", 1, None, [1, {"a": "b"}], {"a": [True]}], []),
}
"""Schemas, values that fit, and values that do not."""


@pytest.fixture(scope="module", params=["tokens", "texts"])
def vocabularies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    """Tokenizers, by names of forms, whose markers are tokens of their own or not."""
    folder = tmp_path_factory.mktemp("toy")
    return {
        form.name: Vocabulary(write_toy_model(folder / form.name), form.markers if request.param == "tokens" else ())
        for form in FORMS
    }


def grammar_for(form: ToolForm, vocabulary: Vocabulary, parameters: Schema) -> str:
    """Return the grammar of answers that call "find" once."""
    return answer_grammar(
        vocabulary.spelling,
        thought=None,
        is_open=False,
        budget=None,
        form=form,
        tools=[ToolSpelling("find", parameters)],
        choice="required",
        parallel=False,
        content=None,
    )


def left(form: ToolForm, vocabulary: Vocabulary, parameters: Schema) -> set[str]:
    """Return the keywords that are not enforced."""
    text = schema(ToolSpelling("find", parameters), form.notation(vocabulary.spelling)).removeprefix("%json ")
    return {each.keyword for each in unenforced(ConstraintKind.JSON_SCHEMA, text)}


def read(form: ToolForm, text: str, parameters: Schema) -> Any:
    """Return the arguments that the form reads."""
    (call,) = calls_of(parse([text], form, tools=[ToolSpelling("find", parameters)]))
    return json.loads(call.arguments)


def places(case: Schema, is_object: bool) -> Iterator[tuple[Schema, Callable[[Any], Any]]]:
    """Yield schemas of arguments that have a schema somewhere, and what makes arguments of a value there."""
    own = {"type": "object", "$defs": {"own": case}}
    yield {**own, "properties": {"a": case}, "required": ["a"]}, lambda value: {"a": value}
    yield {**own, "properties": {"a": {"type": "array", "items": case}}}, lambda value: {"a": [value]}
    yield {**own, "properties": {"z": NULL}, "additionalProperties": case}, lambda value: {"z": None, "a": value}
    if is_object:
        yield {**own, **case}, lambda value: value


def test_each_notation_has_a_form_here() -> None:
    assert {json.dumps(form().notation(Spelling({}))) for form in TOOL_FORMS.values()} == {
        json.dumps(form.notation(Spelling({}))) for form in FORMS
    }


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_is_enforced_or_named(name: str, vocabularies: dict[str, Vocabulary]) -> None:
    case, right, wrong = CASES[name]
    is_object = all(isinstance(each, dict) for each in right) and "const" not in case
    for form in FORMS:
        vocabulary = vocabularies[form.name]
        for parameters, around in places(case, is_object):
            grammar = grammar_for(form, vocabulary, parameters)
            told = left(form, vocabulary, parameters)
            for value in (*right, *wrong):
                arguments = around(value)
                text = form.write_all([("find", json.dumps(arguments, ensure_ascii=False))])
                if value in right:
                    assert vocabulary.allows(grammar, text), (form.name, parameters, text)
                    assert read(form, text, parameters) == arguments, (form.name, parameters, text)
                elif not told and read(form, text, parameters) == arguments:  # a text may be read as a number
                    assert not vocabulary.allows(grammar, text), (form.name, parameters, text)


@pytest.mark.parametrize("number", range(24))
def test_all_forms_allow_the_same_arguments(number: int, vocabularies: dict[str, Vocabulary]) -> None:
    random = Random(number)
    parameters = {**random_schema(random), "type": "object"}
    hermes, json_calls = vocabularies["hermes"], FORMS[0]
    if (grammar := possible(json_calls, hermes, parameters)) is None:
        return  # nothing fits it
    texts = [hermes.random_answer(grammar, random) for _ in range(4)]
    values = [read(json_calls, text, parameters) for text in texts if text is not None]
    for form in FORMS:
        vocabulary = vocabularies[form.name]
        if (grammar := possible(form, vocabulary, parameters)) is None:
            assert form.name == "qwen3_coder"  # a name or a text has no spelling in its tags
            continue
        for value in values:
            text = form.write_all([("find", json.dumps(value, ensure_ascii=False))])
            # A form may have no spelling for a text, such as one that looks like a number.
            if is_plain(value) and read(form, text, parameters) == value:
                assert vocabulary.allows(grammar, text), (form.name, parameters, text)
        told = left(form, vocabulary, parameters)
        for answer in filter(None, [vocabulary.random_answer(grammar, random) for _ in range(2)]):
            if not told:
                with contextlib.suppress(RecursionError):  # the validator's own
                    jsonschema.Draft202012Validator(parameters).validate(read(form, answer, parameters))


def possible(form: ToolForm, vocabulary: Vocabulary, parameters: Schema) -> str | None:
    """Return the grammar of a call; None if no arguments fit."""
    grammar = grammar_for(form, vocabulary, parameters)
    try:
        check_grammar(ConstraintKind.ANSWER, grammar)
    except ConstraintError:
        return None
    return grammar


def is_plain(value: Any) -> bool:
    """Return whether numbers are written alike in JSON and by Python, and all forms can write the names."""
    match value:
        case float():
            return "e" not in repr(value)
        case list():
            return all(map(is_plain, value))
        case dict():
            return all(_NAME.fullmatch(name) and is_plain(each) for name, each in value.items())
    return True
