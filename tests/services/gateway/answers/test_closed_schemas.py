"""Which schemas of arguments forbid the properties that they do not name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.services.gateway.answers.closed_schemas import closed

NAMES = {"properties": {"name": {"type": "string"}}}
CLOSED = {**NAMES, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMES, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (
            {**NAMES, "additionalProperties": {"type": "integer"}},
            {**NAMES, "additionalProperties": {"type": "integer"}},
        ),
        ({"type": "array", "items": NAMES}, {"type": "array", "items": CLOSED}),
        ({"additionalProperties": NAMES}, {"additionalProperties": CLOSED}),
        ({"anyOf": [NAMES, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"properties": {"properties": NAMES}, "$defs": {"a": NAMES}},
            {"properties": {"properties": CLOSED}, "$defs": {"a": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_objects_are_closed_unless_they_speak_of_other_properties(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [NAMES, {"properties": {"age": {}}}]},
        {**NAMES, "anyOf": [{"properties": {"age": {}}}, {"required": ["name"]}]},
        {"properties": {"a": {**NAMES, "$ref": "#/$defs/b"}}, "$defs": {"b": NAMES}},
        {**NAMES, "patternProperties": {"^x-": {}}},
    ],
)
def test_combined_schemas_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
