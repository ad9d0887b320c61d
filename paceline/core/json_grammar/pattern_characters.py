"""Characters, sets of characters and escapes in regular expressions of schemas."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections import defaultdict
from collections.abc import Mapping

from paceline.core.errors import ConstraintError
from paceline.core.grammar_errors import explain
from paceline.core.json_grammar.ranges import ALL, Ranges, complement, intersection, union
from paceline.core.json_grammar.strings import Escaping, character_set

_MAX_CHARACTERS = 500_000
"""Largest number of characters of a translated pattern. The two characters \\W alone become hundreds of characters."""
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES: Ranges = ((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_SPACES += ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_SETS |= {name.upper(): complement(ranges) for name, ranges in _SETS.items()}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "a": 7}
ALL_BUT_NEWLINE = complement(((0xA, 0xA),))
_LONG_NAMES = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Mark": "M", "Separator": "Z"}


class PatternError(ValueError):
    """A regular expression cannot be read."""


class UnsupportedPatternError(PatternError):
    """A regular expression can be read, but no grammar can enforce it."""


class CharacterReader:
    """Reads the characters of a pattern from left to right.

    Args:
        every_way: also match texts in which characters are escaped that need no escape.
        escaping: how the characters of matching texts are written.
    """

    def __init__(self, text: str, every_way: bool, escaping: Escaping) -> None:
        self._text = text
        self._escaping = escaping
        self._at = 0
        self._every_way = every_way
        self._ignores_case = False
        self._left = _MAX_CHARACTERS

    def at_end(self) -> bool:
        return self._at >= len(self._text)

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
        found = character_set(self._cased(ranges), self._every_way, self._escaping)
        self._left -= len(found)
        if self._left < 0:
            raise ConstraintError(explain("too many expressions"))
        return found


@functools.cache
def _categories() -> Mapping[str, Ranges]:
    """Return the characters of each general category of Unicode, by its name of two letters. This takes some tenths of
    a second."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for first, last in ALL:
        for category, codes in itertools.groupby(range(first, last + 1), lambda code: unicodedata.category(chr(code))):
            run = list(codes)
            found[category].append((run[0], run[-1]))
    return {category: tuple(ranges) for category, ranges in found.items()}


@functools.lru_cache(maxsize=64)
def _category(name: str) -> Ranges:
    """Return the characters of a general category of Unicode, or of all whose names begin with a letter."""
    name = _LONG_NAMES.get(name.removeprefix("General_Category=").removeprefix("gc="), name)
    of_each = [ranges for category, ranges in _categories().items() if name and category.startswith(name)]
    found = union(itertools.chain(*of_each))
    if not found:
        raise UnsupportedPatternError(f"\\p{{{name}}}")
    return found
