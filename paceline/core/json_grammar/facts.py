"""What facts say about one kind of value: numbers, texts, and the schemas that govern the members of an object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import combinations
from math import isfinite
from typing import Any

from paceline.core.json_grammar.conjunctions import EXCLUDED, EXCLUDED_TYPES, Conjunctions, Facts
from paceline.core.json_grammar.formats import FORMATS
from paceline.core.json_grammar.numbers import Bound, fraction
from paceline.core.json_grammar.patterns import PatternError, UnsupportedPatternError, translated

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_KINDS = {
    "object": "properties patternProperties additionalProperties propertyNames required minProperties maxProperties",
    "array": "items prefixItems minItems maxItems uniqueItems contains",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_MEMBER_STEPS = 3
"""Steps of `Conjunctions.spend` for a member of an object."""
_KIND_OF_KEYWORD = {keyword: kind for kind, keywords in _KINDS.items() for keyword in keywords.split()}


def types_of(facts: Facts, conjunctions: Conjunctions, *, by_keywords: bool) -> frozenset[str]:
    """Return the types that facts allow. "number" stands for all numbers, "integer" for those without a fraction.

    Args:
        by_keywords: without a type, keywords such as `properties` say what is meant.
    """
    allowed = TYPES
    for schema in facts:
        if "type" in schema:
            allowed &= _types(schema, conjunctions)
        if EXCLUDED_TYPES in schema:
            excluded = set(schema[EXCLUDED_TYPES])
            allowed -= excluded | ({"integer"} if "number" in excluded else set())
    said = any("type" in schema or "enum" in schema or "const" in schema for schema in facts)
    if by_keywords and not said:
        kinds = {_KIND_OF_KEYWORD[keyword] for schema in facts for keyword in schema if keyword in _KIND_OF_KEYWORD}
        kinds |= {"integer"} if "number" in kinds else set()
        allowed &= kinds or allowed
    return allowed - {"integer"} if "number" in allowed else allowed


def _types(schema: Mapping[str, Any], conjunctions: Conjunctions) -> frozenset[str]:
    given = schema["type"]
    names = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    for name in names if names else [given]:
        if name not in TYPES if isinstance(name, str) else True:
            reason = f'"type" cannot be "{name}"; JSON has string, number, integer, boolean, null, array, object'
            conjunctions.refuse(schema, "type", reason)
            return TYPES
    return frozenset(names) | ({"integer"} if "number" in names else frozenset())


def value_of(schema: Mapping[str, Any], keyword: str, conjunctions: Conjunctions) -> int | float | None:
    """Return a keyword's number; None if it is not there."""
    value = schema.get(keyword)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if keyword in schema:
        conjunctions.refuse(schema, keyword, f'"{keyword}" must be a number')
    return None


def least_and_most(facts: Facts, what: str, conjunctions: Conjunctions) -> tuple[int, int | None]:
    """Return the limits of a count, such as of `Items` or `Length`."""
    counts: dict[str, list[int]] = {"min": [], "max": []}
    for side, found in counts.items():
        for schema in facts:
            value = value_of(schema, side + what, conjunctions)
            if value is None:
                continue
            if value < 0 or value % 1 != 0:  # infinity is no whole number either
                conjunctions.refuse(schema, side + what, f'"{side}{what}" must be a positive integer or 0')
            else:
                found.append(int(value))
    return max(counts["min"], default=0), min(counts["max"], default=None)


def bounds(facts: Facts, conjunctions: Conjunctions) -> tuple[Bound | None, Bound | None]:
    """Return the bounds of a number."""
    lows: list[Bound] = []
    highs: list[Bound] = []
    for schema in facts:
        for found, closed, opened in (
            (lows, "minimum", "exclusiveMinimum"),
            (highs, "maximum", "exclusiveMaximum"),
        ):
            excludes = schema.get(opened) is True  # as in draft 4
            value = value_of(schema, closed, conjunctions)
            if value is not None and abs(value) != float("inf"):
                found.append((fraction(value), excludes))
            if not isinstance(schema.get(opened), bool):
                value = value_of(schema, opened, conjunctions)
                if value is not None and abs(value) != float("inf"):
                    found.append((fraction(value), True))
    low = max(lows, key=lambda bound: (bound[0], bound[1])) if lows else None
    high = min(highs, key=lambda bound: (bound[0], not bound[1])) if highs else None
    return low, high


