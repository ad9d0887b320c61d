"""Regular expressions of schemas, translated so that they match texts as JSON or another notation spells them.

The syntax is the common part of the syntaxes of ECMA-262, Python and Rust. `\\d` and `\\w` mean ASCII. Look-ahead works
at the beginning of the whole expression, as in `^(?!.*secret)(?=.*[0-9])`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.json_grammar.pattern_characters import (
    ALL_BUT_NEWLINE,
    CharacterReader,
    PatternError,
    UnsupportedPatternError,
)
from paceline.core.json_grammar.strings import JSON, Escaping

_MAX_DEPTH = 100
_MAX_COUNT = 10_000
_MOST_DIGITS = 400
"""Largest number of digits of a count. Python refuses to read numbers of some thousand digits."""
_FLAGS = re.compile(r"\(\?([imsu]*(?:-[imsu]+)?)\)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern as regular expressions for a text without its quotes. A text fits if it matches all expressions in
    `wanted` and none in `unwanted`."""

    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


@functools.lru_cache(maxsize=64)
def translated(pattern: str, every_way: bool = False, escaping: Escaping = JSON) -> Pattern:
    """Return a schema's pattern, which may match anywhere within a text.

    Args:
        every_way: also match texts in which characters are escaped that need no escape.
        escaping: how the characters of the texts are written.

    Raises:
        PatternError: the pattern cannot be read.
        UnsupportedPatternError: the pattern cannot be enforced.
        ConstraintError: the translated pattern is too large.
    """
    reader = _Reader(pattern, every_way, escaping)
    ways = reader.ways()
    if not reader.at_end():
        raise PatternError("unopened group")
    looks = [look for way in ways for look in way.looks]
    if looks and len(ways) > 1:
        raise UnsupportedPatternError("look-ahead in one of several alternatives")
    any_ = f"{escaping.character}*"
    expression = _joined(f"{'' if way.starts else any_}{way.text}{'' if way.ends else any_}" for way in ways)
    wanted = [text for text, is_wanted in looks if is_wanted]
    return Pattern((*wanted, expression), tuple(text for text, is_wanted in looks if not is_wanted))


@dataclass(slots=True)
class _Way:
    """One alternative of an expression."""

    text: str
    starts: bool
    """Whether this alternative matches only from the start of the text."""
    ends: bool
    looks: list[tuple[str, bool]] = field(default_factory=list)
    """The expressions of the look-aheads, each with True if the whole text must match it, or False if it must not."""


