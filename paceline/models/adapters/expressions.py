"""Regular expressions of adapters' settings, matched in bounded time. Imports no torch.

Python's own matcher has no limit of time, so an expression such as (a+)+b can keep it busy for ever. The package
`regex` reads the same expressions and has one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import regex

from paceline.core.errors import ModelError

MOST_CHARACTERS = 4096
"""Longest expression."""
_MOST_SECONDS = 5.0


@dataclass(slots=True)
class MatchingTime:
    """The time that is left for the expressions of one adapter. Those of real adapters need microseconds."""

    left: float = _MOST_SECONDS
    """In seconds."""

    def matches(self, expression: regex.Pattern[str], text: str) -> bool:
        """Return whether an expression matches a whole text. Raises ModelError if there is no time left."""
        begun = time.monotonic()
        try:
            return expression.fullmatch(text, timeout=max(0.0, self.left)) is not None
        except TimeoutError:
            message = "its regular expressions take too long; write names of modules in place of them"
            raise ModelError(message) from None
        finally:
            self.left -= time.monotonic() - begun


class Expression:
    """A regular expression as in Python's module `re`. Raises ValueError if the text is none."""

    def __init__(self, text: str, matching: MatchingTime) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
        try:
            self._whole = regex.compile(text, regex.VERSION0)
            self._end = regex.compile(rf"(?:.*\.)?(?:{text})", regex.VERSION0)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        self._matching = matching

    def matches(self, text: str) -> bool:
        """Return whether the expression matches the whole text."""
        return self._matching.matches(self._whole, text)

    def matches_end(self, text: str) -> bool:
        """Return whether the expression matches the whole text, or the rest of it after one of its dots."""
        return self._matching.matches(self._end, text)
