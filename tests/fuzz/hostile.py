"""Random constraints of all forms, many of them hostile, as fields of a chat. Pure functions of a random generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.fuzz.schemas import random_schema

Fields = dict[str, Any]

_COUNTS = [0, 1, 2, 7, 60, 999, 5_000, 100_000, 2**31]
_STEPS = [0.01, 0.53, 1.5, 9999.9999, 0.0001, 3, 97, 9967, 9973, 10_007, 65_537, 1e-9, 1e9, 2**61 - 1]
_CLASSES = [r"\p{L}", r"\p{Greek}", r"\P{Lu}", r"\w", r"\d", r"\S", ".", "[^a-z]", r"[\x{100}-\x{10FFFF}]", "(?i:ß)"]
_WORDS = ["a", "ab", "é", "ключ", "日本", "\U0001f600", "x" * 50, '"', "\\", "\n", "<|im_end|>", ""]


def random_fields(rng: random.Random) -> tuple[str, Fields]:
    """Return the name of a form, and fields of a chat that ask for a constraint of this form."""
    form = rng.choice([*_FORMS])
    return form, _FORMS[form](rng)


def _schema_fields(rng: random.Random) -> Fields:
    schema = hostile_schema(rng)
    if rng.random() < 0.2:
        return {"guided_json": json.dumps(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def hostile_schema(rng: random.Random, depth: int = 3) -> Any:
    """Return a schema, which may ask for much with few words."""
    if depth == 0 or rng.random() < 0.3:
        return random_schema(rng, min(depth, 2))
    return rng.choice(_SCHEMAS)(rng, depth - 1)


def _numbers(rng: random.Random, depth: int) -> Any:
    number = {"type": rng.choice(["integer", "number"]), "multipleOf": rng.choice(_STEPS)}
    others = [{"multipleOf": rng.choice(_STEPS)} for _ in range(rng.randint(0, 4))]
    limits = {"minimum": rng.choice(_COUNTS), "maximum": 10.0 ** rng.randint(0, 300)}
    whole = {**number, "allOf": others} if others else number
    return {**whole, **limits} if rng.random() < 0.4 else whole


def _referenced(rng: random.Random, depth: int) -> Any:
    names = [f"d{index}" for index in range(rng.choice([1, 2, 8, 40]))]
    one = {name: {"$ref": f"#/$defs/{rng.choice(names)}"} for name in names}
    many = {name: {"anyOf": [{"$ref": f"#/$defs/{rng.choice(names)}"} for _ in range(3)]} for name in names}
    inner = {names[0]: hostile_schema(rng, depth), **{f"{name}-{depth}": _numbers(rng, depth) for name in names[:3]}}
    keyword = rng.choice(["allOf", "anyOf", "oneOf"])
    return {keyword: [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**rng.choice([one, many]), **inner}}


def _nested(rng: random.Random, depth: int) -> Any:
    schema = hostile_schema(rng, depth)
    for _ in range(rng.choice([2, 10, 60, 115, 180])):
        wide = rng.choice(["properties", "items", "anyOf", "not", "allOf", "additionalProperties"])
        schema = {
            "properties": {"properties": {"a": schema}, "required": ["a"]},
            "items": {"items": schema, "minItems": rng.choice(_COUNTS[:4])},
            "not": {"not": schema},
        }.get(wide, {wide: [schema] if wide.endswith("Of") else schema})
    return schema


def _counted(rng: random.Random, depth: int) -> Any:
    low, high = rng.choice(_COUNTS), rng.choice(_COUNTS)
    inner = hostile_schema(rng, depth)
    return rng.choice(
        [
            {"type": "array", "items": inner, "minItems": low, "maxItems": high},
            {"type": "array", "prefixItems": [inner] * min(low, 300), "items": inner},
            {"type": "array", "contains": inner, "minContains": low, "maxContains": high, "uniqueItems": True},
            {"type": "string", "minLength": low, "maxLength": high},
            {"type": "string", "pattern": hostile_regex(rng), "minLength": low, "maxLength": high},
            {"type": "object", "additionalProperties": inner, "minProperties": low, "maxProperties": high},
        ]
    )


def _wide(rng: random.Random, depth: int) -> Any:
    count = rng.choice([3, 40, 300, 1500])
    inner = hostile_schema(rng, 0)
    names = [f"{rng.choice(_WORDS)}{index}" for index in range(count)]
    ways: list[Callable[[], Any]] = [
        lambda: {"enum": names},
        lambda: {"enum": [{"a": name, "b": [index]} for index, name in enumerate(names)]},
        lambda: {"anyOf": [{"const": name} for name in names]},
        lambda: {"oneOf": [{"properties": {name: inner}} for name in names[:60]]},
        lambda: {"type": "object", "properties": dict.fromkeys(names, inner)},
        lambda: {"type": "object", "properties": dict.fromkeys(names, inner), "required": names},
        lambda: {"patternProperties": {hostile_regex(rng): inner for _ in range(min(count, 12))}},
        lambda: {"allOf": [{"properties": {name: inner}} for name in names[:60]]},
        lambda: {"propertyNames": {"enum": names}, "minProperties": count // 2},
    ]
    return rng.choice(ways)()


_SCHEMAS: list[Callable[[random.Random, int], Any]] = [_numbers, _referenced, _nested, _counted, _wide]


def hostile_regex(rng: random.Random, depth: int = 4) -> str:
    """Return a regular expression, which may need very many states."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([*_CLASSES, "a", "ab?", "é", r"\x{1F600}"])
    inner = hostile_regex(rng, depth - 1)
    low, high = sorted(rng.sample(_COUNTS[:8], 2))
    ways: list[Callable[[], str]] = [
        lambda: f"({inner}){{{low},{high}}}",
        lambda: f"({inner}){{{low},}}",
        lambda: f"({inner})*",
        lambda: f"(({inner})+)+",
        lambda: f"({inner}|{hostile_regex(rng, depth - 1)})",
        lambda: f".*{inner}.{{{min(low, 60)}}}",
        lambda: f"{inner}{hostile_regex(rng, depth - 1)}",
        lambda: "(" + "|".join(f"{rng.randint(0, 10**6)}{inner}" for _ in range(rng.choice([2, 30, 400]))) + ")",
    ]
    return rng.choice(ways)()[:20_000]


