"""Schemas of arguments whose objects have only the properties that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "prefixItems")
_COMBINING = frozenset({"allOf", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties"})
_COMBINING_WITH_PROPERTIES = frozenset({"anyOf", "oneOf", "$ref"})


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that forbids all properties that it does not name, unless it says something about others.

    JSON Schema allows other properties by default. But functions seldom take them, and small models invent them without
    end. Schemas that combine several schemas for one object stay as they are, because each of them would forbid the
    properties of the others.
    """
    return dict(schema) if _combines(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for name in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(name), Mapping):
            result[name] = {key: _close(value) for key, value in schema[name].items()}
    for name in _SCHEMAS:
        if name in schema:
            result[name] = _close(schema[name])
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            result[name] = [_close(value) for value in schema[name]]
    if "properties" in schema:
        result.setdefault("additionalProperties", False)
    return result


def _combines(schema: Any) -> bool:
    """Return whether several schemas may apply to one object. Names of properties can look like keywords here."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    keywords = schema.keys()
    combines = keywords & _COMBINING or ("properties" in keywords and keywords & _COMBINING_WITH_PROPERTIES)
    return bool(combines) or any(map(_combines, schema.values()))
