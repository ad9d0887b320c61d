"""Grammars of null, booleans, numbers and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from math import isfinite, lcm
from typing import Any

from paceline.core.json_grammar.builder import Builder, Scalars
from paceline.core.json_grammar.conjunctions import EXCLUDED, Facts
from paceline.core.json_grammar.facts import bounds, least_and_most, patterns_of, steps
from paceline.core.json_grammar.languages import is_possible
from paceline.core.json_grammar.multiples import multiples
from paceline.core.json_grammar.numbers import MOST_DIGITS, Bound, fraction, has_multiple, number, within
from paceline.core.json_grammar.strings import Quoting

MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, read without its decimal point. Terminals are made for each remainder."""
_WANTED_DIGITS = 16, 12, 9, 7
"""Largest numbers of digits before the point of multiples without bounds, the best first."""


def add_scalars(builder: Builder, facts: Facts, types: frozenset[str], found: Scalars) -> None:
    """Add to `found` the ways to write the nulls, booleans, numbers and texts that fit the schemas in `facts`."""
    excluded = _excluded(facts)
    if "null" in types and None not in excluded:
        found.plain[builder.notation.words[None]] = None
    if "boolean" in types:
        for value in (True, False):
            if not _has(excluded, value):
                found.plain[builder.notation.words[value]] = None
    if types & {"number", "integer"}:
        _add_numbers(builder, facts, types, found)
    if "string" in types:
        add_texts(builder, facts, builder.notation.quotings, found)


def _excluded(facts: Facts) -> list[Any]:
    return [value for schema in facts for value in schema.get(EXCLUDED, ())]


def _add_numbers(builder: Builder, facts: Facts, types: frozenset[str], found: Scalars) -> None:
    is_integer = "number" not in types
    excluded = [fraction(each) for each in _excluded(facts) if _is_number(each)]
    low, high = bounds(facts, builder.conjunctions)
    step = _step(builder, facts)
    if is_integer and step is not None:
        step = Fraction(step.numerator)  # the whole multiples of a fraction in its lowest terms
    expression: str | None
    if step is None or (is_integer and step == 1):
        expression = number(low, high, is_integer=is_integer, excluded=excluded)
    elif not has_multiple(low, high, step):
        builder.impossible("no multiple is within its bounds")
        return
    elif (expression := _multiples(builder, step, low, high, 0 if is_integer else MOST_DIGITS)) is None:
        builder.miss(facts, "multipleOf")
        expression = number(low, high, is_integer=is_integer, excluded=excluded)
    elif excluded:
        builder.miss(facts, EXCLUDED, "not")
        excluded = []
    if expression is None or (excluded and not is_possible(expression)):
        builder.impossible(_interval(low, high))
    else:
        found.plain[f"({expression})"] = None


def _multiples(builder: Builder, step: Fraction, low: Bound | None, high: Bound | None, decimals: int) -> str | None:
    """Return a terminal for the multiples of `step` within bounds that have at most so many decimals.

    Return None if it would be too large. Multiples of a large number have fewer digits than others, so that there is a
    terminal for them.
    """
    for digits in _digits(low, high):
        most = Fraction(10**digits), True
        if has_multiple(low or (-most[0], True), high or most, step):
            expression = builder.with_parts(partial(multiples, step, digits, decimals))
            if expression is not None:
                return " & ".join([f"({expression})", *within(low, high)])
    return None


def _digits(low: Bound | None, high: Bound | None) -> list[int]:
    """Return the largest numbers of digits before the point to try, in order; none if all multiples have very many."""
    nearest = low[0] if low and low[0] > 0 else -high[0] if high and high[0] < 0 else Fraction(0)
    least = len(str(int(nearest))) + 1
    most = max(len(str(abs(int(bound[0])))) for bound in (low, high)) if low and high else None
    sizes = {max(each, least) if most is None else min(most, max(each, least)) for each in _WANTED_DIGITS}
    return sorted(sizes, reverse=True) if least <= MOST_DIGITS else []


def _step(builder: Builder, facts: Facts) -> Fraction | None:
    """Return the number of which a number must be a multiple; None if there is none."""
    step: Fraction | None = None
    for schema, other in steps(facts, builder.conjunctions):
        both = other if step is None else _common_multiple(step, other)
        if _coefficient(both) > MAX_MULTIPLE:
            reason = f"multipleOf {schema['multipleOf']} takes too long to enforce; it can be at most {MAX_MULTIPLE}"
            builder.conjunctions.refuse(schema, "multipleOf", reason)
        else:
            step = both
    return step


def add_texts(
    builder: Builder,
    facts: Facts,
    quotings: Iterable[Quoting],
    found: Scalars,
    others: Callable[[Quoting], list[tuple[str, bool]]] = lambda quoting: [],
) -> None:
    """Add to `found` terminals for the texts that fit the schemas in `facts`.

    Args:
        others: returns further terminals for a quoting, each with True if a text must match it, else False.
    """
    low, high = least_and_most(facts, "Length", builder.conjunctions)
    if high is not None and low > high:
        builder.impossible(f"minLength ({low}) is greater than maxLength ({high})")
        return
    excluded = [value for value in _excluded(facts) if isinstance(value, str)]
    for quoting in quotings:
        terminals = [*patterns_of(facts, builder.conjunctions, quoting), *others(quoting)]
        terminals += [quoting.excluded(excluded)] if excluded else []
        expression = quoting.text(terminals, low, high)
        if not terminals or is_possible(f'({expression}) "."'):  # it may match the empty text
            found.add_text(quoting, expression)
        else:
            builder.impossible("no text fits pattern, format and length together")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _has(values: Sequence[Any], value: bool) -> bool:
    return any(each is value for each in values)


def _interval(low: Bound | None, high: Bound | None) -> str:
    return (
        f"the minimum ({_plain(low[0]) if low else ''}) is greater than the maximum ({_plain(high[0]) if high else ''})"
    )


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    denominator = lcm(one.denominator, other.denominator)
    return Fraction(lcm(int(one * denominator), int(other * denominator)), denominator)


def _coefficient(value: Fraction) -> int:
    """Return a decimal fraction without its point: 25 for 0.25, but 1000 for 1000."""
    while value.denominator > 1 and value.numerator < MAX_MULTIPLE**2:
        value *= 10
    return value.numerator
