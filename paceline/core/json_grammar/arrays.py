"""Grammars of arrays."""

from __future__ import annotations

from paceline.core.json_grammar.builder import Builder
from paceline.core.json_grammar.conjunctions import Facts
from paceline.core.json_grammar.facts import item_schemas, least_and_most, prefix_length
from paceline.core.json_grammar.rules import Element, Repeat

_MAX_COUNT = 50
"""Largest value of `minContains` that is enforced."""


def array_ways(builder: Builder, facts: Facts) -> list[list[Element]]:
    """Return the alternatives of a rule for the arrays that fit the schemas in `facts`."""
    low, high = least_and_most(facts, "Items", builder.conjunctions)
    if high is not None and low > high:
        builder.impossible(f"minItems ({low}) is greater than maxItems ({high})")
        return []
    if any(schema.get("uniqueItems") is True for schema in facts) and (high is None or high > 1):
        builder.miss(facts, "uniqueItems")
    first = prefix_length(facts)
    rest = builder.value(item_schemas(facts, None))
    if contained := _contained(builder, facts, rest, low, high if first == 0 else 0):
        return contained
    count = first if high is None else min(first, high)
    most = None if high is None else high - count
    least = max(0, low - count)
    if count == 0:
        return [builder.list_of((rest,), least, most)]
    notation = builder.notation
    tail: list[Element] = [Repeat((notation.comma, rest), least, most)]
    for index in range(count - 1, -1, -1):
        item = builder.value(item_schemas(facts, index))
        elements = [item, *tail] if index == 0 else [notation.comma, item, *tail]
        tail = elements if index < low else [builder.rules.add(builder.rules.new(), elements, [])]
    return [[notation.opening_list, *tail, notation.closing_list]]


def _contained(builder: Builder, facts: Facts, rest: Element, low: int, high: int | None) -> list[list[Element]]:
    """Return alternatives for an array some of whose items fit a schema; none if the facts have no such condition."""
    given = [schema for schema in facts if "contains" in schema and schema.get("minContains") != 0]
    for schema in facts:
        if "maxContains" in schema or ("contains" in schema and schema not in given[:1] and schema in given):
            builder.conjunctions.miss(schema, "contains")
    if not given:
        return []
    count = given[0].get("minContains", 1)
    if high is not None or not isinstance(count, int) or not 0 < count <= _MAX_COUNT or low > count:
        builder.conjunctions.miss(given[0], "contains")
        return []
    found = builder.value([*item_schemas(facts, None), given[0]["contains"]])
    notation = builder.notation
    others = Repeat((rest, notation.comma), 0, None)
    again = Repeat((notation.comma, others, found), count - 1, count - 1)
    more = Repeat((notation.comma, rest), 0, None)
    return [[notation.opening_list, others, found, again, more, notation.closing_list]]
