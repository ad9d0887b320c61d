"""Tests of whether a given value fits a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import isfinite
from typing import Any

from paceline.core.json_grammar.conjunctions import EXCLUDED, Conjunctions, Facts, key_of
from paceline.core.json_grammar.facts import (
    bounds,
    fits_patterns,
    item_schemas,
    least_and_most,
    patterns_of,
    steps,
    types_of,
    value_of,
)
from paceline.core.json_grammar.members import ObjectMembers
from paceline.core.json_grammar.numbers import fraction


def fits(value: Any, parts: Iterable[Any], conjunctions: Conjunctions) -> bool:
    """Return whether a value fits all of these schemas. Keywords that are not enforced are ignored."""
    return any(fits_facts(value, facts, conjunctions) for facts in conjunctions.alternatives(parts))


def fits_facts(value: Any, facts: Facts, conjunctions: Conjunctions) -> bool:
    """Return whether a value fits all schemas in `facts`. Keywords that are not enforced are ignored."""
    conjunctions.spend(1 + len(facts))
    types = types_of(facts, conjunctions, by_keywords=False)
    for schema in facts:
        if "const" in schema and not are_equal(value, schema["const"]):
            return False
        for keyword, is_allowed in (("enum", True), (EXCLUDED, False)):
            values = schema.get(keyword)
            if isinstance(values, list) and _lists(values, value, conjunctions) != is_allowed:
                return False
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case float() if not isfinite(value):  # JSON has no such number
            return False
        case int() | float():
            exact = fraction(value)
            low, high = bounds(facts, conjunctions)
            return (
                ("number" in types or ("integer" in types and exact.denominator == 1))
                and (low is None or exact > low[0] or (exact == low[0] and not low[1]))
                and (high is None or exact < high[0] or (exact == high[0] and not high[1]))
                and all((exact / step).denominator == 1 for _, step in steps(facts, conjunctions))
            )
        case str():
            least, most = least_and_most(facts, "Length", conjunctions)
            fitting = least <= len(value) and (most is None or len(value) <= most)
            return (
                "string" in types and fitting and fits_patterns(value, patterns_of(facts, conjunctions), conjunctions)
            )
        case list():
            least, most = least_and_most(facts, "Items", conjunctions)
            return (
                "array" in types
                and least <= len(value)
                and (most is None or len(value) <= most)
                and all(fits(item, item_schemas(facts, index), conjunctions) for index, item in enumerate(value))
                and all(_contains(schema, value, conjunctions) for schema in facts if "contains" in schema)
                and not (any(schema.get("uniqueItems") is True for schema in facts) and _has_equal(value))
            )
    members = ObjectMembers(facts, conjunctions, closes=False)
    least, most = least_and_most(facts, "Properties", conjunctions)
    names = [schema["propertyNames"] for schema in facts if "propertyNames" in schema]
    return (
        "object" in types
        and all(fits(name, names, conjunctions) for name in value)
        and set(members.required) <= value.keys()
        and least <= len(value)
        and (most is None or len(value) <= most)
        and all(fits(each, members.schemas(name, members.fitting(name)), conjunctions) for name, each in value.items())
    )


def _lists(values: list[Any], value: Any, conjunctions: Conjunctions) -> bool:
    """Return whether a value is in a list of a schema, which may have thousands of values."""
    if isinstance(value, list | dict):
        conjunctions.spend(len(values) // 8)
        return any(are_equal(value, each) for each in values)
    return key_of(value) in conjunctions.scalars_of(values)


def _contains(schema: Mapping[str, Any], items: list[Any], conjunctions: Conjunctions) -> bool:
    """Return whether as many items fit `contains` as a schema wants."""
    least, most = value_of(schema, "minContains", conjunctions), value_of(schema, "maxContains", conjunctions)
    count = sum(fits(item, [schema["contains"]], conjunctions) for item in items)
    return (1 if least is None else least) <= count and (most is None or count <= most)


def _has_equal(items: list[Any]) -> bool:
    """Return whether two items are the same."""
    return any(are_equal(one, other) for one, other in combinations(items, 2))


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal in JSON. Unlike in Python, true does not equal 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return bool(one == other)
