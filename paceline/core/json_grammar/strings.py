"""Texts as regular expressions: JSON strings with every spelling that RFC 8259 allows, and texts of other notations.

Escapes of surrogates come only in pairs, because half a pair is no character. Characters of a given text, such as a
name or a constant, are spelled as encoders of JSON spell them: characters outside ASCII, and characters that some
encoders escape, may be escaped. Escapes of other characters would only mislead a model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.json_grammar.ranges import ALL, LAST, SURROGATES, Ranges, contains, intersection, union

_BEYOND = 0x10000
_RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST))
_SHORT = {'"': '"', "\\": r"\\", "/": r"\/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters with a short escape, and the escape's letter in a regular expression."""

_ESCAPED_BY_ENCODERS: Ranges = ((0, 0x1F), (0x22, 0x22), (0x26, 0x27), (0x2F, 0x2F), (0x3C, 0x3C), (0x3E, 0x3E))
_ESCAPED_BY_ENCODERS += ((0x5C, 0x5C), (0x7F, LAST))

_MANY_RANGES = 64
"""A set of more ranges than this, such as all letters, is written without escapes, because they would fill a page."""

_BMP_ESCAPE = r"[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
_PAIR_ESCAPE = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CODE = f"u({_BMP_ESCAPE}|{_PAIR_ESCAPE})"


@dataclass(frozen=True, slots=True, eq=False)
class Escaping:
    """The spelling of a text's characters."""

    character: str
    """A regular expression for one character in any spelling."""
    raw: Ranges
    """Characters that may be written without an escape."""
    short: Mapping[str, str]
    """Characters with an escape of one letter, and this letter in a regular expression."""
    has_codes: bool
    """Whether every character may be written as an escape with its code, such as \\u0041."""


JSON = Escaping(rf'([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|{_CODE}))', _RAW, _SHORT, has_codes=True)
IN_SINGLE_QUOTES = Escaping(
    rf"([^'\\\x00-\x1F]|\\(['\\bfnrt]|{_CODE}))",
    union([(0x22, 0x22), *intersection(_RAW, ((0, 0x26), (0x28, LAST)))]),
    {"'": "'", **{character: letter for character, letter in _SHORT.items() if character not in '"/'}},
    has_codes=True,
)
"""Escapes as in JSON, for a text between single quotes."""
PLAIN = Escaping(r"(.|\n)", ALL, {}, has_codes=False)
"""The spelling without escapes: every character is written as itself."""

CHARACTER_RULE = f"CHARACTER: /{JSON.character}/"
"""A terminal for a character of a JSON string. A grammar with texts of `Quoting.text` must have it."""


@dataclass(frozen=True, slots=True, eq=False)
class Quoting:
    """The spelling of a text: its characters, and the marks around them."""

    escaping: Escaping
    before: str = ""
    """A regular expression for the text's prefix, which terminals include, unlike marks."""
    after: str = ""
    mark: str = ""
    """A regular expression for the marks before and after the text, which only `marked` adds; "" without marks."""
    token: str = ""
    """A token of the vocabulary before and after the text, as an element of a grammar."""
    shapes: tuple[str, ...] = ()
    """Regular expressions all of which a text must match."""
    loose: str = ""
    """A terminal for all texts, if texts without limits have more spellings than texts with limits; "" otherwise."""
    unlike: tuple[str, ...] = ()
    """Regular expressions none of which a text may match."""
    can_write: Callable[[str], bool] = lambda text: True
    """Function that returns whether a text can be written with this quoting."""

    def whole(self, inside: str) -> str:
        """Return a terminal for texts whose content matches a regular expression."""
        expression = f"{self.before}{inside}{self.after}"
        return f"/{expression}/" if expression else '""'

    def length(self, low: int, high: int | None) -> str:
        """Return a terminal for texts of `low` to `high` characters; None is no limit."""
        times = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        character = "CHARACTER" if self.escaping is JSON else f"/{self.escaping.character}/"
        parts = [f"/{self.before}/" if self.before else "", f"{character}{times}" if high != 0 else ""]
        return " ".join(filter(None, [*parts, f"/{self.after}/" if self.after else ""])) or '""'

    def text(self, terminals: Iterable[tuple[str, bool]] = (), low: int = 0, high: int | None = None) -> str:
        """Return the expression of a terminal for texts that meet all of these conditions.

        Args:
            terminals: terminals, each with True if a text must match it, or False if it must not.
            low: the least number of characters.
            high: the largest number of characters; None if there is no limit.
        """
        given, has_limits = list(terminals), (low, high) != (0, None)
        if self.loose and not given and not has_limits:
            return self.loose
        all_ = [*given, *((self.whole(each), True) for each in self.shapes)]
        all_ += [(f"/{each}/", False) for each in self.unlike]
        if not all_:
            return self.length(low, high)
        wanted = [text for text, is_wanted in all_ if is_wanted]
        if has_limits or not wanted:
            wanted.insert(0, self.length(low, high))
        return f"({' & '.join([*wanted, *(f'~{text}' for text, is_wanted in all_ if not is_wanted)])})"

    def marked(self, expression: str) -> str:
        """Return an expression of a terminal with this quoting's marks around it. All other methods return expressions
        without marks.

        Marks are added after intersections, because within one the library would search long for the end of a text.
        """
        return f"/{self.mark}/ ({expression}) /{self.mark}/" if self.mark else expression

    def spelled(self, text: str, every_way: bool = False) -> str:
        """Return a regular expression for a given text, without quotes and marks.

        Args:
            every_way: also match escapes of characters that need no escape, to exclude all spellings.
        """
        return "".join(character_set(((ord(each), ord(each)),), every_way, self.escaping) for each in text)

    def constant(self, text: str, *, briefly: bool = False) -> str:
        """Return a terminal's expression that matches exactly this text.

        Args:
            briefly: allow only the text itself and its spelling with escapes of all characters outside ASCII.
        """
        return _briefly(self, text) if briefly else _constant(self, text)

    def excluded(self, texts: Iterable[str]) -> tuple[str, bool]:
        """Return (terminal, False), where the terminal matches all spellings of the given texts, which are not
        allowed.
        """
        return self.whole(f"({'|'.join(self.spelled(text, every_way=True) for text in texts)})"), False


