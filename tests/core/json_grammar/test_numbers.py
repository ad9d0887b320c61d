"""Numbers within bounds, and all numbers end."""

from __future__ import annotations

import contextlib
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.errors import ConstraintError
from paceline.core.grammar import unenforced
from paceline.core.types import ConstraintKind
from tests.core.json_grammar.matching import accepts

_BOUNDS = st.none() | st.integers(-120, 1200) | st.decimals(-20, 20, places=3).map(float) | st.sampled_from([0, 1e-7])
_EXPONENTS = st.integers(-9, 9)
_DECIMALS = st.decimals(-1300, 1300, places=3).map(lambda value: format(value.normalize(), "f"))


@given(_BOUNDS, _BOUNDS, st.booleans(), st.booleans(), st.lists(_DECIMALS, min_size=1, max_size=8))
def test_bounds(low: Any, high: Any, is_open: bool, is_integer: bool, texts: list[str]) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum") if is_open else ("minimum", "maximum")
    schema: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    schema |= {name: value for name, value in zip(names, (low, high)) if value is not None}
    exact = [None if bound is None else Fraction(repr(bound)) for bound in (low, high)]
    texts += [str(bound) for bound in (low, high) if isinstance(bound, int)]

    def fits(text: str) -> bool:
        value = Fraction(text)
        inside = all(
            bound is None or (value - bound) * sign > 0 or (value == bound and not is_open)
            for bound, sign in zip(exact, (1, -1))
        )
        return inside and (not is_integer or "." not in text)

    texts = [text for text in texts if text != "-0"]
    wanted = [fits(text) for text in texts]
    if not any(wanted):
        with contextlib.suppress(ConstraintError):  # perhaps no number is within the bounds
            assert accepts(schema, *texts) == wanted
    else:
        assert accepts(schema, *texts) == wanted


@example(0, None, True, [Decimal("1e-5"), Decimal("-1e-5"), Decimal("2e20")])
@given(
    _BOUNDS,
    _BOUNDS,
    st.booleans(),
    st.lists(
        st.builds(lambda digits, exponent: Decimal(digits).scaleb(exponent), st.integers(-9999, 9999), _EXPONENTS)
    ),
)
def test_bounds_hold_for_numbers_with_exponents(low: Any, high: Any, is_open: bool, values: list[Decimal]) -> None:
    """A learning rate above 0 is often written 1e-5. Without exponents, a model could only end it as 1."""
    names = ("exclusiveMinimum", "exclusiveMaximum") if is_open else ("minimum", "maximum")
    schema: dict[str, Any] = {"type": "number", "not": {"enum": [0.02, -3]}}
    schema |= {name: value for name, value in zip(names, (low, high)) if value is not None}
    bounds = [None if bound is None else Decimal(repr(bound)) for bound in (low, high)]
    numbers = [value for value in [*values, *bounds, Decimal("0.02"), Decimal(-3)] if value]

    def fits(value: Decimal) -> bool:
        return value not in (Decimal("0.02"), -3) and all(
            bound is None or (value - bound) * sign > 0 or (value == bound and not is_open)
            for bound, sign in zip(bounds, (1, -1))
        )

    wanted = [fits(value) for value in numbers]
    with contextlib.suppress(ConstraintError) if not any(wanted) else contextlib.nullcontext():
        assert accepts(schema, *(f"{value:.4e}" for value in numbers)) == wanted


def test_exponents_have_the_spellings_of_encoders() -> None:
    schema = {"type": "number", "minimum": -5, "maximum": 1e300}
    assert accepts(schema, "1e-05", "1E+05", "1e5", "-1.5e0", "-5e+00", "5e-324", "1e300") == [True] * 7
    assert accepts(schema, "-6e+00", "1.1e300", "1e", "1e+") == [False] * 4
    assert accepts({"type": "integer", "minimum": 0}, "1e5") == [False]


def test_no_number_becomes_infinite() -> None:
    for schema in ({"type": "number"}, {"type": "number", "minimum": 0}, {}):
        assert accepts(schema, "1e308", "1.7e+308", "2e308", "9e999", "12e308") == [True, True, False, False, False]
    assert accepts({"type": "number"}, "12e5", "0.5e-7", "0e0", "-2e308") == [True, True, True, False]


def test_every_number_ends() -> None:
    for schema in ({"type": "integer"}, {"type": "number"}, {"type": "number", "minimum": 0}, {}):
        assert accepts(schema, "1" * 20, "1" * 21) == [True, False]
    assert accepts({"type": "number"}, "0." + "1" * 20, "0." + "1" * 21, "1e308", "1e3080") == [
        True,
        False,
        True,
        False,
    ]
    assert accepts({"type": "number", "multipleOf": 0.5}, "1.5", "1." + "5" * 30) == [True, False]


