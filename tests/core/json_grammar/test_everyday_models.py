"""Schemas as pydantic, zod and the clients of the API make them: each can be enforced, and allows what it describes."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretBytes, SecretStr, TypeAdapter

from paceline.core.grammar import check_grammar
from paceline.core.types import ConstraintKind
from tests.core.json_grammar.matching import accepts

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=30, pattern="^[A-Z]")


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Node(BaseModel):
    value: float
    children: list[Node] = []


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None = None


class Point(NamedTuple):
    x: int
    y: int = 0


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", title="Strict", json_schema_extra={"examples": [{"a": 1}]})
    a: int


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Expression(BaseModel):
    operator: Literal["+", "*"]
    left: Expression | float
    right: Expression | float


# Types, each with JSON that it describes.
PYDANTIC: list[tuple[Any, str]] = [
    (Pet, '{"pet":{"kind":"dog","name":"Rex"}}'),
    (Node, '{"value":1.5,"children":[{"value":2,"children":[]}]}'),
    (Page[Cat], '{"items":[{"kind":"cat","lives":3}],"next":null}'),
    (Strict, '{"a":1}'),
    (Loose, '{"a":1,"more":[true]}'),
    (Expression, '{"operator":"+","left":{"operator":"*","left":2,"right":3},"right":1e3}'),
    (dict[Literal["a", "b"], int], '{"a":1,"b":2}'),
    (dict[Color, float], '{"red":0.5}'),
    (dict[str, list[int]], '{"x":[1],"y":[]}'),
    (dict[int, str], '{"1":"a"}'),
    (set[str], '["a","b"]'),
    (frozenset[Color], '["red"]'),
    (tuple[int, str, Literal[True]], '[1,"a",true]'),
    (tuple[int, ...], "[1,2,3]"),
    (list[Point], "[[1,2],[3]]"),
    (Color | None, '"blue"'),
    (Literal["a", 1, None, False], "false"),
    (str | int | None, "null"),
    (dt.datetime, '"2024-01-02T03:04:05Z"'),
    (dt.date, '"2024-01-02"'),
    (dt.time, '"03:04:05+01:00"'),
    (dt.timedelta, '"PT3H"'),
    (uuid.UUID, '"123e4567-e89b-12d3-a456-426614174000"'),
    (decimal.Decimal, "12.50"),
    (pathlib.Path, '"/etc/hosts"'),
    (ipaddress.IPv4Address, '"10.0.0.1"'),
    (ipaddress.IPv6Network, '"::/8"'),
    (HttpUrl, '"https://example.com/a?b=c"'),
    (SecretStr, '"hush"'),
    (SecretBytes, '"hush"'),
    (bytes, '"YQ=="'),
    (Annotated[float, Field(gt=0, lt=1)], "0.25"),
    (Annotated[int, Field(multiple_of=5, ge=0)], "15"),
    (Annotated[list[int], Field(min_length=1, max_length=3)], "[1]"),
    (Annotated[str, Field(pattern=r"^\+?[0-9 ]{5,15}$")], '"+49 30 1234"'),
    (Any, '{"a":[1,"b"]}'),
    (list[dict[str, Any]], '[{"a":{"b":1}}]'),
]

_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
OTHERS: list[tuple[dict[str, Any], str]] = [
    # zod's records, unions, tuples, never, dates and e-mail addresses, and zod-to-json-schema's references into places.
    (
        {**_DRAFT, "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        '{"a":1}',
    ),
    (
        {
            "type": "object",
            "propertyNames": {"enum": ["low", "high"]},
            "additionalProperties": {"type": "number"},
            "required": ["low", "high"],
        },
        '{"low":1,"high":2}',
    ),
    (
        {
            **_DRAFT,
            "type": "object",
            "properties": {
                "home": {"type": "object", "properties": {"zip": {"type": "string"}}},
                "work": {"$ref": "#/properties/home"},
            },
            "additionalProperties": False,
        },
        '{"work":{"zip":"1"}}',
    ),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "integer"}}}, '{"b":1}'),
    (
        {**_DRAFT, "type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "string"}, {"type": "number"}]},
        '["a",1]',
    ),
    (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[\w+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        '"ann.lee@example.org"',
    ),
    ({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}, "-42"),
    ({"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d{2}-\d{2}T.*Z$"}, '"2024-01-02T03:04:05.678Z"'),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}},
                {"type": "object", "properties": {"b": {}}},
            ]
        },
        '{"a":"x","b":1}',
    ),
    # LangChain, instructor and `llm --schema` send a title and a description, and sometimes a default or `$defs`.
    (
        {
            "title": "joke",
            "description": "A joke.",
            "type": "object",
            "properties": {"setup": {"type": "string", "default": ""}},
        },
        '{"setup":""}',
    ),
    (
        {
            "type": "object",
            "properties": {
                "items": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
                }
            },
            "required": ["items"],
        },
        '{"items":[{"name":"a"}]}',
    ),
    # OpenAPI's generators.
    (
        {"type": "object", "properties": {"n": {"type": "integer", "format": "int64", "nullable": True, "example": 3}}},
        '{"n":null}',
    ),
    ({"type": "string", "format": "byte", "contentEncoding": "base64", "deprecated": True, "readOnly": True}, '"YQ=="'),
]


@pytest.mark.parametrize(("described", "text"), PYDANTIC)
def test_what_pydantic_makes(described: Any, text: str) -> None:
    adapter = TypeAdapter(described)
    adapter.validate_json(text)
    schema = adapter.json_schema()
    assert accepts(schema, text, json.dumps(json.loads(text))) == [True, True]


@pytest.mark.parametrize(("schema", "text"), OTHERS)
def test_what_others_make(schema: dict[str, Any], text: str) -> None:
    check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert accepts(schema, text) == [True]
