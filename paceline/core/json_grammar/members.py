"""The schemas that govern the members of an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.json_grammar.conjunctions import Conjunctions, Facts
from paceline.core.json_grammar.facts import fits_patterns, pattern_terminals

_MEMBER_STEPS = 3
"""Price of each member of an object for `Conjunctions.spend`, in steps."""


class ObjectMembers:
    """The schemas that govern the members of an object.

    Args:
        closes: an object has only the members that its schemas name, unless the schemas have rules for other members.
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
        """For each pattern of names, its terminals."""
        for schema, allowed in zip(facts, self._patterns):
            for pattern in allowed:
                self.patterns[pattern] = pattern_terminals(schema, "patternProperties", pattern, conjunctions)
        said = any("additionalProperties" in schema or "unevaluatedProperties" in schema for schema in facts)
        names_some = any("properties" in schema or "patternProperties" in schema for schema in facts)
        self._is_closed = closes and names_some and not said
        conjunctions.spend(_MEMBER_STEPS * len(self.names) * len(facts))

    def schemas(self, name: str | None, fitting: frozenset[str]) -> list[Any]:
        """Return the schemas for a member of an object.

        Args:
            name: the member's name; None for all names that are not listed.
            fitting: the patterns that the name fits.
        """
        found: list[Any] = []
        is_evaluated = False
        for schema, properties, patterns in zip(self._facts, self._properties, self._patterns):
            applying = [properties[name]] if name is not None and name in properties else []
            applying += [value for pattern, value in patterns.items() if pattern in fitting]
            applying = applying or ([schema["additionalProperties"]] if "additionalProperties" in schema else [])
            is_evaluated = is_evaluated or bool(applying)
            found += applying
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
    if not isinstance(value, bool):  # in draft 3, it is a keyword of a property
        conjunctions.refuse(schema, "required", '"required" must be a list of names')
    return []
