"""Constraints in the words of the grammar library, under limits that make every check and every mask end.

What a gateway accepts here is what its workers compile. The library, llguidance, needs no tokenizer to check a
grammar, compiles one within milliseconds, and works out a mask within some ten microseconds.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits, grammar_from, regex_to_lark

from paceline.core.errors import InvalidRequestError
from paceline.core.types import ConstraintKind

MAX_TEXT_BYTES = 128 << 10
"""Of a constraint's text. The slowest of this size, an object of four thousand properties, compiles in two seconds."""

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""So many states of one lexer take some 13 MB; what people write needs a few hundred."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The library follows a grammar as long as there is only one way to go on. In one like `start: /a+/ /a+/`, whose first
part eats what the second needs, that is for ever. The other kinds of constraints cannot say such a thing."""

_MESSAGE_CHARACTERS = 500


def grammar_of(kind: ConstraintKind, text: str) -> str:
    """The library's form of a constraint. Raises InvalidRequestError where the text is none of its kind."""
    try:
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidRequestError(f"it is longer than {MAX_TEXT_BYTES >> 10} KiB; shorten it")
        if kind is ConstraintKind.JSON_SCHEMA:
            json.loads(text)  # the library pastes it into a document of its own
        if kind is ConstraintKind.GRAMMAR:
            return (grammar_from("gbnf", text) if "::=" in text else text) + _NO_FORCING
        if kind is ConstraintKind.REGEX:
            # As in a schema's `pattern`. Words and digits of all scripts are not what people mean, and Python and the
            # library do not agree on which there are.
            return f"start: /{regex_to_lark(text, use_ascii='dw')}/"
        return grammar_from(kind.value, text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(str(error)[:_MESSAGE_CHARACTERS]) from error


def check_grammar(kind: ConstraintKind, text: str) -> None:
    """Raises InvalidRequestError, which says why, for what no output can follow or the library cannot enforce."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar_of(kind, text), limits=LIMITS)
    if wrong:
        raise InvalidRequestError(messages[0].strip()[:_MESSAGE_CHARACTERS])