def test_64_bit_integers_and_doubles_are_allowed() -> None:
    for value in (2**64 - 1, -(2**63), 5e-324, 1.7976931348623157e308, 0.1 + 0.2):
        assert accepts({"type": "number"}, json.dumps(value)) == [True]


def test_multiples() -> None:
    assert accepts({"type": "integer", "multipleOf": 3}, "3", "4", "-12") == [True, False, True]
    both = {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer", "maximum": 50}
    assert accepts(both, "12", "8", "18", "60") == [True, False, False, False]
    assert accepts({"type": "integer", "multipleOf": 1.5}, "3", "1", "2") == [True, False, False]


def test_multiples_may_leave_out_zeros_at_the_end() -> None:
    assert accepts({"multipleOf": 0.25}, "1.50", "1.5", "1", "-0.5", "0", "1.25", "1.2", "1.255") == [
        *([True] * 6),
        False,
        False,
    ]
    assert accepts({"multipleOf": 0.25, "minimum": 1.1, "maximum": 1.4}, "1.25", "1.5", "1") == [True, False, False]


@example(230, 4, 230)  # 0.023, whose multiples of two decimals are those of 0.23, which the library cannot read
@example(7, 2, 3)
@example(29, 2, 10)
@example(11, 1, -1)
@given(st.integers(1, 999), st.integers(0, 4), st.integers(-9999, 9999))
def test_every_multiple_is_allowed_as_json_writes_it(coefficient: int, places: int, count: int) -> None:
    step = Decimal(coefficient).scaleb(-places)
    schema = {"type": "number", "multipleOf": float(step)}
    other = step * count + Decimal(1).scaleb(-places)
    is_enforced = not unenforced(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert is_enforced or float(step) not in (0.07, 0.29, 1.1, 0.01, 0.05)
    texts = [format(each.normalize(), "f") for each in (step * count, other)]
    assert accepts(schema, *texts) == [True, coefficient == 1 or not is_enforced]


@pytest.mark.parametrize("step", [7, 64, 365, 997, 1001, 9973, 0.53, 12.5, 0.001024])
def test_multiples_of_any_number_are_enforced(step: float) -> None:
    exact = Decimal(str(step))
    texts = [format(each, "f") for each in (exact * 432, exact * 432 + exact / 2, -exact, exact / 2)]
    assert accepts({"type": "number", "multipleOf": step}, *texts) == [True, False, True, False]
    assert not unenforced(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "number", "multipleOf": step}))


def test_multiples_within_bounds() -> None:
    schema = {"type": "integer", "multipleOf": 997, "minimum": 10**12}
    assert accepts(schema, str(997 * (10**12 // 997 + 1)), str(997 * 10**8)) == [True, False]
    assert accepts({"type": "number", "multipleOf": 0.25, "exclusiveMaximum": 1}, "0.75", "1", "1.0", "-7") == [
        True,
        False,
        False,
        True,
    ]


def test_multiples_with_far_bounds() -> None:
    assert accepts({"type": "integer", "multipleOf": 7, "maximum": 1e300}, "14", "15") == [True, False]
    far = {"type": "integer", "multipleOf": 7, "minimum": 1e40}
    assert [each.keyword for each in unenforced(ConstraintKind.JSON_SCHEMA, json.dumps(far))] == ["multipleOf"]


def test_more_multiples_than_a_grammar_can_hold_are_said() -> None:
    steps = (997, 9973, 1009, 8191)
    schema = {"type": "object", "properties": {str(step): {"type": "integer", "multipleOf": step} for step in steps}}
    assert {each.keyword for each in unenforced(ConstraintKind.JSON_SCHEMA, json.dumps(schema))} == {"multipleOf"}
    assert accepts(schema, '{"997": 1994, "1009": 3}', '{"997": 1995}') == [True, False]


def test_equal_multiples_share_their_terminals() -> None:
    prices = {f"price{number}": {"type": "number", "multipleOf": 0.05} for number in range(400)}
    assert not unenforced(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": prices}))


def test_white_space_may_stand_before_multiples() -> None:
    """The library's own multiples are grammars inside the grammar: it panics at white space before one that may be left
    out, and forbids it before all others.
    """
    listed = {"type": "array", "items": {"type": "number", "multipleOf": 0.25}}
    assert accepts(listed, "[ 1.5 , 2 ]", "[" + " " * 32 + "1.5]", "[]") == [True] * 3
    assert accepts({"type": "object", "properties": {"a": {"multipleOf": 7}}}, '{ "a" : 21 }') == [True]


def test_numbers_that_are_excluded() -> None:
    schema = {"type": "integer", "minimum": 1, "maximum": 3, "not": {"enum": [1, 2]}}
    assert accepts(schema, "1", "2", "3") == [False, False, True]
