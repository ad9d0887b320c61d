"""Which JSON the grammar of a schema allows, and what it says that it does not enforce."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest

from paceline.core.errors import ConstraintError
from paceline.core.grammar import OPTIONS, check_grammar, unenforced
from paceline.core.json_grammar.compiler import SchemaOptions, compile_schema
from paceline.core.json_grammar.patterns import translated
from paceline.core.json_grammar.rules import Rules
from paceline.core.types import ConstraintKind
from tests.core.json_grammar.matching import accepts, allows, matcher_of

NAMED = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
NULL: dict[str, Any] = {"type": "null"}
UUID = "123e4567-e89b-42d3-a456-426614174000"


def left(schema: Any) -> list[str]:
    """Return the paths of the keywords that are not enforced."""
    return [each.path for each in unenforced(ConstraintKind.JSON_SCHEMA, json.dumps(schema))]


CASES: list[tuple[Any, list[str], list[str]]] = [
    # Objects that name their properties are closed.
    (NAMED, ['{"name":"x"}', '{"name": "x", "age": 3}'], ['{"age":3}', '{"name":"x","b":1}', '{"age":3,"name":"x"}']),
    ({"type": "object"}, ["{}", '{"a": {"b": [1]}}'], ["1"]),
    ({**NAMED, "additionalProperties": True}, ['{"name":"x","b":[]}'], ['{"b":1}']),
    ({**NAMED, "additionalProperties": NULL}, ['{"name":"x","b":null}'], ['{"name":"x","b":1}']),
    ({**NAMED, "unevaluatedProperties": True}, ['{"name":"x","b":1}'], []),
    ({"properties": {"a": NULL}}, ["{}", '{"a":null}'], ["1", '{"b":1}']),
    ({"type": "object", "required": ["z"], "properties": {"a": NULL}}, ['{"a":null,"z":1}'], ['{"z":1,"q":1}']),
    (
        {"allOf": [{"properties": {"a": NULL}, "required": ["a"]}, {"properties": {"b": NULL}}]},
        ['{"a":null,"b":null}', '{"a":null}'],
        ['{"b":null}', '{"a":null,"c":1}'],
    ),
    (
        {"type": "object", "properties": {"a": NULL}, "anyOf": [{"properties": {"b": NULL}}, {"required": ["a"]}]},
        ['{"a":null,"b":null}', '{"b":null}', '{"a":null}'],
        ['{"c":1}'],
    ),
    # Properties that may be left out.
    (
        {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["b"]},
        ['{"b":null}', '{"a":null,"b":null}', '{"b":null,"c":null}'],
        ["{}", '{"a":null}', '{"c":null,"b":null}', '{,"b":null}', '{"b":null,}'],
    ),
    (
        {"type": "object", "minProperties": 1, "maxProperties": 2, "properties": {"a": NULL, "b": NULL, "c": NULL}},
        ['{"a":null}', '{"c":null}', '{"a":null,"c":null}'],
        ["{}", '{"a":null,"b":null,"c":null}'],
    ),
    (
        {"type": "object", "minProperties": 2, "maxProperties": 3},
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"a":1,"b":1,"c":1,"d":1}'],
    ),
    ({"type": "object", "maxProperties": 0}, ["{}"], ['{"a":1}']),
    # Names of properties.
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"b":1}', '{"a":1,"b":2}'],
        ['{"c":1}', '{"a":1,"a":2}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab":1}'], ['{"A":1}']),
    # Values that are listed have to fit all other keywords.
    ({"enum": [{"a": 1}, {"ab": 1}], "propertyNames": {"maxLength": 1}}, ['{"a":1}'], ['{"ab":1}']),
    ({"enum": [[1, 2], [1, 1.0], [True, 1]], "uniqueItems": True}, ["[1,2]", "[true,1]"], ["[1,1.0]"]),
    (
        {"enum": [[1], [1, 2], [1, 1, 1]], "contains": {"const": 1}, "minContains": 1, "maxContains": 2},
        ["[1]", "[1,2]"],
        ["[1,1,1]"],
    ),
    (
        {"type": "object", "allOf": [{"additionalProperties": NULL}], "unevaluatedProperties": False},
        ['{"a":null}'],
        ['{"a":1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^x-": NULL, "!$": {"type": "integer"}}},
        ['{"x-a":null}', '{"a!":1}', "{}"],
        ['{"x-a":1}', '{"x-!":1}', '{"b":1}'],
    ),
    (
        {"type": "object", "properties": {"a": NULL}, "patternProperties": {"^a$": {}}},
        ['{"a":null}'],
        ['{"a":1}', '{"a":null,"a":null}'],
    ),
    # Arrays.
    (
        {"type": "array", "items": NULL, "minItems": 2, "maxItems": 3},
        ["[null,null]"],
        ["[null]", "[null,null,null,null]"],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, NULL], "items": False, "minItems": 1},
        ['["a"]', '["a",null]'],
        ["[]", '["a",null,1]', "[null]"],
    ),
    ({"items": [NULL], "additionalItems": {"type": "integer"}}, ["[null,1]", "[]"], ["[1]", "[null,null]"]),
    ({"type": "array", "contains": {"const": 1}}, ["[1]", "[2,1]", "[1,2]"], ["[]", "[2]"]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, ["[1,2,1]"], ["[1]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    # Choices and negations.
    (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
                {"properties": {"kind": {"const": "b"}, "y": NULL}, "required": ["kind", "y"]},
            ],
            "discriminator": {"propertyName": "kind"},
        },
        ['{"kind":"a","x":1}', '{"kind":"b","y":null}'],
        ['{"kind":"a","y":null}', '{"kind":"c"}'],
    ),
    (  # Unions of unions, whose discriminators have defaults and so are not required by the letter.
        {
            "oneOf": [
                {"$ref": "#/$defs/cat"},
                {"properties": {"kind": {"const": "dog"}}},
                {"properties": {"other": NULL}},
            ],
            "discriminator": {"propertyName": "kind"},
            "$defs": {
                "cat": {
                    "anyOf": [
                        {"properties": {"kind": {"const": "cat"}, "color": {"const": color}}}
                        for color in ("black", "red")
                    ],
                    "discriminator": {"propertyName": "color"},
                }
            },
        },
        ['{"kind":"cat","color":"red"}', '{"kind":"dog"}', '{"other":null}'],
        ['{"kind":"cat"}', '{"color":"red"}'],
    ),
    ({"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null"], ['"abc"', "1"]),
    ({"enum": ["a", 1, None, {"b": [True]}], "type": ["string", "object"]}, ['"a"', '{"b": [true]}'], ["1", "null"]),
    ({"const": {"a": 1.5}}, ['{"a":1.5}'], ['{"a":1}', "{}"]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": NULL}}, ["{}", '{"b":null}'], ['{"a":1}']),
    ({"type": "string", "not": {"const": "a"}}, ['"b"', '"ab"'], ['"a"']),
    ({"not": {"type": ["object", "array", "string", "boolean"]}}, ["1", "null"], ['"a"', "{}", "true"]),
    ({"type": "object", "not": {"required": ["a"]}}, ["{}"], ['{"a":1}']),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1}'],
    ),
    (
        {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "n": NULL},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"required": ["n"]},
        },
        ['{"k":"x","n":null}', '{"k":"y"}'],
        ['{"k":"x"}'],
    ),
    ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
    ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": {"type": "integer"}}}, ["1", "null"], ['"a"']),
    ({"enum": ["null"], "nullable": True}, ["null"], ["1"]),  # zod 3 writes null so for OpenAPI
    # References.
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": NULL}}, ["null"], ["1"]),
    ({"$ref": "#it", "$defs": {"x": {"$anchor": "it", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "https://a.b/root", "$ref": "leaf", "$defs": {"x": {"$id": "leaf", "type": "null"}}}, ["null"], ["1"]),
    (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "required": ["next"]},
        ['{"next":{"next":null}}'],
        ['{"next":1}', "{}"],
    ),
    (
        {"type": "object", "properties": {"a": {"$dynamicRef": "#node"}}, "$dynamicAnchor": "node"},
        ['{"a":{"a":{}}}'],
        ['{"a":1}'],
    ),
    # Formats.
    ({"format": "date", "type": "string"}, ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"format": "date-time", "type": "string"}, ['"2024-02-29T23:59:59.5Z"'], ['"2024-02-29"']),
    ({"format": "email", "type": "string"}, ['"a.b+c@d.example"'], ['"a@"', '".@b"']),
    (
        {"format": "ipv6", "type": "string"},
        ['"::1"', '"1:2:3:4:5:6:7:8"', '"::ffff:1.2.3.4"'],
        ['"1:2"', '":::"', '"1::2::3"'],
    ),
    (
        {"format": "uri", "type": "string"},
        ['"https://a.b/c?d=e#f"', r'"https:\/\/a.b"', '"http://u@[::1]:80/a?b"'],
        ['"a b"', '"/a"', '"a:[b]"'],
    ),
    ({"format": "duration", "type": "string"}, ['"P1DT2H"', '"P3W"'], ['"P"', '"1D"']),
    ({"format": "uuid", "type": "string", "maxLength": 40}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"x"']),
    ({"format": "uuid4", "type": "string"}, [f'"{UUID}"'], [f'"{UUID.replace("-4", "-1")}"', '"x"']),
    ({"format": "ipvanyaddress", "type": "string"}, ['"::1"', '"10.0.0.1"'], ['"::g"']),
    ({"format": "binary", "type": "string"}, ['"anything"'], ["1"]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_what_a_schema_allows(schema: Any, right: list[str], wrong: list[str]) -> None:
    assert accepts(schema, *right, *wrong) == [True] * len(right) + [False] * len(wrong)


def test_the_letter_of_json_schema_on_demand() -> None:
    schema = {**NAMED, OPTIONS: {"closed": False}}
    assert accepts(schema, '{"name":"x","b":1}', '{"name":"x","name":1}') == [True, False]
    assert accepts({"properties": {"a": {}}, OPTIONS: {"closed": False}}, "1") == [True]


@pytest.mark.parametrize("closed", [True, False])
def test_the_types_of_one_argument_limit_no_other_one(closed: bool) -> None:
    lists = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "l": lists}}
    schema |= {"required": ["a"], OPTIONS: {"closed": closed, "notation": ["python"]}}
    assert accepts(schema, 'a="x",n=1,l=[1,2]', "a=1", 'a="x",n="y"') == [True, False, False]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        (NAMED, []),
        ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, ["items.uniqueItems"]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, []),
        ({"properties": {"a": {"format": "password"}}}, ["properties.a.format"]),
        ({"oneOf": [{"maxLength": 2}, {"maxLength": 3}]}, ["oneOf"]),
        ({"oneOf": [{"type": "string"}, NULL]}, []),
        ({"not": {"minimum": 3}}, ["not"]),
        ({"type": "number", "not": {"type": "integer"}}, ["not"]),
        ({"not": {"type": ["integer", "number"]}}, []),
        ({"type": "array", "not": {"const": []}}, ["not"]),
        ({"if": {"enum": ["a", {}]}, "then": {"type": "string"}}, ["if"]),
        ({"type": "string", "pattern": r"(a)\1"}, ["pattern"]),
        ({"contains": {}, "maxContains": 1, "type": "array"}, ["contains"]),
        ({"if": {"minimum": 3}, "then": {"maximum": 9}, "type": "number"}, ["if"]),
        ({"type": "object", "minProperties": 2}, ["minProperties"]),
        ({"type": "object", "minProperties": 2, "required": ["a"], "additionalProperties": True}, []),
        ({"title": "T", "examples": [1], "default": 2, "deprecated": True, "x-own": 3, "$comment": ""}, []),
    ],
)
def test_what_is_not_enforced_is_said(schema: Any, paths: list[str]) -> None:
    assert left(schema) == paths


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "greater than the maximum"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "greater than maxLength"),
        ({"type": "string", "minLength": 5, "pattern": "^[a-z]{1,3}$"}, "no text fits pattern"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no type is left"),
        ({"enum": ["a"], "type": "integer"}, "no value in enum"),
        ({"type": "array", "minItems": 1, "items": {"not": {}}}, "a schema is false"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a' is impossible"),
        ({"type": "object", "required": ["a"], "unevaluatedProperties": False}, "required property 'a' is impossible"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "no multiple"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "needs itself without an end"),
        ({"type": "object", "minProperties": 2, "properties": {"a": {}}, "required": ["a"]}, "no number of properties"),
        ({"properties": {}, "maxProperties": 0, "required": ["a"]}, "no number of properties"),
    ],
)
def test_a_schema_that_nothing_fits_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def hostile() -> list[Any]:
    """Return schemas that would take exponential or quadratic work if they were read naively."""
    two = {"anyOf": [{"minimum": 1}, {"maxLength": 1}]}
    refs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(300)}
    names = {f"p{n}": {} for n in range(1500)}
    equal = {"properties": names, "required": list(names)}
    return [
        {"allOf": [{**two, "title": str(n)} for n in range(40)]},
        {"$ref": "#/$defs/d0", "$defs": {**refs, "d300": {"type": "null"}}},
        {"allOf": [{"properties": names}, *({"properties": {f"q{n}": {}}} for n in range(1500))]},
        {"type": "object", "dependentRequired": {f"p{n}": [f"p{n + 1}"] for n in range(60)}},
        {"type": "object", "patternProperties": {f"^{n}a*": {} for n in range(200)}},
        {"type": "string", "pattern": "^(a+)+$", "enum": ["a" * 40 + "b", "aaa"]},
        {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
        {"oneOf": [{"$ref": "#/$defs/equal"}] * 3000, "$defs": {"equal": equal}},
        {"multipleOf": 9999.9999},
        {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"},
    ]


@pytest.mark.parametrize("schema", hostile())
def test_hostile_schemas_take_little_work(schema: Any) -> None:
    with contextlib.suppress(ConstraintError):  # too large, or too long to enforce
        check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


NEGATED = {f"n{n}": {"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}] * 2} for n in range(17)}
"""References that lead to one schema in 2^17 ways, which takes a second. In 2^60 ways it would never end."""


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#/$defs/n0"}, "$defs": {**NEGATED, "n17": {"minLength": 3}}},
        {"enum": [f"a{n}" for n in range(300)], "allOf": [{"pattern": f"^(a|{n})"} for n in range(200)]},
        {"enum": ["b"], "allOf": [{"pattern": f"^(b|{n})"} for n in range(1000)]},
        {"type": "string", "pattern": r"\D*\W[^a]" * 300},
        {"properties": {f"p{n}": {"pattern": f"^{n}" + r"\W" * 500} for n in range(8)}},
    ],
    ids=["negations", "comparisons", "patterns", "one pattern", "all patterns"],
)
def test_what_takes_seconds_or_gigabytes_is_refused_at_once(schema: Any) -> None:
    with pytest.raises(ConstraintError, match="too large to be enforced"):
        compile_schema(schema, SchemaOptions())


def test_texts_of_patterns_and_of_all_terminals_have_limits() -> None:
    # The library refuses such texts, too, but only after it has filled the memory.
    with pytest.raises(ConstraintError, match="too large to be enforced"):
        translated(r"\D*\W[^a]" * 300)
    rules = Rules()
    for number in range(4):
        rules.terminal(str(number) + "x" * 450_000)
    with pytest.raises(ConstraintError, match="too large to be enforced"):
        rules.terminal("x" * 450_000)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [chr(0x4E00 + n % 9000) * 50 + str(n) for n in range(800)]},
        {"enum": [f"{chr(0x4E00 + n)}{n}" for n in range(4000)]},
        {"allOf": [{"enum": list(range(9000))}, {"enum": list(range(8999, -1, -1))}]},
    ],
    ids=["long", "many", "two lists"],
)
def test_large_enums_take_little_work(schema: Any) -> None:
    matcher = matcher_of(json.dumps(schema, ensure_ascii=False))
    values = schema.get("enum") or schema["allOf"][0]["enum"]
    for value in (values[0], values[-1]):
        assert [allows(matcher, json.dumps(value, ensure_ascii=each)) for each in (True, False)] == [True, True]
    assert not allows(matcher, json.dumps("x"))


def test_the_list_of_what_is_not_enforced_is_short() -> None:
    schema: Any = {"type": "object", "properties": {f"p{n}": {"format": "unknown"} for n in range(500)}}
    for _ in range(50):
        schema = {"type": "object", "properties": {"n" * 1000: schema}}
    schema["uniqueItems"] = schema["properties"]["list"] = {"type": "array", "uniqueItems": True}
    found = compile_schema(schema, SchemaOptions()).unenforced
    assert len({each.keyword for each in found}) == 2  # one keyword in many places does not hide another one
    assert sum(len(each.path) for each in found) < 100_000


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": 0}},
        {"not": {"type": [{}]}},
        {"minLength": math.inf},
        {"maxItems": -math.inf},
        {"maxProperties": math.nan},
        {"enum": [math.inf, 10**500]},
        {"not": {"enum": [10**500]}, "type": "number"},
        {"oneOf": [{"properties": 5, "required": 5}] * 2},
        {"oneOf": [{"properties": {"a": {}}, "required": [5]}] * 2},
    ],
    ids=str,
)
def test_values_that_a_keyword_cannot_have_are_no_failures(schema: Any) -> None:
    with contextlib.suppress(ConstraintError):
        check_grammar(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("pattern", [5, ["a"], {}])
def test_options_of_another_type_are_refused(pattern: Any) -> None:
    schema = json.dumps({OPTIONS: {"whitespace_pattern": pattern}})
    with pytest.raises(ConstraintError, match="leave it out"):
        check_grammar(ConstraintKind.GRAMMAR, f"start: %json {schema}")
