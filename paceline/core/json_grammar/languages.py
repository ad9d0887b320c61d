"""Questions about expressions, answered by the grammar library, which never backtracks and has limits."""

from __future__ import annotations

import functools

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.json_grammar.strings import CHARACTER_RULE

_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=50_000, max_lexer_states=20_000)
_MOST_BYTES = 4096


@functools.lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    """Return a tokenizer in which each token is one byte."""
    return LLTokenizer("byte")


def matcher_of(terminal: str) -> LLMatcher:
    """Return a matcher at the beginning of a text. Raises ConstraintError if the terminal cannot be read."""
    matcher = LLMatcher(_bytes(), f"start: TEXT\nTEXT: {terminal}\n{CHARACTER_RULE}", log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise ConstraintError(explain(matcher.get_error(), with_place=False))
    return matcher


@functools.lru_cache(maxsize=64)
def is_possible(terminal: str) -> bool:
    """Return whether any text matches a terminal, which must not match the empty text. Raises ConstraintError."""
    matcher = matcher_of(terminal)
    matcher.compute_bitmask()
    if not matcher.is_error():
        return True
    if "NoExtension" in matcher.get_error():  # the library's word for a state after which nothing can match
        return False
    raise ConstraintError(explain(matcher.get_error(), with_place=False))


def matches(matcher: LLMatcher, text: str) -> bool:
    """Return whether a text matches the terminal of a matcher. The matcher is unchanged afterwards.

    Raises ConstraintError if the text is too long or the match takes too long.
    """
    tokens = list(text.encode())
    if len(tokens) > _MOST_BYTES:
        raise ConstraintError(f"a text of more than {_MOST_BYTES} bytes cannot be compared with a pattern")
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()
