"""Regular expressions of schemas, translated so that they match texts as JSON spells them.

The syntax is what ECMA-262, Python and Rust have in common. `\\d` and `\\w` mean ASCII. Look-ahead works where it
begins the whole expression, as in `^(?!.*secret)(?=.*[0-9])`.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.json_grammar.strings import (
    ALL,
    CHARACTER,
    Ranges,
    character_set,
    complement,
    intersection,
    union,
)

_MAX_DEPTH = 100
_MAX_COUNT = 10_000
_MAX_CHARACTERS = 500_000
"""Most characters of a translation. A set of two characters such as \\W becomes hundreds of them."""
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_SPACES += ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_SETS |= {name.upper(): complement(ranges) for name, ranges in _SETS.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "a": 7}
_ALL_BUT_NEWLINE = complement(((0xA, 0xA),))
_LONG_NAMES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Separator": "Z"}
_ANY = f"{CHARACTER}*"
_FLAGS = re.compile(r"\(\?([imsu]*(?:-[imsu]+)?)\)")


class PatternError(ValueError):
    """A regular expression cannot be read."""


class UnsupportedPatternError(PatternError):
    """A regular expression can be read, but no grammar can enforce it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern as regular expressions for the inside of a JSON string. A text fits if it matches all expressions in
    `wanted` and none in `unwanted`."""

    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


@functools.lru_cache(maxsize=64)
def translated(pattern: str, every_way: bool = False) -> Pattern:
    """Return a schema's pattern, which may match anywhere within a text.

    Args:
        every_way: allow an escape for every character.

    Raises:
        PatternError: the pattern cannot be read.
        UnsupportedPatternError: the pattern cannot be enforced.
        ConstraintError: it is too large.
    """
    reader = _Reader(pattern, every_way)
    ways = reader.ways()
    if not reader.at_end():
        raise PatternError("unopened group")
    looks = [look for way in ways for look in way.looks]
    if looks and len(ways) > 1:
        raise UnsupportedPatternError("look-ahead in one of several alternatives")
    expression = _joined(f"{'' if way.starts else _ANY}{way.text}{'' if way.ends else _ANY}" for way in ways)
    wanted = [text for text, is_wanted in looks if is_wanted]
    return Pattern((*wanted, expression), tuple(text for text, is_wanted in looks if not is_wanted))


@dataclass(slots=True)
class _Way:
    """One alternative of an expression."""

    text: str
    starts: bool
    """Whether it begins at the start of the text."""
    ends: bool
    looks: list[tuple[str, bool]] = field(default_factory=list)
    """What its look-aheads look for in the whole text, and whether that has to be there."""


def _joined(ways: Iterable[str]) -> str:
    texts = list(ways)
    return texts[0] if len(texts) == 1 else "(" + "|".join(texts) + ")"


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, text: str, every_way: bool) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._every_way = every_way
        self._ignores_case = False
        self._left = _MAX_CHARACTERS

    def at_end(self) -> bool:
        return self._at >= len(self._text)

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
        atoms: list[str] = []
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
        return [_Way("".join(atoms), starts, ends, looks)]

    def _look(self) -> tuple[str, bool]:
        is_wanted = self._text[self._at + 2] == "="
        self._at += 3
        before = self._every_way
        self._every_way = before or not is_wanted  # no spelling of what must not be there
        ways = self.ways()
        self._every_way = before
        self._close()
        if any(way.starts or way.looks for way in ways):
            raise UnsupportedPatternError("look-ahead within look-ahead")
        return _joined(f"{way.text}{'' if way.ends else _ANY}" for way in ways), is_wanted

    def _anchor(self, *spellings: str) -> bool:
        found = False
        while any(self._skip(each) for each in spellings):
            found = True
        return found

    def _atom(self) -> str | list[_Way]:
        """Read an atom with its quantifier. Return alternatives instead if it is a group that has anchors."""
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
            text = self._set(_ALL_BUT_NEWLINE)
        elif mark == "\\":
            text = self._set(self._escape(in_class=False))
        elif mark in "*+?":
            raise PatternError("repetition operator missing expression")
        else:
            text = self._set(((ord(mark), ord(mark)),))
        return text + self._quantifier()

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
        if max(int(low or 0), int(high or 0)) > _MAX_COUNT:
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

    def _class(self) -> Ranges:
        """Read a set of characters after its bracket."""
        negated = self._skip("^")
        found: list[tuple[int, int]] = []
        is_first = True
        while True:
            if self.at_end():
                raise PatternError("unclosed character class")
            if self._text[self._at] == "]" and not is_first:
                self._at += 1
                break
            if self._text[self._at] == "]" and is_first and "]" not in self._text[self._at + 1 :]:
                self._at += 1  # ECMA's empty set
                break
            is_first = False
            first = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                if self.at_end():
                    raise PatternError("unclosed character class")
                last = self._member()
                if len(first) == len(last) == 1 and first[0][0] == first[0][1] and last[0][0] == last[0][1]:
                    if first[0][0] > last[0][0]:
                        raise PatternError("invalid character class range, the start must be <= the end")
                    found.append((first[0][0], last[0][1]))
                    continue
                found += [(0x2D, 0x2D), *last]
            found += first
        ranges = self._cased(union(found))
        return complement(ranges) if negated else ranges

    def _member(self) -> Ranges:
        mark = self._text[self._at]
        self._at += 1
        return self._escape(in_class=True) if mark == "\\" else ((ord(mark), ord(mark)),)

    def _escape(self, *, in_class: bool) -> Ranges:
        """Read an escape after its backslash."""
        if self.at_end():
            raise PatternError("incomplete escape sequence, reached end of pattern prematurely")
        mark = self._text[self._at]
        self._at += 1
        if mark in _SETS:
            return _SETS[mark]
        if mark in _CONTROLS:
            return ((_CONTROLS[mark], _CONTROLS[mark]),)
        if mark == "b" and in_class:
            return ((8, 8),)
        if mark in "bBAZzGk":
            raise UnsupportedPatternError(f"\\{mark}")
        if mark.isdecimal():
            raise UnsupportedPatternError("a reference to a group")
        if mark in "pP":
            ranges = _category(self._braced() or self._take(1))
            return complement(ranges) if mark == "P" else ranges
        if mark == "c" and not self.at_end():
            code = ord(self._take(1)) & 31
            return ((code, code),)
        if mark in "xuU":
            digits = self._braced() or self._take({"x": 2, "u": 4, "U": 8}[mark])
            return self._code(digits)
        return ((ord(mark), ord(mark)),)

    def _code(self, digits: str) -> Ranges:
        try:
            code = int(digits, 16)
        except ValueError:
            raise PatternError("invalid hexadecimal digit") from None
        if 0xD800 <= code < 0xDC00 and self._text.startswith("\\u", self._at):  # ECMA writes one character as a pair
            self._at += 2
            code = 0x10000 + ((code - 0xD800) << 10) + (int(self._take(4) or "0", 16) & 0x3FF)
        if not intersection(ALL, ((code, code),)):
            raise UnsupportedPatternError("half of a surrogate pair")
        return ((code, code),)

    def _braced(self) -> str:
        if not self._text.startswith("{", self._at):
            return ""
        end = self._text.find("}", self._at)
        found = self._text[self._at + 1 : end] if end > 0 else ""
        self._at = end + 1 if end > 0 else len(self._text)
        return found

    def _take(self, count: int) -> str:
        found = self._text[self._at : self._at + count]
        self._at += count
        return found

    def _skip(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _cased(self, ranges: Ranges) -> Ranges:
        """Return a set with the other cases of its ASCII letters, if case is ignored."""
        if not self._ignores_case:
            return ranges
        upper, lower = intersection(ranges, ((0x41, 0x5A),)), intersection(ranges, ((0x61, 0x7A),))
        return union([*ranges, *((a + 32, b + 32) for a, b in upper), *((a - 32, b - 32) for a, b in lower)])

    def _set(self, ranges: Ranges) -> str:
        found = character_set(self._cased(ranges), self._every_way)
        self._left -= len(found)
        if self._left < 0:
            raise ConstraintError(explain("too many expressions"))
        return found


@functools.lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """Return the characters of a Unicode general category."""
    name = _LONG_NAMES.get(name.removeprefix("General_Category=").removeprefix("gc="), name)
    codes = [code for first, last in ALL for code in range(first, last + 1)]
    found = union((code, code) for code in codes if unicodedata.category(chr(code)).startswith(name)) if name else ()
    if not found:
        raise UnsupportedPatternError(f"\\p{{{name}}}")
    return found
