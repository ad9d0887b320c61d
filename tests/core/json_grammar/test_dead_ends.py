"""A walk of random tokens through the grammar of a schema never comes to a place from which it cannot end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core.json_grammar.matching import matcher_of
from tests.fuzz.schemas import complaints

TOKENIZER = Path("~/.cache/paceline/smollm2-135m-instruct/tokenizer.json").expanduser()


@pytest.mark.model
@pytest.mark.parametrize("schemas", [25, pytest.param(2000, marks=pytest.mark.thorough)])
def test_no_walk_ends_in_a_dead_end(schemas: int) -> None:
    assert list(complaints(TOKENIZER, schemas, 5 if schemas > 100 else 2)) == []


@pytest.mark.parametrize(
    "schema",
    [
        # After the comma there was no name: "a" is declared, and the pattern fits no other.
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^b$": {"not": {}}}},
        {"properties": {"a": {}, "b": {"type": "string", "minLength": 4, "pattern": "^.{1,3}$"}}},
        {"properties": {"a": {"type": "integer"}, "b": {"allOf": [{"type": "null"}, {"type": "string"}]}}},
        {"properties": {"a": {"type": "integer"}, "b": {"type": "array", "minItems": 1, "items": False}}},
    ],
)
def test_no_comma_comes_before_members_that_there_cannot_be(schema: dict[str, Any]) -> None:
    matcher = matcher_of({"type": "object", **schema, "required": ["a"]})
    assert matcher.try_consume_tokens(list(b'{"a":1,')) == len('{"a":1')
