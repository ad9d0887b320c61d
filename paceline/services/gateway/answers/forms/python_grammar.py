"""Grammars of calls in Python's syntax whose arguments fit JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.services.gateway.answers.expressions import SPACE, Spelling, Tool, quoted
from paceline.services.gateway.answers.forms.python_literals import in_single_quotes, write_key, write_literal
from paceline.services.gateway.answers.schemas import Rules, json_schema, resolve
from paceline.services.gateway.answers.values import ValueGrammar

_STRING = r""""([^"\\\n]|\\(.|\n))*"|'([^'\\\n]|\\(.|\n))*'"""
_WORDS = {"boolean": "/True|False|true|false/", "null": "/None|null/"}
_ANY_ARGUMENT = "/[A-Za-z_][A-Za-z0-9_]{0,63}=/"
_LIMITS = {"minLength", "maxLength", "pattern", "format"}
"""Members of a schema that limit strings."""


class PythonValues(ValueGrammar):
    """Expressions for Python literals. Numbers are as in JSON, and so are strings whose schema limits them."""

    comma = f"/,{SPACE}/"
    any_key = f"STRING /:{SPACE}/"

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(Rules(spelling))
        self.rules.add(f"/{_STRING}/", name="STRING")

    def call(self, tools: Sequence[Tool]) -> str:
        """Return the name of a rule for a call of one of these tools."""
        return self.rules.add(" | ".join(f'{quoted(f"{tool.name}(")} ({self._arguments(tool)}) ")"' for tool in tools))

    def literal(self, value: object) -> str:
        if not isinstance(value, str):
            return quoted(write_literal(value))
        return f"({quoted(write_literal(value))} | {quoted(in_single_quotes(value))})"

    def key(self, name: str) -> str:
        return f"{self.literal(name)} /:{SPACE}/"

    def string(self, schema: Mapping[str, Any]) -> str:
        return json_schema({**schema, "type": "string"}, self.root) if schema.keys() & _LIMITS else "STRING"

    def scalar(self, types: frozenset[str], schema: Mapping[str, Any]) -> str:
        found = [_WORDS[type_] for type_ in sorted(types & _WORDS.keys())]
        if numbers := types - _WORDS.keys():
            found.append(super().scalar(numbers, schema))
        return " | ".join(found)

    def _arguments(self, tool: Tool) -> str:
        self.root = tool.parameters
        return self.members(resolve(self.root, self.root), lambda name: quoted(f"{write_key(name)}="), _ANY_ARGUMENT)
