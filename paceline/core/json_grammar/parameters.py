"""Reading of arguments by their schemas, for notations in which the text does not show the type, as in calls of
Qwen3-Coder.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.conjunctions import Conjunctions
from paceline.core.json_grammar.document import SchemaDocument
from paceline.core.json_grammar.facts import types_of, values_of
from paceline.core.json_grammar.members import ObjectMembers

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""JSON's words for Python's words that models write."""
_SPACE = " \n\r\t"
_UNREADABLE = (ConstraintError, ValueError, RecursionError)
"""Errors after which a schema is not enforced."""


class ArgumentTypes:
    """The types that a tool's schema allows for each argument; no types if the schema cannot be read.

    Args:
        schema: the schema of the object that has all arguments as members.
    """

    def __init__(self, schema: Any) -> None:
        self._known: dict[str | None, frozenset[str]] = {None: frozenset()}
        self._ways: list[ObjectMembers] = []
        # A schema that cannot be read is not enforced either.
        with contextlib.suppress(*_UNREADABLE):
            self._conjunctions = Conjunctions(SchemaDocument(schema), is_lenient=True)
            ways = self._conjunctions.alternatives([schema])
            self._ways = [ObjectMembers(facts, self._conjunctions, closes=True) for facts in ways]
        for name in [None, *(name for members in self._ways for name in members.names)]:
            self._known[name] = self._of(name)

    def of(self, name: str | None) -> frozenset[str]:
        """Return the types of an argument; an empty set if they are unknown. The name None means all arguments that the
        schema does not list.

        "number" includes integers.
        """
        return self._known[name if name in self._known else None]

    def _of(self, name: str | None) -> frozenset[str]:
        try:
            return frozenset().union(*(self._types(each) for each in self._schemas(name)))
        except _UNREADABLE:
            return frozenset()

    def _schemas(self, name: str | None) -> list[list[Any]]:
        """Return lists of schemas. An argument has to fit one of the lists."""
        found = []
        for members in self._ways:
            if name is not None:
                found.append(members.schemas(name, members.fitting(name)))
            else:
                fitting = [frozenset(), *(frozenset({pattern}) for pattern in members.patterns)]
                found += [members.schemas(None, each) for each in fitting]
        return found

    def _types(self, schemas: Sequence[Any]) -> frozenset[str]:
        found: set[str] = set()
        for facts in self._conjunctions.alternatives(schemas):
            values = values_of(facts)
            if values is None:
                found |= types_of(facts, self._conjunctions, by_keywords=True)
            else:
                found |= {type_of_value(value) for value in values}
        return frozenset(found)


ANY_TYPES = ArgumentTypes({})
"""The types of arguments about which nothing is known."""


def argument_types(schema: Any) -> ArgumentTypes:
    """Return the types of a tool's arguments. Results are cached, because clients send the same tools often."""
    try:
        return _types_in(json.dumps(schema))
    except _UNREADABLE:
        return ANY_TYPES


@functools.lru_cache(maxsize=256)
def _types_in(text: str) -> ArgumentTypes:
    return ArgumentTypes(json.loads(text))


def is_text(text: str, types: frozenset[str]) -> bool:
    """Return whether an argument of these types, which include "string", is read as a plain text."""
    return _as_json(text, types) is None


def json_of(text: str, types: frozenset[str]) -> str:
    """Return an argument as JSON of one of these types. Without types, text that is JSON is kept as JSON, and other
    text becomes a string.
    """
    found = _as_json(text, types)
    return json.dumps(text, ensure_ascii=False) if found is None else found


def _as_json(text: str, types: frozenset[str]) -> str | None:
    """Return the JSON as which an argument is read; None if it is a text."""
    value = text.strip(_SPACE)
    if types & {"boolean", "null"}:
        value = PYTHON_WORDS.get(value, value)
    found = type_of_text(value)
    if found is None or ("string" in types and (found == "string" or not _has(types, found))):
        return None
    return value


def _has(types: frozenset[str], found: str) -> bool:
    return found in types or (found == "integer" and "number" in types)


def type_of_text(text: str) -> str | None:
    """Return the JSON type of a value in JSON text; None if the text is not JSON."""
    try:
        # Numbers stay unread, because the largest ones are errors in Python.
        value = json.loads(text, parse_int=lambda digits: 0, parse_float=lambda digits: 0.5, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return type_of_value(value)


def type_of_value(value: object) -> str:
    """Return the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _refuse(constant: str) -> None:
    raise ValueError(constant)
