"""Facts of schemas about types, counts, numbers, texts and the items of arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from paceline.core.json_grammar.conjunctions import EXCLUDED_TYPES, Conjunctions, Facts
from paceline.core.json_grammar.formats import FORMATS
from paceline.core.json_grammar.numbers import Bound, fraction
from paceline.core.json_grammar.pattern_characters import PatternError, UnsupportedPatternError
from paceline.core.json_grammar.patterns import translated
from paceline.core.json_grammar.strings import IN_JSON, Quoting

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_KINDS = {
    "object": "properties patternProperties additionalProperties propertyNames required minProperties maxProperties",
    "array": "items prefixItems minItems maxItems uniqueItems contains",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_KIND_OF_KEYWORD = {keyword: kind for kind, keywords in _KINDS.items() for keyword in keywords.split()}


def types_of(facts: Facts, conjunctions: Conjunctions, *, by_keywords: bool) -> frozenset[str]:
    """Return the JSON types that `facts` allow. "number" means all numbers, "integer" numbers without a fraction.

    Args:
        by_keywords: if the schemas name no type, derive the types from keywords such as `properties`.
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


def values_of(facts: Facts) -> list[Any] | None:
    """Return the values that `enum` or `const` lists; None if no schema has one of these keywords."""
    for schema in facts:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return schema["enum"]  # type: ignore[no-any-return]
    return None


def value_of(schema: Mapping[str, Any], keyword: str, conjunctions: Conjunctions) -> int | float | None:
    """Return the number that a schema has for a keyword; None if the schema does not have the keyword."""
    value = schema.get(keyword)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if keyword in schema:
        conjunctions.refuse(schema, keyword, f'"{keyword}" must be a number')
    return None


def least_and_most(facts: Facts, what: str, conjunctions: Conjunctions) -> tuple[int, int | None]:
    """Return the least and the largest count that all schemas allow; None for the largest count if there is no limit.

    Args:
        what: the keywords' common part, such as "Items" for `minItems` and `maxItems`.
    """
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
    """Return the strictest lower and upper bounds of a number; None for a bound that no schema gives."""
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
    """Return each `multipleOf` that a number must obey, with the schema that has it."""
    found = []
    for schema in facts:
        value = value_of(schema, "multipleOf", conjunctions)
        if value is not None and value != 0 and abs(value) != float("inf"):
            found.append((schema, fraction(abs(value))))
    return found


def patterns_of(facts: Facts, conjunctions: Conjunctions, quoting: Quoting = IN_JSON) -> list[tuple[str, bool]]:
    """Return (terminal, is_wanted) for each pattern and format of texts. A text must match the terminal if `is_wanted`,
    and must not match it otherwise.
    """
    found: list[tuple[str, bool]] = []
    for schema in facts:
        if "pattern" in schema:
            found += pattern_terminals(schema, "pattern", schema["pattern"], conjunctions, quoting)
        name = schema.get("format")
        if isinstance(name, str) and name in FORMATS:
            found += pattern_terminals(schema, "format", FORMATS[name], conjunctions, quoting)
        elif "format" in schema:
            conjunctions.miss(schema, "format")
    return list(dict.fromkeys(found))


def pattern_terminals(
    schema: object,
    keyword: str,
    pattern: object,
    conjunctions: Conjunctions,
    quoting: Quoting = IN_JSON,
    *,
    every_way: bool = False,
) -> list[tuple[str, bool]]:
    """Return (terminal, is_wanted) for each part of a pattern; an empty list if the pattern cannot be enforced. A text
    must match the terminal if `is_wanted`, and must not match it otherwise.
    """
    try:
        if not isinstance(pattern, str):
            raise PatternError("it must be a string")
        found = translated(pattern, every_way, quoting.escaping)
    except UnsupportedPatternError:
        conjunctions.miss(schema, keyword)
        return []
    except PatternError as error:
        conjunctions.refuse(schema, keyword, f"a regular expression cannot be read: {error}")
        return []
    wanted = [(quoting.whole(text), True) for text in found.wanted]
    return wanted + [(quoting.whole(text), False) for text in found.unwanted]


def fits_patterns(text: str, terminals: Iterable[tuple[str, bool]], conjunctions: Conjunctions) -> bool:
    """Return whether a text fits the terminals of patterns."""
    spelling = json.dumps(text, ensure_ascii=False)
    return all(conjunctions.matches(terminal, spelling) == is_wanted for terminal, is_wanted in terminals)


def prefix_length(facts: Facts) -> int:
    """Return the number of items at the beginning of an array that have schemas of their own (`prefixItems`)."""
    return max((len(_prefix(schema)) for schema in facts), default=0)


def item_schemas(facts: Facts, index: int | None) -> list[Any]:
    """Return the schemas for an item of an array.

    Args:
        index: the item's index; None for the items after those with schemas of their own.
    """
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
    for keyword in ("prefixItems", "items"):  # up to draft 2019-09, `items` may be a list
        if isinstance(schema.get(keyword), list):
            return schema[keyword]  # type: ignore[no-any-return]
    return []
