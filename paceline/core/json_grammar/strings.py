"""JSON strings as regular expressions, with every spelling that RFC 8259 allows.

Escapes of surrogates come only in pairs, because half a pair is no character. Characters of a text that is given, such
as a name or a constant, are spelled as encoders of JSON spell them: an escape is possible for a character outside
ASCII, and for those that some encoders escape. An escape for another character would only lead a model astray.
"""

from __future__ import annotations

import functools

from paceline.core.json_grammar.ranges import ALL, LAST, SURROGATES, Ranges, contains, intersection

_BEYOND = 0x10000
_RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST))
_SHORT = {'"': '"', "\\": r"\\", "/": r"\/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Characters with a short escape, and the escape's letter in a regular expression."""

_ESCAPED_BY_ENCODERS: Ranges = ((0, 0x1F), (0x22, 0x22), (0x26, 0x27), (0x2F, 0x2F), (0x3C, 0x3C), (0x3E, 0x3E))
_ESCAPED_BY_ENCODERS += ((0x5C, 0x5C), (0x7F, LAST))

_MANY_RANGES = 64
"""A set of more ranges, such as all letters, has only the characters themselves: the escapes would fill a page."""

_BMP_ESCAPE = r"[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
_PAIR_ESCAPE = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
CHARACTER = rf'([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|u({_BMP_ESCAPE}|{_PAIR_ESCAPE})))'
"""A regular expression for one character in any spelling."""


CHARACTER_RULE = f"CHARACTER: /{CHARACTER}/"
"""The terminal of which the texts of `string_of` are made. A grammar with such texts must have it."""


def string_of(low: int, high: int | None) -> str:
    """Return a terminal for JSON strings by their number of characters."""
    times = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
    return rf'"\"" CHARACTER{times} "\""' if high != 0 else r'"\"\""'


def spelled(text: str, every_way: bool = False) -> str:
    """Return a regular expression for a text within a JSON string.

    Args:
        every_way: allow an escape for every character, to exclude all spellings of the text.
    """
    return "".join(character_set(((ord(each), ord(each)),), every_way) for each in text)


@functools.lru_cache(maxsize=4096)
def character_set(ranges: Ranges, every_way: bool = False) -> str:
    """Return a regular expression for one character of a set within a JSON string; one that matches nothing if empty.

    A set that goes beyond ASCII allows every spelling of its members, because it is free text.
    """
    if intersection(ranges, ALL) == ALL:
        return CHARACTER
    ways = []
    if raw := intersection(ranges, _RAW):
        ways.append(_class(raw))
    if short := [letter for character, letter in _SHORT.items() if contains(ranges, ord(character))]:
        ways.append(rf"\\[{''.join(short)}]")
    if not every_way and (not ranges or ranges[-1][1] - ranges[-1][0] < 256):
        ranges = intersection(ranges, _ESCAPED_BY_ENCODERS)
    if len(ranges) <= _MANY_RANGES and (codes := _codes(intersection(ranges, ALL))):
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
    """Return expressions for what follows `\\u` in escapes of characters."""
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
