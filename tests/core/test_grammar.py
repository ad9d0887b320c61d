"""The check of grammars accepts those that can be enforced, refuses all others with a reason, and always ends."""

from __future__ import annotations

import json

import pytest

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import MAX_TEXT_BYTES, check_grammar, expression_of
from paceline.core.types import ConstraintKind

JSON_SCHEMA, REGEX, CHOICE, GRAMMAR, _ = ConstraintKind


def _with_properties(count: int, value: object, **fields: object) -> str:
    return json.dumps({"type": "object", "properties": {f"p{n}": value for n in range(count)}, **fields})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON_SCHEMA, "{}"),
        (JSON_SCHEMA, '{"type": "object"}'),
        (JSON_SCHEMA, '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
        (JSON_SCHEMA, _with_properties(2500, {"type": "integer"}, required=["p1200"])),
        (JSON_SCHEMA, _with_properties(600, {})),
        (JSON_SCHEMA, '{"type": "string", "format": "date-time", "maxLength": 100000}'),
        (REGEX, r"^\d{3}-\d{4}$"),
        (REGEX, ""),
        (REGEX, "(a*)*b|.*é"),
        (CHOICE, '["yes", "no", "", "quo\\"te", "ключ", "\\ud83d\\ude42"]'),
        (GRAMMAR, 'start: "a" rest*\nrest: /[b-d]/ // comment'),
        (GRAMMAR, 'start: %json {"type": "object"}'),
        (GRAMMAR, 'root ::= "a" | [0-9]+ root'),
        (GRAMMAR, 'start: start "a" | "b"'),
        (GRAMMAR, 'start[capture]: "a ::= b" | %json {"enum": ["c ::= d"]}'),
        (GRAMMAR, 'start: "a" "%json" /%lark/ # %json\n%ignore / +/'),
        (GRAMMAR, '# a comment\nroot ::= item-1+\n\nitem-1::= "a"'),
    ],
)
def test_what_can_be_enforced(kind: ConstraintKind, text: str) -> None:
    check_grammar(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (JSON_SCHEMA, "{", "Expecting"),
        (JSON_SCHEMA, '{}}, {"lark_grammar": "start: /a+/ /a+/"', "Extra data"),
        (JSON_SCHEMA, "7", "must be a JSON object"),
        (JSON_SCHEMA, '{"type": "nonsense"}', "nonsense"),
        (JSON_SCHEMA, '{"not": {}}', "no JSON fits"),
        (JSON_SCHEMA, '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "without an end"),
        (JSON_SCHEMA, '{"$ref": "http://example.com/schema"}', "example.com"),
        (JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than"),
        (JSON_SCHEMA, '{"type": "string", "pattern": "("}', "unclosed"),
        (JSON_SCHEMA, '{"a": ' * 2000 + "1" + "}" * 2000, "nested too deeply"),
        (REGEX, "(", "unclosed"),
        (REGEX, r"(a)\1", "backreferences"),
        (REGEX, "(?=a)b", "look-around"),
        (REGEX, "\ud800", "surrogates"),
        (CHOICE, "{", "Expecting"),
        (CHOICE, "[1]", "Expected"),
        (CHOICE, '["\ud800"]', "surrogates"),
        (GRAMMAR, "", "start"),
        (GRAMMAR, 'other ::= "a"', "root"),
        (GRAMMAR, 'other: "a"', "start"),
        (GRAMMAR, "start: missing", "missing"),
        (GRAMMAR, 'root ::= ("a"', "GBNF"),
        (GRAMMAR, "root ::= " + "(" * 30_000, "recursion"),
        (GRAMMAR, "start: r0\n" + "".join(f'r{n}: "a" r{n + 1}\n' for n in range(5000)) + 'r5000: "b"', "1500 rules"),
        (GRAMMAR, f'start: %json {{"x-guidance": {{"notation": ["gemma", "{"<" * 17}", ""]}}}}', "no such notation"),
        (GRAMMAR, 'start: %json {"x-guidance": {"notation": ["gemma", "<", ""]}}', "no such notation"),
        (GRAMMAR, 'start: %json {"type": "object", "x-\\u0067uidance": {"opened": true}}', "x-guidance"),
        (GRAMMAR, 'start: r*\nr: %json {"type": "integer"}\n%ignore / +/', "%ignore does not work beside %json"),
        (GRAMMAR, 'start: "a" r?\nr: %lark {\nstart: "b"\n%ignore / +/\n}', "%ignore does not work beside"),
        (JSON_SCHEMA, _with_properties(2001, {"type": "integer"}), "more than 2000 optional properties"),
        (JSON_SCHEMA, _with_properties(700, {}), "more than 666 with nested values"),
        (GRAMMAR, '{"grammars": [{"lark_grammar": "start: /a+/ /a+/"}]}', "trailing"),
    ],
)
def test_what_cannot_be_enforced(kind: ConstraintKind, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        check_grammar(kind, text)
    assert len(str(caught.value)) <= 500


@pytest.mark.parametrize(
    "schema",
    [
        ' {"type": "object", "x-guidance": {"item_separator": "1+"}}',
        '{"not": {}, "x-guidance": {"lenient": true}}',
        '{"not": {}, "x-guidance": {"lenient": true, "whitespace_flexible": false}}',
        '{"x-guidance": 5}',
        '\n\t{"not": {}, "x\\u002dguidance": {"lenient": true}}',
        ' {"x-guidance": {"lenient": true}, "maximum": ' + "9" * 5000 + "}",
    ],
)
def test_a_schema_inside_a_grammar_sets_no_options_of_the_library(schema: str) -> None:
    for grammar in (f"start: %json{schema}", f'start: "a" | b\nb: "x" %json{schema} "y"'):
        with pytest.raises(ConstraintError, match="x-guidance is not supported; leave it out"):
            check_grammar(GRAMMAR, grammar)


def test_a_schema_inside_a_grammar_may_say_where_white_space_is_allowed() -> None:
    check_grammar(GRAMMAR, 'start: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}')
    check_grammar(GRAMMAR, r'start: %json {"type": "object", "x-guidance": {"whitespace_pattern": "[ \n]"}}')


@pytest.mark.parametrize("character", ["\x7f", "\x00", "\n", '"', "\\", "/", "\u2028", "é", "😀"])
def test_a_choice_within_a_grammar_may_have_any_character(character: str) -> None:
    choices = json.dumps([f"a{character}b", "c"], ensure_ascii=False)
    check_grammar(CHOICE, choices)
    check_grammar(ConstraintKind.ANSWER, f"start: {expression_of(CHOICE, choices)}\n")


def test_a_schema_inside_a_grammar_has_the_same_limits() -> None:
    with pytest.raises(ConstraintError, match="multipleOf"):
        check_grammar(GRAMMAR, 'start: %json {"items": {"type": "integer", "multipleOf": 1000003}}')
    check_grammar(GRAMMAR, 'start: "%json {" %json {"properties": {"x-guidance": {"multipleOf": 3}}}')


def test_a_text_has_a_greatest_length() -> None:
    for kind, text in ((JSON_SCHEMA, json.dumps({"const": "é" * MAX_TEXT_BYTES})), (REGEX, "a" * (MAX_TEXT_BYTES + 1))):
        with pytest.raises(InvalidRequestError, match="128 KiB"):
            check_grammar(kind, text)
    check_grammar(REGEX, "a" * MAX_TEXT_BYTES)


def test_a_large_multiple_is_refused_wherever_it_stands() -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "multipleOf": 1_000_003}]}}}
    with pytest.raises(InvalidRequestError, match="multipleOf 1000003"):
        check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 10_000}))