def _least(atoms: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return atoms, with their quantifiers, that are repeated as seldom as they may be."""
    found = []
    for text, times in atoms:
        low = int(times[1:-1].partition(",")[0]) if times.startswith("{") else int(times in ("", "+"))
        if low:
            found.append((text, "" if low == 1 else f"{{{low}}}"))
    return found


def _joined(ways: Iterable[str]) -> str:
    texts = list(ways)
    return texts[0] if len(texts) == 1 else "(" + "|".join(texts) + ")"


class _Reader(CharacterReader):
    """Reads a pattern from left to right."""

    def __init__(self, text: str, every_way: bool, escaping: Escaping) -> None:
        super().__init__(text, every_way, escaping)
        self._depth = 0

    def ways(self) -> list[_Way]:
        """Read alternatives up to the end or to a bracket that closes them."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnsupportedPatternError("it is nested too deeply")
        found = self._way()
        while self._skip("|"):
            found += self._way()
        self._depth -= 1
        return found

    def _way(self) -> list[_Way]:
        """Read one alternative. It can be several if it is nothing but a group."""
        while (flags := _FLAGS.match(self._text, self._at)) is not None:
            self._at = flags.end()
            self._ignores_case = "i" in flags[1].partition("-")[0]
        starts = self._anchor("^", "\\A")
        looks = []
        while starts and self._text.startswith(("(?=", "(?!"), self._at):
            looks.append(self._look())
        atoms: list[tuple[str, str]] = []
        ends = False
        inner: list[_Way] = []
        while not self.at_end() and self._text[self._at] not in "|)":
            if self._anchor("$", "\\Z", "\\z"):
                ends = True
                continue
            if ends or inner or self._text[self._at] == "^":
                raise UnsupportedPatternError("an anchor within it")
            atom = self._atom()
            if isinstance(atom, list):
                inner = atom
                if atoms:
                    raise UnsupportedPatternError("an anchor within it")
            else:
                atoms.append(atom)
        if inner:
            if looks:
                raise UnsupportedPatternError("look-ahead before alternatives with anchors")
            return [_Way(way.text, way.starts or starts, way.ends or ends, way.looks) for way in inner]
        if self._depth == 1:
            # Any text may stand before and after it, so fewer states say the same.
            if not ends:
                atoms[-1:] = _least(atoms[-1:])
            if not starts:
                atoms[:1] = _least(atoms[:1])
        return [_Way("".join(text + times for text, times in atoms), starts, ends, looks)]

    def _look(self) -> tuple[str, bool]:
        is_wanted = self._text[self._at + 2] == "="
        self._at += 3
        before = self._every_way
        self._every_way = before or not is_wanted  # the text must not match in any spelling
        ways = self.ways()
        self._every_way = before
        self._close()
        if any(way.starts or way.looks for way in ways):
            raise UnsupportedPatternError("look-ahead within look-ahead")
        any_ = f"{self._escaping.character}*"
        return _joined(f"{way.text}{'' if way.ends else any_}" for way in ways), is_wanted

    def _anchor(self, *spellings: str) -> bool:
        found = False
        while any(self._skip(each) for each in spellings):
            found = True
        return found

    def _atom(self) -> tuple[str, str] | list[_Way]:
        """Read an atom and its quantifier. Return alternatives instead if it is a group that has anchors."""
        mark = self._text[self._at]
        self._at += 1
        if mark == "(":
            ways = self._group()
            if any(way.starts or way.ends or way.looks for way in ways):
                return ways
            text = f"({'|'.join(way.text for way in ways)})"
        elif mark == "[":
            text = self._set(self._class())
        elif mark == ".":
            text = self._set(ALL_BUT_NEWLINE)
        elif mark == "\\":
            text = self._set(self._escape(in_class=False))
        elif mark in "*+?":
            raise PatternError("repetition operator missing expression")
        else:
            text = self._set(((ord(mark), ord(mark)),))
        return text, self._quantifier()

    def _quantifier(self) -> str:
        if self.at_end():
            return ""
        mark = self._text[self._at]
        if mark in "*+?":
            self._at += 1
            found = mark
        elif mark == "{" and (counts := self._counts()) is not None:
            found = counts
        else:
            return ""
        if not self._skip("?"):  # a lazy repetition matches the same texts
            self._skip("+")
        if not self.at_end() and self._text[self._at] in "*+?":
            raise PatternError("repetition operator missing expression")
        return found

    def _counts(self) -> str | None:
        """Read counts in braces; None if the brace is an ordinary character."""
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not (low.isdecimal() or (comma and not low and high)) or not (not high or high.isdecimal()):
            return None
        if max(len(low), len(high)) > _MOST_DIGITS or max(int(low or 0), int(high or 0)) > _MAX_COUNT:
            raise UnsupportedPatternError(f"a repetition of more than {_MAX_COUNT}")
        if high and int(high) < int(low or 0):
            raise PatternError("invalid repetition count range, the start must be <= the end")
        self._at = end + 1
        if not comma:
            return f"{{{int(low)}}}"
        return f"{{{int(low or 0)},{high and int(high)}}}"

    def _group(self) -> list[_Way]:
        """Read a group after its bracket."""
        before = self._ignores_case
        if self._skip("?"):
            if self._skip("P<") or self._text.startswith("<", self._at):
                if self._text.startswith(("<=", "<!"), self._at):
                    raise UnsupportedPatternError("look-behind")
                end = self._text.find(">", self._at)
                if end < 0:
                    raise PatternError("unclosed group name")
                self._at = end + 1
            elif self._text.startswith(("=", "!"), self._at):
                raise UnsupportedPatternError("look-ahead that does not begin the expression")
            else:
                self._flags()
        ways = self.ways()
        self._close()
        self._ignores_case = before
        return ways

    def _flags(self) -> None:
        flags, colon, _ = self._text[self._at :].partition(":")
        if not colon or not set(flags) <= set("imsu-"):
            raise UnsupportedPatternError(f"the group (?{flags[:8]}")
        self._at += len(flags) + 1
        if "i" in flags:
            self._ignores_case = "i" in flags.partition("-")[0]

    def _close(self) -> None:
        if not self._skip(")"):
            raise PatternError("unclosed group")
