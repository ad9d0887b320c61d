"""Sets of characters, as ranges of their code points."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: ranges of code points, first and last, sorted and apart from each other."""

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
ALL: Ranges = ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST))
"""All characters."""


def contains(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the set of all characters in these ranges, which may overlap and be in any order."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in a set."""
    found, begin = [], 0
    for first, last in ranges:
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    if begin <= LAST:
        found.append((begin, LAST))
    return intersection(tuple(found), ALL)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return union((first, last) for first, last in both if first <= last)