def steps(facts: Facts, conjunctions: Conjunctions) -> list[tuple[Mapping[str, Any], Fraction]]:
    """Return the numbers of which a number must be a multiple, with their schemas."""
    found = []
    for schema in facts:
        value = value_of(schema, "multipleOf", conjunctions)
        if value is not None and value != 0 and abs(value) != float("inf"):
            found.append((schema, fraction(abs(value))))
    return found


def patterns_of(facts: Facts, conjunctions: Conjunctions) -> list[tuple[str, bool]]:
    """Return terminals for JSON strings, and whether a string must match it, from patterns and formats."""
    found: list[tuple[str, bool]] = []
    for schema in facts:
        if "pattern" in schema:
            found += pattern_terminals(schema, "pattern", schema["pattern"], conjunctions)
        name = schema.get("format")
        if isinstance(name, str) and name in FORMATS:
            found += pattern_terminals(schema, "format", FORMATS[name], conjunctions)
        elif "format" in schema:
            conjunctions.miss(schema, "format")
    return list(dict.fromkeys(found))


def pattern_terminals(
    schema: object, keyword: str, pattern: object, conjunctions: Conjunctions, *, every_way: bool = False
) -> list[tuple[str, bool]]:
    """Return terminals for a pattern, and whether a string must match; none if it cannot be enforced."""
    try:
        if not isinstance(pattern, str):
            raise PatternError("it must be a string")
        found = translated(pattern, every_way)
    except UnsupportedPatternError:
        conjunctions.miss(schema, keyword)
        return []
    except PatternError as error:
        conjunctions.refuse(schema, keyword, f"a regular expression cannot be read: {error}")
        return []
    return [(f'/"{text}"/', True) for text in found.wanted] + [(f'/"{text}"/', False) for text in found.unwanted]


def combined(terminals: Iterable[tuple[str, bool]], *first: str) -> str:
    """Return a terminal for texts that match these terminals, or do not match them, as it is said."""
    wanted = [*first, *(text for text, is_wanted in terminals if is_wanted)]
    return " & ".join([*wanted, *(f"~{text}" for text, is_wanted in terminals if not is_wanted)])


class Members:
    """The schemas that govern the members of an object.

    Args:
        closes: an object has only the members that its schemas name, unless they say something of others.
    """

    def __init__(self, facts: Facts, conjunctions: Conjunctions, *, closes: bool) -> None:
        self._conjunctions = conjunctions
        self._facts = facts
        self._patterns = [_mapping(schema, "patternProperties", conjunctions) for schema in facts]
        self._properties = [_mapping(schema, "properties", conjunctions) for schema in facts]
        self.required = list(dict.fromkeys(name for schema in facts for name in _required(schema, conjunctions)))
        self._required = frozenset(self.required)
        self.names = list(dict.fromkeys([*(name for each in self._properties for name in each), *self.required]))
        self.patterns: dict[str, list[tuple[str, bool]]] = {}
        """The terminals of each pattern for names."""
        for schema, own in zip(facts, self._patterns):
            for pattern in own:
                self.patterns[pattern] = pattern_terminals(schema, "patternProperties", pattern, conjunctions)
        said = any("additionalProperties" in schema or "unevaluatedProperties" in schema for schema in facts)
        names_some = any("properties" in schema or "patternProperties" in schema for schema in facts)
        self._is_closed = closes and names_some and not said
        conjunctions.spend(_MEMBER_STEPS * len(self.names) * len(facts))

    def schemas(self, name: str | None, fitting: frozenset[str]) -> list[Any]:
        """Return the schemas for the member of a name; for a name that is not listed, None.

        Args:
            fitting: the patterns that the name fits.
        """
        found: list[Any] = []
        is_evaluated = False
        for schema, properties, patterns in zip(self._facts, self._properties, self._patterns):
            own = [properties[name]] if name is not None and name in properties else []
            own += [value for pattern, value in patterns.items() if pattern in fitting]
            own = own or ([schema["additionalProperties"]] if "additionalProperties" in schema else [])
            is_evaluated = is_evaluated or bool(own)
            found += own
        if not is_evaluated:
            found += [schema["unevaluatedProperties"] for schema in self._facts if "unevaluatedProperties" in schema]
            found += [False] if self._is_closed and name not in self._required else []
        return found

    def fitting(self, name: str) -> frozenset[str]:
        """Return the patterns that a name fits."""
        patterns = self.patterns.items()
        return frozenset(p for p, terminals in patterns if fits_patterns(name, terminals, self._conjunctions))


