"""The rules of a grammar as data. Paths that cannot end are removed before the rules are written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.json_grammar.strings import CHARACTER_RULE

_MAX_DEPTH = 1_000
"""Largest number of levels of nested rules. The library compiles them recursively, and its stack is limited."""
_MAX_CHARACTERS = 2_000_000
"""Largest number of characters of all terminals together. Caches keep grammars in memory, and escapes make texts
longer.
"""

_NAME = re.compile(r"\bT[0-9]+\b")
"""A name of a terminal. Texts may have the same characters, so more terminals than needed may be found."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule."""

    number: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repetition of a sequence of elements."""

    elements: tuple[Element, ...]
    low: int
    high: int | None


class Impossible:
    """An element that no text matches."""


IMPOSSIBLE = Impossible()

Element = str | Rule | Repeat | Impossible
"""A terminal, as it is written in a grammar, or another part of a rule."""


class Rules:
    """A grammar: rules with alternatives, each a sequence of elements, and named terminals."""

    def __init__(self) -> None:
        self._rules: list[list[Sequence[Element]]] = []
        self._terminals: dict[str, str] = {}
        self._left = _MAX_CHARACTERS

    def new(self) -> Rule:
        """Return a rule without alternatives."""
        self._rules.append([])
        return Rule(len(self._rules) - 1)

    def add(self, rule: Rule, *alternatives: Sequence[Element]) -> Rule:
        """Add alternatives to a rule. Return the rule."""
        self._rules[rule.number] += alternatives
        return rule

    def terminal(self, expression: str) -> str:
        """Return the name of a terminal with this expression. Raises ConstraintError if all terminals are too large."""
        if expression not in self._terminals:
            self._terminals[expression] = f"T{len(self._terminals)}"
            self._left -= len(expression)
            if self._left < 0:
                raise ConstraintError(explain("too many expressions"))
        return self._terminals[expression]

    def written(self, start: Element) -> list[str] | None:
        """Return the grammar's lines, with a rule `start`; None if no text fits it."""
        first = self.add(self.new(), [start])
        productive = self._productive()
        if first.number not in productive:
            return None
        kept = {number: _pruned(self._rules[number], productive) for number in productive}
        used = _used(first.number, kept)
        lines = [f"start: r{first.number}"]
        lines += [f"r{number}: {' | '.join(map(_sequence, kept[number]))}" for number in used]
        names = self._with_parts({name for number in used for way in kept[number] for name in _terminals_of(way)})
        lines += [f"{name}: {text}" for text, name in self._terminals.items() if name in names]
        return [*lines, CHARACTER_RULE]

    def _with_parts(self, names: Iterable[str]) -> set[str]:
        """Return the names of terminals together with the names of the terminals in their expressions."""
        texts = {name: text for text, name in self._terminals.items()}
        found: set[str] = set()
        pending = list(names)
        while pending:
            if (name := pending.pop()) in texts and name not in found:
                found.add(name)
                pending += _NAME.findall(texts[name])
        return found

    def _productive(self) -> set[int]:
        """Return the rules that at least one text fits."""
        waiting: dict[int, list[list[int]]] = defaultdict(list)
        found: set[int] = set()
        ready: list[int] = []
        for number, ways in enumerate(self._rules):
            for way in ways:
                needed = _needed(way)
                if needed is None:
                    continue
                if not needed:
                    ready.append(number)
                counter = [number, len(needed)]
                for each in needed:
                    waiting[each].append(counter)
        while ready:
            number = ready.pop()
            if number in found:
                continue
            found.add(number)
            for counter in waiting[number]:
                counter[1] -= 1
                if counter[1] == 0:
                    ready.append(counter[0])
        return found


def _needed(elements: Iterable[Element]) -> set[int] | None:
    """Return the rules without which elements match nothing; None if they never match anything."""
    found: set[int] = set()
    for element in elements:
        if isinstance(element, Impossible):
            return None
        if isinstance(element, Rule):
            found.add(element.number)
        elif isinstance(element, Repeat) and element.low > 0:
            inner = _needed(element.elements)
            if inner is None:
                return None
            found |= inner
    return found


def _pruned(ways: Iterable[Sequence[Element]], productive: set[int]) -> list[list[Element]]:
    kept = []
    for way in ways:
        needed = _needed(way)
        if needed is not None and needed <= productive:
            kept.append(_kept(way, productive))
    return kept


def _kept(elements: Iterable[Element], productive: set[int]) -> list[Element]:
    """Return elements that match something, without the repetitions that match only nothing."""
    kept: list[Element] = []
    for element in elements:
        if isinstance(element, Repeat):
            needed = _needed(element.elements)
            if element.high == 0 or needed is None or not needed <= productive:
                continue
            element = Repeat(tuple(_kept(element.elements, productive)), element.low, element.high)
        kept.append(element)
    return kept


def _used(first: int, rules: dict[int, list[list[Element]]]) -> list[int]:
    """Return the rules that can be reached, in the order in which the library compiles them."""
    order = [first]
    seen = {first}
    path = [iter([each for way in rules[first] for each in _references(way)])]
    while path:
        for number in path[-1]:
            if number not in seen:
                seen.add(number)
                order.append(number)
                path.append(iter([each for way in rules[number] for each in _references(way)]))
                break
        else:
            path.pop()
        if len(path) > _MAX_DEPTH:
            raise ConstraintError(explain("recursion limit exceeded"))
    return order


def _references(elements: Iterable[Element]) -> Iterable[int]:
    for element in elements:
        if isinstance(element, Rule):
            yield element.number
        elif isinstance(element, Repeat):
            yield from _references(element.elements)


def _terminals_of(elements: Iterable[Element]) -> Iterable[str]:
    for element in elements:
        if isinstance(element, str):
            yield element
        elif isinstance(element, Repeat):
            yield from _terminals_of(element.elements)


def _sequence(elements: Iterable[Element]) -> str:
    return " ".join(map(_written, elements)) or '""'


def _written(element: Element) -> str:
    if isinstance(element, Rule):
        return f"r{element.number}"
    if isinstance(element, Repeat):
        match element.low, element.high:
            case 0, None:
                mark = "*"
            case 0, 1:
                mark = "?"
            case 1, 1:
                mark = ""
            case low, high:
                mark = f"{{{low},{'' if high is None else high}}}"
        return f"({_sequence(element.elements)}){mark}"
    assert isinstance(element, str)
    return element
