"""Texts under the grammar of a schema, as the engine follows it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from paceline.core.grammar import LIMITS, grammar_of
from paceline.core.types import ConstraintKind


@cache
def bytes_only() -> LLTokenizer:
    """Return a tokenizer of which each token is one byte."""
    return LLTokenizer("byte")


def matcher_of(schema: Any, tokenizer: LLTokenizer | None = None) -> LLMatcher:
    """Return the matcher at the beginning of an answer."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, text)
    matcher = LLMatcher(tokenizer or bytes_only(), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(matcher: LLMatcher, text: str) -> bool:
    """Return whether a whole answer may be this text."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def accepts(schema: Any, *texts: str) -> list[bool]:
    """Return of each text whether it may be the answer."""
    matcher = matcher_of(schema)
    return [allows(matcher, text) for text in texts]
