"""Values in the notation of Gemma's calls: how they are written, and their grammar by JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.services.gateway.answers.expressions import Spelling, Tool
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
_BARE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"


def written(value: object, quote: str) -> str:
    """Return a value in the notation.

    Args:
        quote: the marker before and after a text.
    """
    match value:
        case str():
            if quote not in value:
                return f"{quote}{value}{quote}"
            # A text with the marker in it is written as in JSON, in which the marker can be spelled differently.
            return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
        case list():
            return f"[{','.join(written(item, quote) for item in value)}]"
        case dict():
            members = (f"{written_key(key, quote)}:{written(each, quote)}" for key, each in value.items())
            return f"{{{','.join(members)}}}"
    return json.dumps(value)


def written_key(key: str, quote: str) -> str:
    """Return a key in the notation: bare if it is a name."""
    return key if _BARE_KEY.fullmatch(key) else written(key, quote)


class ValueGrammar:
    """Expressions for values, and the rules on which they are built.

    Args:
        quote: the marker before and after a text.
    """

    def __init__(self, spelling: Spelling, quote: str) -> None:
        self.rules = Rules(spelling)
        self._literal = spelling.literal
        self._quote = quote
        self._root: Mapping[str, Any] = {}
        self._depth = 0
        self._names: dict[int, tuple[Mapping[str, Any], str]] = {}
        """Rules by the identity of their schemas, which are kept so that identities stay unique."""

    def arguments(self, tool: Tool) -> str:
        """Return an expression for a tool's arguments."""
        self._root = tool.parameters
        return self._object(resolve(tool.parameters, self._root))

    def _value(self, schema: object) -> str:
        """Return the name of a rule for the values that a schema allows."""
        resolved = resolve(schema, self._root)
        if self._depth >= _MAX_DEPTH or not (choices_of(resolved) or types_of(resolved, self._root)):
            return self._anything()
        # A schema that refers to itself finds its own name here.
        if (known := self._names.get(id(resolved))) is not None:
            return known[1]
        name = self.rules.new_name()
        self._names[id(resolved)] = resolved, name
        self._depth += 1
        self.rules.add(self._expression(resolved), name=name)
        self._depth -= 1
        return name

    def _expression(self, schema: Mapping[str, Any]) -> str:
        if (values := choices_of(schema)) is not None:
            return " | ".join(self._literal(written(value, self._quote)) for value in values)
        if options := options_of(schema):
            return " | ".join(map(self._value, options))
        types = types_of(schema, self._root)
        found = []
        if scalars := sorted(types & SCALARS):
            found.append(json_schema({**schema, "type": scalars}, self._root))
        if "string" in types:
            found.append(f"{self._literal(self._quote)} {self.rules.text(schema, self._quote)}")
        if "array" in types:
            found.append(self._array(schema))
        if "object" in types:
            found.append(self._object(schema))
        return " | ".join(found) or self._anything()

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", {}))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high == 0:
            return '"[]"'
        most = "" if high is None else high - 1
        items = f'{item} ("," {item}){{{max(0, low - 1)},{most}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = properties_of(schema)
        if not properties:
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            member = f'{_ANY_KEY} ":" {self._value(others)}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        # Members come in the order of the schema. `first` is the rest of them if none has been written yet, and `later`
        # if one has.
        first = later = '""'
        for key, (value, is_required) in reversed(properties.items()):
            member = f"{self._literal(written_key(key, self._quote) + ':')} {self._value(value)}"
            first = self.rules.add(f"{member} {later}" if is_required else f"{member} {later} | {first}")
            later = self.rules.add(f'"," {member} {later}' if is_required else f'("," {member})? {later}')
        return f'"{{" {first} "}}"'

    def _anything(self) -> str:
        """Return the name of the rule for any value."""
        name = "anything"
        scalar = json_schema({"type": sorted(SCALARS)}, {})
        text = f"{self._literal(self._quote)} {self.rules.text({}, self._quote)}"
        array = f'"[" ({name} ("," {name})*)? "]"'
        members = f'{_ANY_KEY} ":" {name} ("," {_ANY_KEY} ":" {name})*'
        return self.rules.add(f'{scalar} | {text} | {array} | "{{" ({members})? "}}"', name=name)
