"""The base class of the builders, which write rules for all kinds of values, and the state that they share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.json_grammar.conjunctions import Conjunctions, Facts
from paceline.core.json_grammar.facts import types_of
from paceline.core.json_grammar.notations import Notation
from paceline.core.json_grammar.numbers import NUMBER
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Impossible, Repeat, Rule, Rules
from paceline.core.json_grammar.strings import Quoting

_MOST_SPELLED = 2_000
"""Largest number of characters of given texts that are written with all their spellings. Each character takes up to 30
characters in the grammar.
"""
_MOST_PART_WAYS = 20_000
"""Largest number of alternatives of all parts of terminals. The library needs about five units of fuel for each of
them, and has 200,000.
"""


class _TooManyPartsError(Exception):
    """The parts of terminals have too many alternatives."""


@dataclass
class Work:
    """The state that all builders of one schema's grammar share."""

    conjunctions: Conjunctions
    closes: bool
    """Whether an object has only the members that its schema names, unless the schema has rules for other members."""
    rules: Rules = field(default_factory=Rules)
    reasons: list[str] = field(default_factory=list)
    """Sentences that say why parts of the schema are impossible."""
    spelled: int = 0
    """Number of characters of given texts that are in the grammar with all their spellings so far."""
    parts_left: int = _MOST_PART_WAYS
    """Number of alternatives that further parts of terminals may have."""
    parts: set[str] = field(default_factory=set)
    """Expressions of the parts that are in the grammar."""


@dataclass
class Scalars:
    """Ways to write values that are neither arrays nor objects."""

    plain: dict[str, None] = field(default_factory=dict)
    """Expressions of terminals for values without quotes."""
    texts: dict[Quoting, dict[str, None]] = field(default_factory=dict)
    """Expressions of terminals for texts, by the way in which the texts are quoted."""

    def add_text(self, quoting: Quoting, expression: str) -> None:
        self.texts.setdefault(quoting, {})[quoting.marked(expression)] = None


