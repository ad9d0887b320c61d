"""Error messages for users: they quote the mistake and say how to mend it."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConstraintError
from paceline.core.grammar import check_grammar
from paceline.core.grammar_errors import NO_TOKEN, explain
from paceline.core.types import ConstraintKind

JSON_SCHEMA, REGEX, CHOICE, GRAMMAR, _ = ConstraintKind


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (JSON_SCHEMA, '{"not": {}}', "no JSON fits the schema: a schema is false"),
        (JSON_SCHEMA, '{"items": {"required": 3}}', 'items.required: "required" must be a list of names'),
        (JSON_SCHEMA, '{"type": "str"}', 'type: "type" cannot be "str"; JSON has string, number,'),
        (JSON_SCHEMA, '{"$ref": "http://a.b/c"}', '"$ref" leads to http://a.b/c, and nothing is fetched; put'),
        (JSON_SCHEMA, '{"$ref": "#/$defs/x"}', '"$ref" leads to #/$defs/x, which the schema does not have'),
        (JSON_SCHEMA, '{"oneOf": {}}', 'oneOf: "oneOf" must be a list of schemas'),
        (JSON_SCHEMA, '{"enum": []}', "no JSON fits the schema"),
        (
            JSON_SCHEMA,
            '{"type": "string", "pattern": "("}',
            "pattern: a regular expression cannot be read: unclosed group",
        ),
        (REGEX, "(", "a regular expression cannot be read: unclosed group; it is read in Rust's syntax"),
        (REGEX, r"\bfoo\b", r"the regular expression \bfoo\b has ^, $ or \b inside; leave it out"),
        (GRAMMAR, 'other: "a"', 'the grammar has no rule named "start"; add one, as in start: "yes" | "no"'),
        (GRAMMAR, "start: a\na: fuel", 'line 2, column 4: it uses "fuel", which no rule defines; add one'),
        (GRAMMAR, 'start: "a" b\nb: /(/', "line 2, column 4: a regular expression cannot be read: unclosed group"),
        (GRAMMAR, 'start: %json {"not": {}}', "no JSON fits the schema: a schema is false"),
        (GRAMMAR, 'root ::= ("a"', "it is not valid GBNF: Expected ')'"),
    ],
)
def test_what_a_check_finds(kind: ConstraintKind, text: str, said: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        check_grammar(kind, text)
    message = str(caught.value)
    assert message.startswith(said)
    assert "llguidance" not in message
    assert "\n" not in message


def test_what_is_found_on_the_way() -> None:
    for reason in ("NoExtensionBias", "NoExtension<non-verbose/>", NO_TOKEN):
        assert explain(reason).startswith("nothing may follow here, and the answer may not end either; change it")
    for reason in ("lexer error: too many expressions constructed", "Too many items (limit 20000)", "LexerTooComplex"):
        assert explain(reason).startswith("it is too large to be enforced; make it smaller")


def test_what_is_not_known_is_passed_on() -> None:
    assert explain("at 3(4): something new\n   3 | x: /a/\n          ^") == "line 3, column 4: something new"
    assert explain("at 3(4): something new", with_place=False) == "something new"
