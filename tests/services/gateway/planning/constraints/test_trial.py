"""A trial follows the beginnings of some answers, so that a worker does not find a limit in the middle of one."""

from __future__ import annotations

import pytest

from paceline.core import grammar
from paceline.core.errors import ConstraintError
from paceline.core.types import ConstraintKind
from paceline.services.gateway.planning.constraints.trial import check_beginnings
from tests.core.json_grammar.matching import bytes_only

GRAMMAR = ConstraintKind.GRAMMAR
FAILS = 'start: "a" r? "b"?\nr: %json {"type": "integer"}\n%ignore /[ ]+/'
"""A grammar at whose answers the library fails after a space."""


def test_what_fails_after_some_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_check_parts", lambda parts: None)
    start = grammar.compile_grammar(grammar.grammar_of(GRAMMAR, FAILS), bytes_only(), GRAMMAR)
    with pytest.raises(ConstraintError, match="the library of grammars fails at it"):
        check_beginnings(start, GRAMMAR)


@pytest.mark.parametrize("text", ['start: "a"', 'start: /[a-z]+/ "b"?', 'start: ("a" | "b")*'])
def test_what_can_begin_is_taken_and_stays_at_its_beginning(text: str) -> None:
    start = grammar.compile_grammar(grammar.grammar_of(GRAMMAR, text), bytes_only(), GRAMMAR)
    check_beginnings(start, GRAMMAR)
    assert start.consume_token(ord("a"))