IN_JSON = Quoting(JSON, '"', '"')


@functools.lru_cache(maxsize=4096)
def _constant(quoting: Quoting, text: str) -> str:
    if quoting is IN_JSON:
        plain = json.dumps(text, ensure_ascii=False)
        if plain.isascii() and plain[1:-1] == text and not set("/<>&'\x7f") & set(text):
            return json.dumps(plain)
    return quoting.whole(quoting.spelled(text))


def _briefly(quoting: Quoting, text: str) -> str:
    if quoting.escaping is PLAIN:
        before, after = ([f"/{each}/"] if each else [] for each in (quoting.before, quoting.after))
        return " ".join([*before, quoted(text), *after])
    spellings = {json.dumps(text, ensure_ascii=False): None, json.dumps(text): None}
    if quoting.escaping is IN_SINGLE_QUOTES:
        inside = (each[1:-1].replace(r"\"", '"').replace("'", r"\'") for each in spellings)
        spellings = {f"'{each}'": None for each in inside}
    return " | ".join(map(quoted, spellings))


def quoted(text: str) -> str:
    """Return the terminal for exactly this text, as a string and not as a regular expression."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # the library refuses this one character


@functools.lru_cache(maxsize=4096)
def character_set(ranges: Ranges, every_way: bool = False, escaping: Escaping = JSON) -> str:
    """Return a regular expression for one character of a set within a text. For an empty set, it matches nothing.

    If the set ends with a range of at least 256 characters, every spelling of its characters matches, because such sets
    are for free text.
    """
    if intersection(ranges, ALL) == ALL:
        return escaping.character
    ways = []
    if raw := intersection(ranges, escaping.raw):
        ways.append(_class(raw))
    if short := [letter for character, letter in escaping.short.items() if contains(ranges, ord(character))]:
        ways.append(rf"\\[{''.join(short)}]")
    if not every_way and (not ranges or ranges[-1][1] - ranges[-1][0] < 256):
        ranges = intersection(ranges, _ESCAPED_BY_ENCODERS)
    if escaping.has_codes and len(ranges) <= _MANY_RANGES and (codes := _codes(intersection(ranges, ALL))):
        ways.append(rf"\\u({'|'.join(codes)})")
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})" if ways else NOTHING


NOTHING = r"[^\s\S]"
"""A regular expression that matches no text."""


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        code = ranges[0][0]
        return chr(code) if chr(code).isascii() and chr(code).isalnum() else rf"\x{{{code:X}}}"
    return "[" + "".join(rf"\x{{{a:X}}}" if a == b else rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in ranges) + "]"


def _codes(ranges: Ranges) -> list[str]:
    """Return expressions for the digits after `\\u` in escapes of characters."""
    found = []
    for first, last in ranges:
        if first < _BEYOND:
            found += _hexadecimal(first, min(last, _BEYOND - 1), 4)
        if last >= _BEYOND:
            found += _pairs(max(first, _BEYOND) - _BEYOND, last - _BEYOND)
    return found


def _pairs(first: int, last: int) -> list[str]:
    """Return expressions for pairs of surrogates, by 20-bit numbers: the first 10 bits are in the first surrogate."""
    high, low = first >> 10, first & 0x3FF
    last_high, last_low = last >> 10, last & 0x3FF
    parts = [(high, high, low, last_low if high == last_high else 0x3FF)]
    if high + 1 < last_high:
        parts.append((high + 1, last_high - 1, 0, 0x3FF))
    if high < last_high:
        parts.append((last_high, last_high, 0, last_low))
    found = []
    for a, b, c, d in parts:
        firsts, seconds = _hexadecimal(0xD800 + a, 0xD800 + b, 4), _hexadecimal(0xDC00 + c, 0xDC00 + d, 4)
        found.append(rf"({'|'.join(firsts)})\\u({'|'.join(seconds)})")
    return found


def _hexadecimal(first: int, last: int, digits: int) -> list[str]:
    """Return expressions for the numbers of a range, as hexadecimal digits in upper or lower case."""
    if digits == 1:
        return [_digit(first, last)]
    unit = 16 ** (digits - 1)
    high, low, last_high, last_low = first // unit, first % unit, last // unit, last % unit
    if high == last_high:
        return [_digit(high, high) + rest for rest in _hexadecimal(low, last_low, digits - 1)]
    found = []
    if low:
        found += [_digit(high, high) + rest for rest in _hexadecimal(low, unit - 1, digits - 1)]
        high += 1
    end = last_high if last_low == unit - 1 else last_high - 1
    if high <= end:
        any_rest = "[0-9a-fA-F]" if digits == 2 else f"[0-9a-fA-F]{{{digits - 1}}}"
        found.append(_digit(high, end) + any_rest)
    if end < last_high:
        found += [_digit(last_high, last_high) + rest for rest in _hexadecimal(0, last_low, digits - 1)]
    return found


def _digit(first: int, last: int) -> str:
    """Return an expression for one hexadecimal digit of a range."""
    digits = "0123456789abcdef"[first : last + 1]
    both = "".join(dict.fromkeys(digits + digits.upper()))
    return both if len(both) == 1 else f"[{both}]"
