"""Numbers of JSON within bounds, as regular expressions. Every number ends: its digits are limited.

Twenty digits before and after the point are enough for all 64-bit integers and for every digit of a double.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

_DIGITS = 20
_MAX_BOUND_DIGITS = 400
INTEGER = rf"-?(0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
_FRACTION = rf"(\.[0-9]{{1,{_DIGITS}}})?"
NUMBER = rf"{INTEGER}{_FRACTION}([eE][+-]?[0-9]{{1,3}})?"

Bound = tuple[Fraction, bool]
"""A bound, and whether the bound itself is outside."""


def fraction(value: float | int) -> Fraction:
    """Return a number of a schema as its digits say it."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def number(low: Bound | None, high: Bound | None, *, is_integer: bool, excluded: Sequence[Fraction] = ()) -> str | None:
    """Return a terminal for the numbers within bounds; None if the bounds leave none.

    Numbers have no exponent if there are bounds or excluded numbers.
    """
    if is_integer:
        low = low and _whole(low, up=True)
        high = high and _whole(high, up=False)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    if not low and not high and not excluded:
        return f"/{INTEGER if is_integer else NUMBER}/"
    known = [_split(bound[0]) for bound in (low, high) if bound]
    digits = max([_DIGITS, *(len(whole) + 1 for whole, _ in known)])
    fraction_digits = max([_DIGITS, *(len(decimals) + 1 for _, decimals in known)])
    rest = "" if is_integer else rf"(\.[0-9]{{1,{fraction_digits}}})?"
    parts = [f"/-?(0|[1-9][0-9]{{0,{digits - 1}}}){rest}/"]
    if low:
        parts.append(f"/{_at_least(*low)}/")
    if high:
        parts.append(f"/{_at_most(*high)}/")
    parts += [f"~/{_spellings(value)}/" for value in excluded]
    return " & ".join(parts)


def has_multiple(low: Bound | None, high: Bound | None, step: Fraction) -> bool:
    """Return whether a multiple of a number is within bounds."""
    if low is None or high is None:
        return True
    first = -(-low[0] // step) * step
    if low[1] and first == low[0]:
        first += step
    return first < high[0] or (first == high[0] and not high[1])


def _whole(bound: Bound, *, up: bool) -> Bound:
    """Return a bound of integers as an integer that is inside."""
    value, is_outside = bound
    nearest = Fraction(-(-value // 1) if up else value // 1)
    if is_outside and nearest == value:
        nearest += 1 if up else -1
    return nearest, False


def _at_least(value: Fraction, is_outside: bool) -> str:
    """Return an expression for decimals that are not below a bound. Their number of digits is limited elsewhere."""
    if value > 0 or (value == 0 and is_outside):
        return _above(value, is_outside)
    if value == 0:
        return rf"{_ANY_MAGNITUDE}|-0(\.0+)?"
    return f"{_ANY_MAGNITUDE}|-({_below(-value, is_outside)})"


def _at_most(value: Fraction, is_outside: bool) -> str:
    if value < 0 or (value == 0 and is_outside):
        return f"-({_above(-value, is_outside)})"
    return f"-{_ANY_MAGNITUDE}|{_below(value, is_outside)}"


_ANY_REST = r"(\.[0-9]+)?"
_ANY_MAGNITUDE = rf"[0-9]+{_ANY_REST}"


def _above(value: Fraction, is_outside: bool) -> str:
    """Return an expression for decimals without a sign that are above a bound, or also equal to it."""
    whole, decimals = _split(value)
    longer = f"[1-9][0-9]{{{len(whole)},}}" if whole != "0" else "[1-9][0-9]*"
    ways = [longer + _ANY_REST]
    if whole != "0":
        ways += [head + rest + _ANY_REST for head, rest in _unequal(whole, above=True)]
    ways += [rf"{whole}\.{head}[0-9]*" for head, _ in _unequal(decimals, above=True)]
    more = r"0*[1-9][0-9]*" if is_outside else r"[0-9]*"
    ways.append(rf"{whole}\.{decimals}{more}" if decimals or is_outside else whole + _ANY_REST)
    return "|".join(ways)


def _below(value: Fraction, is_outside: bool) -> str:
    """Return an expression for decimals without a sign that are below a bound, or also equal to it."""
    whole, decimals = _split(value)
    ways = []
    if len(whole) > 1:
        ways.append(f"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){_ANY_REST}")
    ways += [head + rest + _ANY_REST for head, rest in _unequal(whole, above=False, leading=len(whole) > 1)]
    if decimals:
        ways += [whole, *(rf"{whole}\.{head}[0-9]*" for head, _ in _unequal(decimals, above=False))]
        ways += [rf"{whole}\.{decimals[:length]}" for length in range(1, len(decimals))]
    if not is_outside:
        ways.append(rf"{whole}\.{decimals}0*" if decimals else rf"{whole}(\.0+)?")
    return "|".join(ways) or r"[^\s\S]"


def _unequal(digits: str, *, above: bool, leading: bool = False) -> list[tuple[str, str]]:
    """Return beginnings of digits that are greater or less at their last digit, and expressions for the rest.

    Args:
        leading: the first digit cannot be 0.
    """
    found = []
    for place, digit in enumerate(digits):
        first, last = (int(digit) + 1, 9) if above else (1 if leading and place == 0 else 0, int(digit) - 1)
        if first <= last:
            rest = len(digits) - place - 1
            found.append((f"{digits[:place]}[{first}-{last}]", f"[0-9]{{{rest}}}" if rest else ""))
    return found


def _split(value: Fraction) -> tuple[str, str]:
    """Return the digits of a number's magnitude before and after the point."""
    value = abs(value)
    whole, rest = str(value // 1), value % 1
    digits = ""
    while rest and len(digits) < _MAX_BOUND_DIGITS:
        rest *= 10
        digits += str(rest // 1)
        rest %= 1
    return whole, digits


def _spellings(value: Fraction) -> str:
    """Return an expression for all spellings of a number that have no exponent."""
    whole, decimals = _split(value)
    sign = "-" if value < 0 else "-?" if value == 0 else ""
    return rf"{sign}{whole}\.{decimals}0*" if decimals else rf"{sign}{whole}(\.0+)?"