def _lark(rng: random.Random) -> str:
    names = [f"r{index}" for index in range(rng.choice([1, 3, 20, 300]))]

    def part(depth: int) -> str:
        if depth == 0:
            leaves: list[Callable[[], str]] = [
                lambda: rng.choice([*names, "TEXT", "<|im_end|>"]),
                lambda: json.dumps(rng.choice(_WORDS)),
                lambda: f"/{hostile_regex(rng, 2)}/",
                lambda: f"<[{rng.randint(0, 60_000)}]>",
                lambda: f"%json {json.dumps(random_schema(rng, 1))}",
            ]
            return rng.choice(leaves)()
        inner, other = part(depth - 1), part(depth - 1)
        low, high = sorted(rng.sample(_COUNTS[:8], 2))
        repeated = f"({inner}){{{low},{high}}}"
        return rng.choice([f"({inner} {other})", f"({inner} | {other})", f"({inner})*", f"({inner})?", repeated])

    attributes = ["", "", "[lazy]", f"[max_tokens={rng.choice(_COUNTS)}]", '[stop="a"]', "[capture]"]
    lines = [f"{name}{rng.choice(attributes)}: {part(rng.randint(0, 3))}" for name in names]
    start = rng.choice(["start: r0", "start: start start | r0", "start: r0* r0* r0*", 'start: ("a" | start)* r0'])
    lines += [f"TEXT: /{hostile_regex(rng, 2)}/ & ~/{hostile_regex(rng, 1)}/"]
    return "\n".join([start, *lines, *(["%ignore /[ ]+/"] if rng.random() < 0.2 else [])])


def _gbnf(rng: random.Random) -> str:
    count = rng.choice([1, 4, 60])
    parts = [rng.choice(["[a-z]", "[^x]", '"a"', f"r{index}"]) for index in range(count)]
    body = [f"({part}){{0,{rng.choice(_COUNTS[:7])}}}" for part in parts]
    rules = [f"r{index} ::= {body[index]} | r{rng.randrange(count)}?" for index in range(count)]
    return "\n".join(["root ::= " + " ".join(f"r{i}" for i in range(min(count, 5))), *rules])


def _choices(rng: random.Random) -> list[str]:
    count = rng.choice([1, 20, 600, 4_000])
    return [rng.choice(_WORDS) + str(rng.randint(0, 10**9)) * rng.choice([1, 1, 4]) for _ in range(count)]


def _tag(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0:
        leaves: list[Callable[[], Any]] = [
            lambda: {"type": "const_string", "value": rng.choice(_WORDS)},
            lambda: {"type": "json_schema", "json_schema": hostile_schema(rng, 1)},
            lambda: {"type": "any_text", "excludes": [word for word in _WORDS if word][: rng.randint(0, 9)]},
            lambda: {"type": "regex", "pattern": hostile_regex(rng, 3)},
            lambda: {"type": "grammar", "grammar": _lark(rng)},
        ]
        return rng.choice(leaves)()
    inner = [_tag(rng, depth - 1) for _ in range(rng.choice([1, 2, 5]))]
    tags = [
        {"type": "tag", "begin": f"<{index}", "content": each, "end": rng.choice(["", ">", ["a", "b"]])}
        for index, each in enumerate(inner)
    ]
    return rng.choice(
        [
            {"type": rng.choice(["sequence", "or"]), "elements": inner},
            {"type": rng.choice(["star", "plus", "optional"]), "content": inner[0]},
            {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": rng.random() < 0.5},
            {"type": "tags_with_separator", "tags": tags, "separator": rng.choice(["", ",", "<0"])},
            tags[0],
        ]
    )


def _tools(rng: random.Random) -> Fields:
    count = rng.choice([1, 3, 30])
    functions = [
        {"name": f"f{index}", "parameters": {"type": "object", "properties": {"a": hostile_schema(rng, 2)}}}
        for index in range(count)
    ]
    choice = rng.choice(["auto", "required", {"type": "function", "function": {"name": "f0"}}])
    fields: Fields = {"tools": [{"type": "function", "function": each} for each in functions], "tool_choice": choice}
    return {**fields, **_schema_fields(rng)} if rng.random() < 0.2 else fields


_FORMS: dict[str, Callable[[random.Random], Fields]] = {
    "schema": _schema_fields,
    "regex": lambda rng: {"guided_regex": hostile_regex(rng)},
    "lark": lambda rng: {"guided_grammar": _lark(rng)},
    "gbnf": lambda rng: {"guided_grammar": _gbnf(rng)},
    "choice": lambda rng: {"guided_choice": _choices(rng)},
    "tag": lambda rng: {"response_format": {"type": "structural_tag", "format": _tag(rng)}},
    "tools": _tools,
}
