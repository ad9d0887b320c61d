"""Translation of constraints into grammars of the library llguidance, with limits on the time of checks and masks.

A gateway accepts a constraint with the same code with which workers compile it. The library needs no tokenizer to check
a grammar, compiles one within milliseconds, and computes a mask within about ten microseconds.
"""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.types import ConstraintKind

MAX_TEXT_BYTES = 128 << 10
"""Largest size of a constraint's text. The slowest schema of this size, with 4,000 properties, compiles in 2 s."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    max_items_in_row=20_000,
    step_max_items=100_000,
    verbose_errors=False,
)
"""Limits on the library's work. The fuel limits end work that would take longer than some tenths of a second.

`max_lexer_states` states of one lexer take about 13 MB; typical constraints need a few hundred. `max_items_in_row` is
enough for a choice of thousands of texts, or for as many properties.
"""

MAX_MULTIPLE = 10_000
"""Largest `multipleOf` in a schema. The library makes a state for every remainder; a large prime takes minutes."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""An option against an endless loop. By default the library follows a grammar while only one token is possible. In
`start: /a+/ /a+/` this never ends, because the first part takes every "a" that the second one needs. Constraints of
other kinds cannot cause it."""

_SPACING_OPTIONS = {"whitespace_flexible", "whitespace_pattern"}
"""Options of the library for a schema that switch off no check."""

_LENIENT = json.JSONDecoder(parse_int=float)
"""A decoder that accepts all JSON that the library accepts. Python's own refuses integers of thousands of digits."""

_MESSAGE_CHARACTERS = 500


def grammar_of(kind: ConstraintKind, text: str) -> str:
    """Return a constraint as a grammar of the library. Raises ConstraintError if the text is not of this kind."""
    try:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise ConstraintError(f"it is longer than {MAX_TEXT_BYTES >> 10} KiB; shorten it")
        if kind is ConstraintKind.JSON_SCHEMA:
            _check_multiples(json.loads(text))  # must be valid JSON: the library pastes it into a larger document
        if kind is ConstraintKind.GRAMMAR:
            grammar = grammar_from("gbnf", text) if "::=" in text else text
            _check_embedded_schemas(grammar)
            return grammar + _NO_FORCING
        if kind is ConstraintKind.ANSWER:
            return text + _NO_FORCING
        if kind is ConstraintKind.REGEX:
            # \d and \w mean ASCII, as in a schema's `pattern`. Users rarely mean digits and letters of all scripts, and
            # Python and the library have different lists of them.
            return f"start: /{regex_to_lark(text, use_ascii='dw')}/"
        return grammar_from(kind.value, text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(explain(str(error))[:_MESSAGE_CHARACTERS]) from error


def expression_of(kind: ConstraintKind, text: str) -> str:
    """Return a constraint that has been checked as an expression within a Lark grammar."""
    if kind is ConstraintKind.JSON_SCHEMA:
        return f"%json {text}"
    if kind is ConstraintKind.REGEX:
        return f"/{regex_to_lark(text, use_ascii='dw')}/"
    if kind is ConstraintKind.CHOICE:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    grammar = grammar_from("gbnf", text) if kind is ConstraintKind.GRAMMAR and "::=" in text else text
    return f"%lark {{\n{grammar}\n}}\n"


def check_options(schema: object) -> None:
    """Raise ConstraintError if a schema sets options of the library itself, which could switch off its checks."""
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ConstraintError("x-guidance is not supported; leave it out")


def _check_embedded_schemas(grammar: str) -> None:
    """Check the schemas after %json in a Lark grammar. Raises ConstraintError.

    They may say where white space is allowed, because the gateway writes such grammars when it renders requests.
    """
    for start in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = _LENIENT.raw_decode(grammar, start.end())
        except ValueError:
            continue  # the library reports the mistake, unless this %json is in a string or a comment
        if not _sets_only_spacing(schema):
            check_options(schema)
        _check_multiples(schema)


def _sets_only_spacing(schema: object) -> bool:
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.keys() <= _SPACING_OPTIONS


def _check_multiples(schema: object) -> None:
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in values:
        _check_multiples(value)
    multiple = schema.get("multipleOf") if isinstance(schema, dict) else None
    if isinstance(multiple, (int, float)) and multiple > MAX_MULTIPLE:
        raise ConstraintError(f"multipleOf {multiple} takes too long to enforce; it can be at most {MAX_MULTIPLE}")


def check_grammar(kind: ConstraintKind, text: str) -> None:
    """Raise ConstraintError if no output can follow a constraint, or if the library cannot enforce it."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(kind, text), limits=LIMITS)
    if wrong:
        message = explain(messages[0], with_place=kind is ConstraintKind.GRAMMAR)
        raise ConstraintError(message[:_MESSAGE_CHARACTERS])
