"""Grammars of the values that JSON schemas allow, for forms that write them in a notation of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.services.gateway.answers.schemas import (
    SCALARS,
    Rules,
    choices_of,
    json_schema,
    options_of,
    properties_of,
    resolve,
    types_of,
)

_MAX_DEPTH = 32


class ValueGrammar:
    """Expressions for values, and the rules on which they are built. Subclasses say how values are written.

    Attributes:
        comma: an expression for what separates items and members.
        any_key: an expression for the name of any member, and for what separates it from the value.
    """

    comma = '","'
    any_key: str

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.root: Mapping[str, Any] = {}
        """The schema to which references refer."""
        self._depth = 0
        self._names: dict[int, tuple[Mapping[str, Any], str]] = {}
        """Rules by the identity of their schemas, which are kept so that identities stay unique."""

    def literal(self, value: object) -> str:
        """Return an expression for one value."""
        raise NotImplementedError

    def key(self, name: str) -> str:
        """Return an expression for the name of a member, and for what separates it from the value."""
        raise NotImplementedError

    def string(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for the strings that a schema allows."""
        raise NotImplementedError

    def scalar(self, types: frozenset[str], schema: Mapping[str, Any]) -> str:
        """Return an expression for the values of these types, a part of `SCALARS`, that a schema allows."""
        return json_schema({**schema, "type": sorted(types)}, self.root)

    def anything(self) -> str:
        """Return the name of the rule for any value."""
        name = "anything"
        array = f'"[" ({name} ({self.comma} {name})*)? "]"'
        others = f'"{{" ({self.any_key} {name} ({self.comma} {self.any_key} {name})*)? "}}"'
        return self.rules.add(f"{self.scalar(SCALARS, {})} | {self.string({})} | {array} | {others}", name=name)

    def value(self, schema: object) -> str:
        """Return the name of a rule for the values that a schema allows."""
        resolved = resolve(schema, self.root)
        if self._depth >= _MAX_DEPTH or not (choices_of(resolved) or types_of(resolved, self.root)):
            return self.anything()
        # A schema that refers to itself finds its own name here.
        if (known := self._names.get(id(resolved))) is not None:
            return known[1]
        name = self.rules.new_name()
        self._names[id(resolved)] = resolved, name
        self._depth += 1
        self.rules.add(self._expression(resolved), name=name)
        self._depth -= 1
        return name

    def object(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for the objects that a schema allows."""
        return f'"{{" {self.members(schema, self.key, self.any_key)} "}}"'

    def members(self, schema: Mapping[str, Any], key: Callable[[str], str], any_key: str) -> str:
        """Return an expression for the members of the objects that a schema allows, in the order of its properties.

        Args:
            key: as the method `key`.
            any_key: as the attribute `any_key`.
        """
        properties = properties_of(schema)
        if not properties:
            others = schema.get("additionalProperties", "properties" not in schema)
            if others is False:
                return '""'
            member = f"{any_key} {self.value(others)}"
            return f"({member} ({self.comma} {member})*)?"
        # `first` is the rest of the members if none has been written yet, and `later` if one has.
        first = later = '""'
        for name, (value, is_required) in reversed(properties.items()):
            member = self.rules.add(f"{key(name)} {self.value(value)}")
            first = self.rules.add(f"{member} {later}" if is_required else f"{member} {later} | {first}")
            later = self.rules.add(
                f"{self.comma} {member} {later}" if is_required else f"({self.comma} {member})? {later}"
            )
        return first

    def _expression(self, schema: Mapping[str, Any]) -> str:
        if (values := choices_of(schema)) is not None:
            return " | ".join(map(self.literal, values))
        if options := options_of(schema):
            return " | ".join(map(self.value, options))
        types = types_of(schema, self.root)
        found = []
        if scalars := types & SCALARS:
            found.append(self.scalar(scalars, schema))
        if "string" in types:
            found.append(self.string(schema))
        if "array" in types:
            found.append(self._array(schema))
        if "object" in types:
            found.append(self.object(schema))
        return " | ".join(found) or self.anything()

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self.value(schema.get("items", {}))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None:
            high = max(low, high)  # a schema that allows no array gets the shortest that is long enough
        if high == 0:
            return '"[]"'
        most = "" if high is None else high - 1
        # llguidance refuses {0,0}.
        items = item if high == 1 else f"{item} ({self.comma} {item}){{{max(0, low - 1)},{most}}}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'
