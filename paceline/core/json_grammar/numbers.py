"""Numbers of JSON within bounds, as terminals of grammars. Every number ends: its digits are limited.

Twenty digits before and after the point are enough for all 64-bit integers and for every digit of a double. A number
within bounds may have an exponent if exactly one digit is before its point and this digit is not 0. All encoders of
JSON write exponents in this form. Numbers with a large exponent must be written in this form. They stay about within
the range of a double, because readers turn larger numbers into infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

MOST_DIGITS = 20
"""Largest number of digits before or after the point of a number that has no bounds."""
_MAX_BOUND_DIGITS = 400
INTEGER = rf"-?(0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})"
_FRACTION = rf"(\.[0-9]{{1,{MOST_DIGITS}}})?"
_DECIMAL = rf"{INTEGER}{_FRACTION}([eE]([+-]?[0-9]{{1,2}}|-[0-9]{{3}}))?"
_SCIENTIFIC = rf"[1-9]{_FRACTION}[eE][+-]?[0-9]{{1,3}}"

Bound = tuple[Fraction, bool]
"""A bound, and True if the bound itself is not allowed."""

_TOO_LARGE: Bound = (Fraction(18 * 10**307), True)
"""The upper bound of numbers with an exponent if a schema gives none. The largest double is 1.797e308."""


def fraction(value: float | int) -> Fraction:
    """Return a number of a schema as an exact fraction of its decimal digits."""
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def number(low: Bound | None, high: Bound | None, *, is_integer: bool, excluded: Sequence[Fraction] = ()) -> str | None:
    """Return a terminal for the numbers within bounds; None if no number is within them."""
    if is_integer:
        low = low and _whole(low, up=True)
        high = high and _whole(high, up=False)
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return None
    if not low and not high and not excluded:
        return f"/{INTEGER}/" if is_integer else NUMBER
    known = [_split(bound[0]) for bound in (low, high) if bound]
    digits = max([MOST_DIGITS, *(len(whole) + 1 for whole, _ in known)])
    fraction_digits = max([MOST_DIGITS, *(len(decimals) + 1 for _, decimals in known)])
    rest = "" if is_integer else rf"(\.[0-9]{{1,{fraction_digits}}})?"
    others = [f"~/{_spellings(value)}/" for value in excluded]
    plain = " & ".join([f"/-?(0|[1-9][0-9]{{0,{digits - 1}}}){rest}/", *within(low, high), *others])
    return plain if is_integer else f"({plain}) | ({_scientific(low, high, excluded)})"


def within(low: Bound | None, high: Bound | None) -> list[str]:
    """Return terminals that together allow the decimals within bounds. Their number of digits is limited elsewhere."""
    return [*([f"/{_at_least(*low)}/"] if low else []), *([f"/{_at_most(*high)}/"] if high else [])]


def _scientific(low: Bound | None, high: Bound | None, excluded: Sequence[Fraction] = ()) -> str:
    """Return a terminal for numbers with an exponent, other than 0, within bounds and about the range of doubles."""
    parts = [f"/-?{_SCIENTIFIC}/"]
    value, is_outside = low or (-_TOO_LARGE[0], True)
    above = f"{_SCIENTIFIC}|-({_scaled(-value, is_outside, above=False)})" if value < 0 else ""
    parts.append(f"/{above or _scaled(value, is_outside, above=True)}/")
    value, is_outside = high or _TOO_LARGE
    below = f"-{_SCIENTIFIC}|{_scaled(value, is_outside, above=False)}" if value > 0 else ""
    parts.append(f"/{below or f'-({_scaled(-value, is_outside, above=True)})'}/")
    for value in excluded:
        if value:
            mantissa, exponent = _normalized(abs(value))
            sign = "-" if value < 0 else ""
            parts.append(f"~/{sign}({_spellings(mantissa)})[eE]{_exponent(exponent)}/")
    return " & ".join(parts)


def _scaled(value: Fraction, is_outside: bool, *, above: bool) -> str:
    """Return an expression for magnitudes with an exponent that are above a bound or below it, or also equal to it."""
    if value == 0:
        return _SCIENTIFIC if above else _NOTHING
    mantissa, exponent = _normalized(value)
    mantissas = _above(mantissa, is_outside) if above else _below(mantissa, is_outside)
    others = _exponents(exponent, above=above)
    return f"[1-9]{_FRACTION}[eE]({others})|({mantissas})[eE]{_exponent(exponent)}"


def _normalized(value: Fraction) -> tuple[Fraction, int]:
    """Return a positive number as a mantissa from 1 on and below 10, and an exponent."""
    whole, decimals = _split(value)
    exponent = len(whole) - 1 if whole != "0" else len(decimals.lstrip("0")) - len(decimals) - 1
    return value / Fraction(10) ** exponent, exponent


def _exponent(value: int) -> str:
    """Return an expression for all spellings of an exponent."""
    return "[+-]?0+" if value == 0 else rf"\+?0*{value}" if value > 0 else f"-0*{-value}"


def _exponents(value: int, *, above: bool) -> str:
    """Return an expression for the exponents above one, or below it. Their number of digits is limited elsewhere."""
    if above:
        greater = rf"\+?0*({_above(Fraction(value), True)})" if value >= 0 else ""
        return greater or rf"\+?[0-9]+|-0*({_below(Fraction(-value), True)})"
    less = rf"-[0-9]+|\+?0*({_below(Fraction(value), True)})" if value > 0 else ""
    return less or f"-0*({_above(Fraction(-value), True)})"


def has_multiple(low: Bound | None, high: Bound | None, step: Fraction) -> bool:
    """Return whether any multiple of `step` is within the bounds."""
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


_NOTHING = r"[^\s\S]"
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
    return "|".join(ways) or _NOTHING


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


NUMBER = f"/{_DECIMAL}/ | ({_scientific(None, None)})"
"""A terminal that matches every number of JSON."""
