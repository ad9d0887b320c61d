"""Constraints in the words of the grammar library, under limits that make every check and every mask end.

What a gateway accepts here is what its workers compile. The library, llguidance, needs no tokenizer to check a
grammar, compiles one within milliseconds, and works out a mask within some ten microseconds.
"""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.types import ConstraintKind

MAX_TEXT_BYTES = 128 << 10
"""Of a constraint's text. The slowest of this size, an object of four thousand properties, compiles in two seconds."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    max_items_in_row=20_000,
    step_max_items=100_000,
    verbose_errors=False,
)
"""Fuel ends what would take longer than some tenths of a second. So many states of one lexer take some 13 MB; what
people write needs a few hundred. So many items of a row are those of a choice of thousands, or of as many properties.
"""

MAX_MULTIPLE = 10_000
"""Of `multipleOf` in a schema. The library makes a state of every remainder, and minutes of a large prime."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The library follows a grammar as long as there is only one way to go on. In one like `start: /a+/ /a+/`, whose first
part eats what the second needs, that is for ever. The other kinds of constraints cannot say such a thing."""

_LENIENT = json.JSONDecoder(parse_int=float)
"""Reads whatever the library reads: Python refuses integers of thousands of digits."""

_MESSAGE_CHARACTERS = 500


def grammar_of(kind: ConstraintKind, text: str) -> str:
    """The library's form of a constraint. Raises ConstraintError where the text is none of its kind."""
    try:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise ConstraintError(f"it is longer than {MAX_TEXT_BYTES >> 10} KiB; shorten it")
        if kind is ConstraintKind.JSON_SCHEMA:
            _check_multiples(json.loads(text))  # the library pastes it into a document of its own
        if kind is ConstraintKind.GRAMMAR:
            grammar = grammar_from("gbnf", text) if "::=" in text else text
            _check_embedded_schemas(grammar)
            return grammar + _NO_FORCING
        if kind is ConstraintKind.REGEX:
            # As in a schema's `pattern`. Words and digits of all scripts are not what people mean, and Python and the
            # library do not agree on which there are.
            return f"start: /{regex_to_lark(text, use_ascii='dw')}/"
        return grammar_from(kind.value, text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(explain(str(error))[:_MESSAGE_CHARACTERS]) from error


def check_options(schema: object) -> None:
    """Raises ConstraintError where a schema sets the library's own options: they would lift what keeps it safe."""
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ConstraintError("x-guidance is not supported; leave it out")


def _check_embedded_schemas(grammar: str) -> None:
    """What holds for a schema holds for one in a Lark grammar's %json, too."""
    for start in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = _LENIENT.raw_decode(grammar, start.end())
        except ValueError:
            continue  # the library says so, unless this stands in a text or a comment
        check_options(schema)
        _check_multiples(schema)


def _check_multiples(schema: object) -> None:
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for value in values:
        _check_multiples(value)
    multiple = schema.get("multipleOf") if isinstance(schema, dict) else None
    if isinstance(multiple, (int, float)) and multiple > MAX_MULTIPLE:
        raise ConstraintError(f"multipleOf {multiple} takes too long to enforce; at most {MAX_MULTIPLE} can be")


def check_grammar(kind: ConstraintKind, text: str) -> None:
    """Raises ConstraintError, which says why, for what no output can follow or the library cannot enforce."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(kind, text), limits=LIMITS)
    if wrong:
        message = explain(messages[0], with_place=kind is ConstraintKind.GRAMMAR)
        raise ConstraintError(message[:_MESSAGE_CHARACTERS])