def _mapping(schema: Mapping[str, Any], keyword: str, conjunctions: Conjunctions) -> Mapping[str, Any]:
    value = schema.get(keyword, {})
    if isinstance(value, dict):
        return value
    conjunctions.refuse(schema, keyword, f"{keyword} must be an object")
    return {}


def _required(schema: Mapping[str, Any], conjunctions: Conjunctions) -> list[str]:
    value = schema.get("required", [])
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    if not isinstance(value, bool):  # draft 3 says it of a property
        conjunctions.refuse(schema, "required", '"required" must be a list of names')
    return []


def fits_patterns(text: str, terminals: Iterable[tuple[str, bool]], conjunctions: Conjunctions) -> bool:
    """Return whether a text fits the terminals of patterns."""
    spelling = json.dumps(text, ensure_ascii=False)
    return all(conjunctions.matches(terminal, spelling) == is_wanted for terminal, is_wanted in terminals)


def fits(value: Any, parts: Iterable[Any], conjunctions: Conjunctions) -> bool:
    """Return whether a value fits all of several schemas, as far as they are enforced."""
    return any(fits_facts(value, facts, conjunctions) for facts in conjunctions.alternatives(parts))


def fits_facts(value: Any, facts: Facts, conjunctions: Conjunctions) -> bool:
    """Return whether a value fits facts, as far as they are enforced."""
    conjunctions.spend(1 + len(facts))
    types = types_of(facts, conjunctions, by_keywords=False)
    for schema in facts:
        for keyword, is_allowed in (("const", True), ("enum", True), (EXCLUDED, False)):
            if keyword in schema:
                values = [schema["const"]] if keyword == "const" else schema[keyword]
                if isinstance(values, list) and any(are_equal(value, each) for each in values) != is_allowed:
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
    members = Members(facts, conjunctions, closes=False)
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


def _contains(schema: Mapping[str, Any], items: list[Any], conjunctions: Conjunctions) -> bool:
    """Return whether as many items fit `contains` as a schema wants."""
    least, most = value_of(schema, "minContains", conjunctions), value_of(schema, "maxContains", conjunctions)
    count = sum(fits(item, [schema["contains"]], conjunctions) for item in items)
    return (1 if least is None else least) <= count and (most is None or count <= most)


def _has_equal(items: list[Any]) -> bool:
    """Return whether two items are the same."""
    return any(are_equal(one, other) for one, other in combinations(items, 2))


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, in which true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def prefix_length(facts: Facts) -> int:
    """Return how many first items of an array have schemas of their own."""
    return max((len(_prefix(schema)) for schema in facts), default=0)


def item_schemas(facts: Facts, index: int | None) -> list[Any]:
    """Return the schemas for an item of an array; for the items after those with schemas of their own, None."""
    found: list[Any] = []
    is_evaluated = False
    for schema in facts:
        prefix = _prefix(schema)
        if index is not None and index < len(prefix):
            found.append(prefix[index])
            is_evaluated = True
            continue
        rest = schema.get("additionalItems") if isinstance(schema.get("items"), list) else schema.get("items")
        if rest is not None:
            found.append(rest)
            is_evaluated = True
    if not is_evaluated:
        found += [schema["unevaluatedItems"] for schema in facts if "unevaluatedItems" in schema]
    return found


def _prefix(schema: Mapping[str, Any]) -> list[Any]:
    for keyword in ("prefixItems", "items"):  # a list of items is how drafts up to 2019-09 say it
        if isinstance(schema.get(keyword), list):
            return schema[keyword]  # type: ignore[no-any-return]
    return []
