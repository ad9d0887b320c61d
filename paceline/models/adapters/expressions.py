"""Regular expressions of adapters' settings, matched in bounded time. Imports no torch.

Python's own matcher tries one way after another, so an expression such as (a+)+b can keep it busy for ever. Here, all
ways are followed at the same time: a set of places in the text, one bit for each, moves through the expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from paceline.core.errors import ModelError

MOST_CHARACTERS = 4096
"""Longest expression."""
_MOST_STEPS = 3_000_000
"""Steps in which all expressions of an adapter must be matched, about ten seconds. Those of real adapters need a few
for each module."""


@dataclass(slots=True)
class StepBudget:
    """The steps that are left for the expressions of one adapter."""

    left: int = _MOST_STEPS

    def spend(self) -> None:
        """Count a step. Raises ModelError if there were too many."""
        self.left -= 1
        if self.left < 0:
            raise ModelError("its regular expressions take too long; write names of modules in place of them")


class Expression:
    """A regular expression of the form that Python's module `re` has, without references, flags and looking back.

    Raises ValueError if the text is no such expression.
    """

    def __init__(self, text: str, steps: StepBudget) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
        try:
            parsed = _parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("it has flags")
        _check(parsed)
        self._parsed = parsed
        self._steps = steps

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the whole text."""
        return self._match(text, 1)

    def matches_end(self, text: str) -> bool:
        """Return whether the expression matches the whole text, or the rest of it after one of its dots."""
        return self._match(text, sum((1 << place + 1 for place, own in enumerate(text) if own == "."), 1))

    def _match(self, text: str, places: int) -> bool:
        return bool(_Matching(text, self._steps).after(self._parsed, places) >> len(text))


def _check(items: Any) -> None:
    """Raise ValueError for parts of an expression that cannot be matched in bounded time."""
    for kind, what in items:
        name = kind.name
        if name == "SUBPATTERN":
            _, added, removed, inner = what
            if added or removed:
                raise ValueError("it has flags")
            _check(inner)
        elif name == "BRANCH":
            for each in what[1]:
                _check(each)
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            _check(what[2])
        elif name in ("ASSERT", "ASSERT_NOT") and what[0] > 0:
            _check(what[1])
        elif name not in _CHARACTERS and not (name == "AT" and what.name in _PLACES):
            raise ValueError("it has references, looks back, or has atomic groups")


class _Matching:
    """The matching of one text. Bit n of a set of places is the place before the text's character n."""

    def __init__(self, text: str, steps: StepBudget) -> None:
        self._text = text
        self._steps = steps
        self._places: dict[str, int] = {}
        for place, own in enumerate(text):
            self._places[own] = self._places.get(own, 0) | 1 << place

    def after(self, items: Any, places: int) -> int:
        """Return the places that a sequence of items leads to, from a set of places."""
        for kind, what in items:
            self._steps.spend()
            if not places:
                return 0
            name = kind.name
            if name in _CHARACTERS:
                accepts = _CHARACTERS[name]
                here = sum(own for letter, own in self._places.items() if accepts(what, ord(letter)))
                places = (places & here) << 1
            elif name == "AT":
                places &= _PLACES[what.name](self._text)
            elif name == "SUBPATTERN":
                places = self.after(what[3], places)
            elif name == "BRANCH":
                found = 0
                for each in what[1]:
                    found |= self.after(each, places)
                places = found
            elif name in ("ASSERT", "ASSERT_NOT"):
                wanted = name == "ASSERT"
                places = sum(own for own in _bits(places) if bool(self.after(what[1], own)) is wanted)
            else:
                least, most, inner = what
                places = self._repeat(least, most, inner, places)
        return places

    def _repeat(self, least: int, most: int, inner: Any, places: int) -> int:
        # A repetition that does not move goes on for ever, and the others end after as many as there are characters.
        longest = len(self._text) + 1
        for _ in range(min(least, longest)):
            places = self.after(inner, places)
        found = new = places
        for _ in range(min(most - least, longest)):
            new = self.after(inner, new) & ~found
            if not new:
                break
            found |= new
        return found


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest
        places ^= lowest


def _is_in(items: Any, code: int) -> bool:
    """Return whether a character is in a class of characters such as [^a-z\\d]."""
    negated = False
    for kind, what in items:
        if kind.name == "NEGATE":
            negated = True
        elif kind.name == "LITERAL":
            if what == code:
                return not negated
        elif kind.name == "RANGE":
            if what[0] <= code <= what[1]:
                return not negated
        elif _CATEGORIES[what.name](chr(code)):
            return not negated
    return negated


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda letter: not letter.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda letter: not letter.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda letter: not _is_word(letter),
}
_CHARACTERS: dict[str, Callable[[Any, int], bool]] = {
    "LITERAL": lambda what, code: what == code,
    "NOT_LITERAL": lambda what, code: what != code,
    "ANY": lambda what, code: code != ord("\n"),
    "IN": _is_in,
}
"""The items that match one character."""


def _boundaries(text: str) -> int:
    words = [False, *map(_is_word, text), False]
    return sum(1 << place for place in range(len(text) + 1) if words[place] != words[place + 1])


def _ends(text: str) -> int:
    return 1 << len(text) | (1 << len(text) - 1 if text.endswith("\n") else 0)


_PLACES: dict[str, Callable[[str], int]] = {
    "AT_BEGINNING": lambda text: 1,
    "AT_BEGINNING_STRING": lambda text: 1,
    "AT_END": _ends,
    "AT_END_STRING": lambda text: 1 << len(text),
    "AT_BOUNDARY": _boundaries,
    "AT_NON_BOUNDARY": lambda text: ~_boundaries(text),
}
"""The items that match at certain places."""
