"""What the grammars of all kinds of values share."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from paceline.core.json_grammar.conjunctions import Conjunctions, Facts
from paceline.core.json_grammar.facts import types_of
from paceline.core.json_grammar.numbers import NUMBER
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Impossible, Repeat, Rule, Rules
from paceline.core.json_grammar.strings import spelled, string_of

STRING = string_of(0, None)
"""A terminal for every text."""
_SCALARS = f'{STRING} | /{NUMBER}/ | "true" | "false" | "null"'


class Builder(ABC):
    """Rules under construction.

    Args:
        closes: an object has only the members that its schema names, unless the schema speaks of others.
    """

    def __init__(self, conjunctions: Conjunctions, *, closes: bool) -> None:
        self.conjunctions = conjunctions
        self.rules = Rules()
        self.closes = closes
        self.reasons: list[str] = []
        """Why parts of the schema are impossible."""
        self.steps: dict[Fraction, float | None] = {}
        """What the library reads as a `multipleOf` with decimals; None if it cannot read it."""
        self._anything: Rule | None = None

    @abstractmethod
    def value(self, schemas: Sequence[Any]) -> Element:
        """Return an element for the values that fit all schemas."""

    def impossible(self, reason: str) -> Impossible:
        """Note why a part of the schema is impossible. Return an element that no text matches."""
        self.reasons.append(reason)
        return IMPOSSIBLE

    def miss(self, facts: Facts, keyword: str, name: str = "") -> None:
        """Note that a keyword is not enforced, by another name if one is given."""
        for schema in facts:
            if keyword in schema:
                self.conjunctions.miss(schema, name or keyword)

    def types(self, facts: Facts) -> frozenset[str]:
        """Return the types that facts allow."""
        return types_of(facts, self.conjunctions, by_keywords=self.closes)

    def any(self) -> Rule:
        """Return a rule for every value."""
        if self._anything is None:
            self._anything = anything = self.rules.new()
            member = (self.rules.terminal(STRING), '":"', anything)
            self.rules.add(anything, [self.rules.terminal(_SCALARS)])
            self.rules.add(anything, ['"["', list_of((anything,), 0, None), '"]"'])
            self.rules.add(anything, ['"{"', list_of(member, 0, None), '"}"'])
        return self._anything

    def constant(self, value: Any) -> list[Element]:
        """Return elements for exactly this value."""
        if isinstance(value, list):
            inside = [self.constant(item) for item in value]
            return ['"["', *_separated(inside), '"]"']
        if isinstance(value, dict):
            inside = [[self.name(name), '":"', *self.constant(item)] for name, item in value.items()]
            return ['"{"', *_separated(inside), '"}"']
        return [self.rules.terminal(literal(value))]

    def name(self, name: str) -> str:
        """Return the terminal of a member's name."""
        return self.rules.terminal(literal(name))


def list_of(elements: tuple[Element, ...], low: int, high: int | None) -> Repeat:
    """Return elements several times, with commas between them."""
    most = None if high is None else max(0, high - 1)
    several = (*elements, Repeat(('","', *elements), max(0, low - 1), most))
    return Repeat(several, int(low > 0), 1 if high != 0 else 0)


def _separated(parts: Sequence[Sequence[Element]]) -> list[Element]:
    return [element for index, part in enumerate(parts) for element in (*(['","'] if index else []), *part)]


def values_of(facts: Facts) -> list[Any] | None:
    """Return the values that `enum` or `const` lists; None if there is neither."""
    for schema in facts:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return schema["enum"]  # type: ignore[no-any-return]
    return None


@functools.lru_cache(maxsize=4096)
def _text(text: str) -> str:
    plain, pattern = json.dumps(text, ensure_ascii=False), f'"{spelled(text)}"'
    if plain.isascii() and plain[1:-1] == text and not set("/<>&'\x7f") & set(text):
        return json.dumps(plain)
    return f"/{pattern}/"


def literal(value: Any) -> str:
    """Return an expression for exactly this text, number, boolean or null."""
    return _text(value) if isinstance(value, str) else json.dumps(json.dumps(value))


def spellings(texts: Sequence[str]) -> str:
    """Return an expression for all spellings of texts."""
    return f'/"({"|".join(spelled(text, every_way=True) for text in texts)})"/'
