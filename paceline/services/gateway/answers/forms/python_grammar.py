"""Grammars of calls in Python's syntax whose arguments fit JSON schemas.

Types, choices, members and items of a schema are enforced as in JSON, and so are all limits of strings and numbers,
which are the same text in both. A schema that is written otherwise, such as by `allOf`, allows any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from paceline.services.gateway.answers.expressions import Tool, json_value, quoted, regex
from paceline.services.gateway.answers.forms.python_literals import write_key, write_literal

_STRING = r""""([^"\\\n]|\\(.|\n))*"|'([^'\\\n]|\\(.|\n))*'"""

_COMMON = (
    "form_any: FORM_STRING | FORM_NUMBER | FORM_WORD | form_list | form_dict",
    'form_list: "[" SPACE (form_any (FORM_COMMA form_any)*)? SPACE "]"',
    'form_dict: "{" SPACE (form_member (FORM_COMMA form_member)*)? SPACE "}"',
    "form_member: FORM_STRING FORM_COLON form_any",
    f"FORM_STRING: /{_STRING}/",
    r"FORM_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    "FORM_WORD: /True|False|None|true|false|null/",
    r"FORM_COMMA: /,[ \n\r\t]{0,8}/",
    r"FORM_COLON: /:[ \n\r\t]{0,8}/",
)
_WORDS = {"boolean": "/True|False|true|false/", "null": "/None|null/"}
_NOTES = {"title", "description", "default", "examples"}
"""Members of a schema that allow all values."""


class CallRules:
    """The rules for calls of tools.

    Attributes:
        lines: the rules, one a line.
        named: the name of each tool, and the rule for what comes after it and the opening bracket.
        call: an expression for one call.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.lines = [*_COMMON]
        self.named = [(tool.name, _Values(self.lines, tool.parameters).arguments()) for tool in tools]
        self.call = "(" + " | ".join(f"{quoted(name + '(')} {rest}" for name, rest in self.named) + ")"


class _Values:
    """Expressions for the values of the schemas within one tool's parameters.

    Args:
        lines: takes the rules of the expressions.
        root: the schema of the parameters, to which references refer.
    """

    def __init__(self, lines: list[str], root: Mapping[str, Any]) -> None:
        self._lines = lines
        self._root = root
        self._referred: dict[str, str] = {}
        """The rules of references that have been met."""

    def arguments(self) -> str:
        """Return the rule for the arguments of a call, the closing bracket included."""
        keys = r"([A-Za-z_][A-Za-z0-9_]*)="
        return self._rule(f'{self._members(self._root, lambda key: regex(write_key(key)) + "=", keys)} ")"')

    def _value(self, schema: Any) -> str:
        """Return an expression for the values that a schema allows."""
        if not isinstance(schema, dict) or not schema.keys() - _NOTES:
            return "form_any"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "enum" in schema or "const" in schema:
            return _choice(schema.get("enum", [schema.get("const")]))
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return self._one_of(schema[several])
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._one_of([{**schema, "type": one} for one in kind])
        if kind in _WORDS:
            return _WORDS[kind]
        if kind == "object":
            members = self._members(schema, lambda key: _either_quotes(key) + r":[ \n\r\t]{0,8}", _KEYS)
            return self._rule(f'"{{" SPACE {members} SPACE "}}"')
        if kind == "array":
            return self._rule(f'"[" SPACE {self._items(schema)} SPACE "]"')
        if kind == "string" and not schema.keys() - _NOTES - {"type"}:
            return "FORM_STRING"
        return json_value(schema) if kind in ("string", "integer", "number") else "form_any"

    def _one_of(self, schemas: Sequence[Any]) -> str:
        return "(" + " | ".join(map(self._value, schemas)) + ")"

    def _reference(self, place: str) -> str:
        if place not in self._referred:
            self._referred[place] = f"form_{len(self._lines)}"
            at = len(self._lines)
            self._lines.append("")  # the place of the rule, whose schema may refer to itself
            self._lines[at] = f"{self._referred[place]}: {self._value(_resolve(self._root, place))}"
        return self._referred[place]

    def _items(self, schema: Mapping[str, Any]) -> str:
        item = self._rule(self._value(schema.get("items")))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '""'
        more = f"(FORM_COMMA {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f"({item} {more})" + ("" if least else "?")

    def _members(self, schema: Mapping[str, Any], spell: Callable[[str], str], others: str) -> str:
        """Return an expression for members in the order of the schema's properties, and for others after them.

        Args:
            spell: returns a regular expression for a key, with what separates it from its value.
            others: the same for any key.
        """
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        entries = {**properties, **{name: None for name in required if name not in properties}}
        more, first = '""', '""'
        """Expressions for the members from here on, if there is one before them, and if there is none."""
        extra = schema.get("additionalProperties", True)
        if extra is not False:
            known = "|".join(map(spell, entries))
            key = self._terminal(f"/{others}/" + (f" & ~/{known}/" if known else ""))
            other = self._rule(f"{key} {self._value(extra)}")
            more = self._rule(f"(FORM_COMMA {other})*")
            first = f"({other} {more})?"
        for name, value in reversed(entries.items()):
            member = self._rule(f"/{spell(name)}/ {self._value(value)}")
            is_required = name in required
            first = self._rule(f"{member} {more}" + ("" if is_required else f" | {first}"))
            more = self._rule(f"(FORM_COMMA {member}){'' if is_required else '?'} {more}")
        return f"({first})"

    def _rule(self, expression: str) -> str:
        name = f"form_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"FORM_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name


_KEYS = rf"({_STRING}):[ \n\r\t]{{0,8}}"


def _either_quotes(text: str) -> str:
    """Return a regular expression for a string with either quotes."""
    spelled = json.dumps(text, ensure_ascii=False)
    simple = not re.search(r"""['"\\]""", text) and spelled[1:-1] == text
    return f"({regex(spelled)}|{regex(chr(39) + text + chr(39))})" if simple else regex(spelled)


def _choice(values: Sequence[Any]) -> str:
    """Return an expression for one of some values."""
    return (
        "("
        + " | ".join(f"/{_either_quotes(v)}/" if isinstance(v, str) else quoted(write_literal(v)) for v in values)
        + ")"
    )


def _resolve(root: Mapping[str, Any], place: str) -> Any:
    """Return the schema at a place such as `#/$defs/item`; None if there is none."""
    found: Any = root
    for step in unquote(place.removeprefix("#")).split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
