"""What the JSON schema of a tool says about its arguments, for forms in which arguments are written in other ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.grammar import MAX_TEXT_BYTES, check_grammar
from paceline.core.types import ConstraintKind
from paceline.services.gateway.answers.expressions import ANY_TEXT, Spelling, regex

_ANYTHING: Mapping[str, Any] = {}
_MAX_REFERENCES = 16
_MAX_OPTIONS = 100
_MAX_LENGTH = 1000
"""Longer limits on the length of a string are not enforced, because a lexer needs a state for every character."""

SCALARS = frozenset({"integer", "number", "boolean", "null"})
"""Types whose values are written as in JSON in all forms."""


class Rules:
    """Rules that a form adds to its expression, each in a line of its own after it."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self._names: dict[str, str] = {}
        """Names of rules, by themselves if they were given, or by what follows them in their lines."""
        self._lines: list[str] = []
        self._written = 0
        self._count = 0

    def new_name(self) -> str:
        """Return a name for a rule that will be added."""
        self._count += 1
        return f"value_{self._count}"

    def add(self, expression: str, options: str = "", name: str = "") -> str:
        """Add a rule, unless there is an equal one. Return its name.

        Args:
            name: the name, if it is in use already.
        """
        rest = f"{options}: {expression}"
        known = self._names.get(name or rest)
        if known is None:
            known = self._names[name or rest] = name or self.new_name()
            self._lines.append(known + rest)
            self._written += len(rest)
            if self._written > MAX_TEXT_BYTES:  # which the check of the whole would find only after all is written
                raise ConstraintError(f"its grammar is longer than {MAX_TEXT_BYTES >> 10} KiB; shorten it")
        return known

    def text(self, schema: Mapping[str, Any], end: str) -> str:
        """Add a rule for text that the schema of a string allows, and for its end. Return the rule's name."""
        if self.spelling.is_token(end):
            return self.add(f"{self.add(_string(schema, ''))} {self.spelling.literal(end)}")
        return self.add(_string(schema, regex(end)), "[lazy]")

    def after(self, expression: str) -> str:
        """Return an expression with all rules after it."""
        return "\n".join([expression, *self._lines])


def resolve(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the schema that it refers to; {}, which allows anything, if that is not known."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(root, reference)
    return _ANYTHING


def types_of(schema: object, root: Mapping[str, Any], known: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """Return the JSON types of the values that a schema allows; none if it does not say.

    Args:
        known: types of schemas by their identity, which saves time, and ends the search where a schema has itself.
    """
    known = {} if known is None else known
    schema = resolve(schema, root)
    if id(schema) not in known:
        known[id(schema)] = frozenset()
        known[id(schema)] = _types_of(schema, root, known)
    return known[id(schema)]


def _types_of(schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, frozenset[str]]) -> frozenset[str]:
    if (values := choices_of(schema)) is not None:
        return frozenset(type_of_value(value) for value in values)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(map(str, named))
    if (options := options_of(schema)) and len(known) < _MAX_OPTIONS:
        types = [types_of(option, root, known) for option in options]
        return frozenset().union(*types) if all(types) else frozenset()
    return frozenset({"object"}) if "properties" in schema else frozenset()


def choices_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def options_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas one of which a value must follow; none if there is no such choice.

    In a schema with a type of its own they only add to it, for example names of required properties.
    """
    if "type" in schema or "properties" in schema:
        return []
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        if isinstance(options, list) and (name != "allOf" or len(options) == 1):
            return options
    return []


def properties_of(schema: Mapping[str, Any]) -> dict[str, tuple[object, bool]]:
    """Return the schema of each property of an object, and whether the property must be there."""
    listed, needed = schema.get("properties"), schema.get("required")
    properties = dict(listed) if isinstance(listed, Mapping) else {}
    required = {name: None for name in needed if isinstance(name, str)} if isinstance(needed, list) else {}
    properties |= {name: {} for name in required if name not in properties}
    return {name: (each, name in required) for name, each in properties.items()}


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


def escaped(text: str) -> str:
    """Return a piece of a text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return an expression for the JSON text of a value, for a schema within another one."""
    text = json.dumps(schema, ensure_ascii=False)
    names = ("x-guidance", "$defs", "definitions") if '"$ref"' in text else ("x-guidance",)
    shared = {name: root[name] for name in names if name in root}
    return f"%json {json.dumps({**shared, **schema}, ensure_ascii=False)}"


def _string(schema: Mapping[str, Any], end: str) -> str:
    """Return a terminal for a string that a schema allows, followed by text that matches the expression `end`."""
    low, high, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
    high = high if isinstance(high, int) and high <= _MAX_LENGTH else None
    expressions = []
    if high is not None or (isinstance(low, int) and 0 < low <= _MAX_LENGTH):
        expressions.append(rf"(.|\n){{{low},{'' if high is None else high}}}")
    if isinstance(pattern, str) and (found := _regex(pattern)) is not None:
        expressions.append(found)
    return " & ".join(f"/{expression}{end}/" for expression in expressions or [ANY_TEXT])


def _regex(pattern: str) -> str | None:
    """Return a schema's pattern, which may match within a text, as an expression for the whole text.

    Returns None if the pattern cannot be enforced in a grammar.
    """
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    bare = pattern.removeprefix("^")[: -1 if ends else None]
    try:
        check_grammar(ConstraintKind.REGEX, f"x({bare})x")  # anchors within it would be refused later
    except ConstraintError:
        return None
    before, after = "" if pattern.startswith("^") else ANY_TEXT, "" if ends else ANY_TEXT
    return f"{before}({regex_to_lark(bare, use_ascii='dw')}){after}"


def _at(root: Mapping[str, Any], reference: str) -> object:
    place: object = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _refuse(constant: str) -> None:
    raise ValueError(constant)