class Builder(ABC):
    """Writes rules for the values of one notation."""

    def __init__(self, work: Work, notation: Notation) -> None:
        self.notation = notation
        self._work = work
        self.conjunctions = work.conjunctions
        self.rules = work.rules
        self.closes = work.closes
        self._anything: Rule | None = None

    @property
    @abstractmethod
    def inside(self) -> Builder:
        """The builder of arrays and objects, and of the values inside them."""

    @abstractmethod
    def value(self, schemas: Sequence[Any]) -> Element:
        """Return an element that matches the values that fit all of these schemas."""

    @abstractmethod
    def of_member(self, name: str | None) -> Builder:
        """Return the builder for the value of an object's member.

        Args:
            name: the member's name; None for all names that are not listed.
        """

    def impossible(self, reason: str) -> Impossible:
        """Note why a part of the schema is impossible. Return an element that no text matches."""
        self._work.reasons.append(reason)
        return IMPOSSIBLE

    def miss(self, facts: Facts, keyword: str, name: str = "") -> None:
        """Note that a keyword is not enforced.

        Args:
            name: name under which the keyword is listed; "" for the keyword itself.
        """
        for schema in facts:
            if keyword in schema:
                self.conjunctions.miss(schema, name or keyword)

    def with_parts(self, make: Callable[[Callable[[str], str]], str]) -> str | None:
        """Return an expression whose parts are terminals of their own; None if the parts are too large.

        Args:
            make: makes the expression. It gets a function that returns the name of a part with a given expression.
        """
        left = self._work.parts_left
        found: set[str] = set()

        def named(expression: str) -> str:
            nonlocal left
            ways = expression.count("|") + 1
            self.conjunctions.spend(1 + ways // 4)
            if expression not in self._work.parts and expression not in found:
                found.add(expression)
                left -= ways
            if left < 0:
                raise _TooManyPartsError
            return self.rules.terminal(expression)

        try:
            made = make(named)
        except _TooManyPartsError:
            return None
        self._work.parts_left = left
        self._work.parts |= found
        return made

    def types(self, facts: Facts) -> frozenset[str]:
        """Return the JSON types that the schemas in `facts` allow."""
        return types_of(facts, self.conjunctions, by_keywords=self.closes)

    def any(self) -> Rule:
        """Return a rule that matches every value of the notation."""
        if self._anything is None:
            notation = self.notation
            self._anything = self.rules.new()
            scalars = Scalars()
            if notation.any_value:
                scalars.plain[notation.any_value] = None
            else:
                scalars.plain = dict.fromkeys([f"({NUMBER})", *notation.words.values()])
                for quoting in notation.quotings:
                    scalars.add_text(quoting, quoting.text())
                names = Scalars()
                for quoting in notation.names:
                    names.add_text(quoting, quoting.text())
                member = (self.one_of(names), notation.colon, self._anything)
                self.rules.add(self._anything, self.list_of((self._anything,), 0, None))
                self.rules.add(self._anything, [notation.opening, self.several(member, 0, None), notation.closing])
            self.rules.add(self._anything, *self.ways_of(scalars))
        return self._anything

    def ways_of(self, scalars: Scalars) -> list[Sequence[Element]]:
        """Return alternatives that together match any of these scalars, with as few terminals as possible.

        A lexer takes the longest text that any terminal matches, so one of several terminals could hide another one.
        """
        ways: list[Sequence[Element]] = []
        merged = list(scalars.plain)
        for quoting, expressions in scalars.texts.items():
            if quoting.token:
                ways.append([quoting.token, self.rules.terminal(" | ".join(expressions)), quoting.token])
            else:
                merged += expressions
        if merged:
            expression, end = " | ".join(merged), self.notation.end
            if end:
                expression = f"({expression}) /{end}/"
            ways.insert(0, [self.rules.terminal(expression)])
        return ways

    def end(self) -> list[Element]:
        """Return elements for the text that must follow each value; an empty list if nothing must follow."""
        return [self.rules.terminal(f"/{self.notation.end}/")] if self.notation.end else []

    def constant(self, value: Any) -> Element:
        """Return an element that matches exactly this value."""
        if not isinstance(value, list | dict):
            scalars = Scalars()
            self.add_constant(scalars, value)
            return self.one_of(scalars)
        inside = self.inside
        notation = inside.notation
        if isinstance(value, list):
            marks = notation.opening_list, notation.closing_list
            items: list[list[Element]] = [[inside.constant(item)] for item in value]
        else:
            marks = notation.opening, notation.closing
            items = [
                [inside.name(name), notation.colon, inside.of_member(name).constant(item)]
                for name, item in value.items()
            ]
        between = [
            element for number, each in enumerate(items) for element in [*([notation.comma] if number else []), *each]
        ]
        return Repeat((marks[0], *between, marks[1], *self.end()), 1, 1)

    def add_constant(self, scalars: Scalars, value: Any) -> None:
        """Add the ways to write a value that is neither an array nor an object."""
        if isinstance(value, str):
            for quoting in self._able(self.notation.quotings, value):
                scalars.add_text(quoting, self._given(quoting, value))
        else:
            is_word = value is None or isinstance(value, bool)
            scalars.plain[self.notation.words[value] if is_word else json.dumps(json.dumps(value))] = None

    def name(self, name: str) -> Element:
        """Return an element for a member's name; an impossible element if the notation cannot write the name."""
        scalars = Scalars()
        for quoting in self._able(self.notation.names, name)[:1]:
            scalars.add_text(quoting, self._given(quoting, name))
        return self.one_of(scalars)

    def _given(self, quoting: Quoting, text: str) -> str:
        """Return an expression for a given text, with all its spellings unless the schema has many such texts."""
        self._work.spelled += len(text)
        return quoting.constant(text, briefly=self._work.spelled > _MOST_SPELLED)

    def _able(self, quotings: Iterable[Quoting], text: str) -> list[Quoting]:
        """Return the ways to write a text."""
        found = [quoting for quoting in quotings if quoting.can_write(text)]
        return found or ([self.notation.fallback] if self.notation.fallback else [])

    def one_of(self, scalars: Scalars) -> Element:
        """Return an element that matches any of these scalars; without scalars, the element matches nothing."""
        ways = self.ways_of(scalars)
        if len(ways) == 1 and len(ways[0]) == 1:
            return ways[0][0]
        return self.rules.add(self.rules.new(), *ways) if ways else IMPOSSIBLE

    def several(self, elements: tuple[Element, ...], low: int, high: int | None) -> Repeat:
        """Return a repetition of elements, `low` to `high` times, with commas between them."""
        most = None if high is None else max(0, high - 1)
        more = Repeat((self.notation.comma, *elements), max(0, low - 1), most)
        return Repeat((*elements, more), int(low > 0), 1 if high != 0 else 0)

    def list_of(self, elements: tuple[Element, ...], low: int, high: int | None) -> list[Element]:
        """Return elements for an array that has `elements` inside, `low` to `high` times with commas between them."""
        return [self.notation.opening_list, self.several(elements, low, high), self.notation.closing_list]
