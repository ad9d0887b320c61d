"""Grammars of null, booleans, numbers and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import isfinite, lcm, nextafter
from typing import Any

from paceline.core.json_grammar.builder import Builder, Scalars
from paceline.core.json_grammar.conjunctions import EXCLUDED, Facts
from paceline.core.json_grammar.facts import bounds, least_and_most, patterns_of, steps
from paceline.core.json_grammar.languages import is_possible, is_readable_step
from paceline.core.json_grammar.numbers import Bound, fraction, has_multiple, number
from paceline.core.json_grammar.strings import Quoting

MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, read without its decimal point. The library makes a state for each remainder, so large primes
would take minutes.
"""
_BOUND = Fraction(10**15)
"""Largest absolute value of a number that must be a multiple of a step."""
_MAX_DECIMALS = 20
_STEP_STEPS = 500
"""Price of asking the library whether it can read a `multipleOf`, in steps of `Conjunctions.spend`."""


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
    if step is not None and builder.notation.hides_rules:
        builder.miss(facts, "multipleOf")  # it needs a rule of its own
        step = None
    if step is not None and not is_integer and not all(_for_library(builder, each) for each in _by_decimals(step)):
        builder.miss(facts, "multipleOf")
        step = None
    if step is None or (is_integer and step.numerator == 1):
        expression = number(low, high, is_integer=is_integer, excluded=excluded)
        if expression is None or (excluded and not is_possible(expression)):
            builder.impossible(_interval(low, high))
        else:
            found.plain[f"({expression})"] = None
        return
    if is_integer:
        step = Fraction(step.numerator)  # the whole multiples of a fraction in its lowest terms
    if not has_multiple(low, high, step):
        builder.impossible("no multiple is within its bounds")
        return
    if excluded:
        builder.miss(facts, EXCLUDED, "not")
    limits: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    for bound, closed, opened in ((low, "minimum", "exclusiveMinimum"), (high, "maximum", "exclusiveMaximum")):
        value, is_outside = bound or ((-_BOUND if closed == "minimum" else _BOUND), False)
        limits[opened if is_outside else closed] = _plain(value)
    each_step = [_for_library(builder, each) for each in _by_decimals(step) if has_multiple(low, high, each)]
    ways = [{**limits, "multipleOf": each} for each in each_step if each is not None]
    found.rules.append(builder.rules.add(builder.rules.new(), *([f"%json {json.dumps(way)}"] for way in ways)))


def _by_decimals(step: Fraction) -> list[Fraction]:
    """Return the numbers of which the multiples of a number are multiples if they have fewer decimals than it.

    The library reads a multiple only if it has no decimals, or as many as `multipleOf`: with 0.25 it takes 1.50 alone,
    and with 0.5 it takes 1.5.
    """
    found = {step: None}
    for decimals in range(_MAX_DECIMALS):
        if (step * 10**decimals).denominator == 1:
            break
        found[_common_multiple(step, Fraction(1, 10**decimals))] = None
    return list(found)


def _for_library(builder: Builder, step: Fraction) -> int | float | None:
    """Return a number that the library reads as this one; None if there is none.

    The library multiplies a number by ten until no decimals are left. Because of rounding, 0.07 and 1.1 get too many
    digits then. Often a neighbouring float gives the wanted number.
    """
    if step.denominator == 1:
        return step.numerator
    if step not in builder.steps:
        builder.steps[step] = None
        exact = float(step)
        for each in (exact, nextafter(exact, 0), nextafter(exact, 1e308)):
            builder.conjunctions.spend(_STEP_STEPS)
            if is_readable_step(each):
                builder.steps[step] = each
                break
    return builder.steps[step]


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
