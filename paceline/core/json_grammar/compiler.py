"""Grammars of the JSON texts that fit a schema.

A rule stands for a conjunction of schemas, which may refer to themselves. Conjunctions wait in a list until their rules
are written, so that a deep schema needs no deep stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.arrays import array_ways
from paceline.core.json_grammar.builder import Builder, literal, values_of
from paceline.core.json_grammar.conjunctions import Conjunctions, Facts, Unenforced
from paceline.core.json_grammar.document import Document
from paceline.core.json_grammar.fitting import fits_facts
from paceline.core.json_grammar.objects import object_ways
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Rule
from paceline.core.json_grammar.scalars import scalar_expressions

_WHITE_SPACE = r"[ \n\r\t]+"


@dataclass(frozen=True, slots=True)
class Options:
    """How a schema is read."""

    white_space: str | None = _WHITE_SPACE
    """A regular expression for the white space between two JSON tokens; None if there is none."""
    closes: bool = True
    """An object has only the members that its schema names, unless the schema speaks of others. By the letter of JSON
    Schema, there may be others."""
    is_lenient: bool = False
    """Treat a keyword with an impossible value as not enforced; otherwise it is an error."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and what it does not enforce."""

    grammar: str
    unenforced: tuple[Unenforced, ...]


def compile_schema(schema: Any, options: Options) -> Compiled:
    """Return the grammar of a schema.

    Raises:
        ConstraintError: no JSON fits the schema, it cannot be read, or it is too large.
    """
    return _Compiler(schema, options).compiled()


class _Compiler(Builder):
    def __init__(self, schema: Any, options: Options) -> None:
        super().__init__(Conjunctions(Document(schema), options.is_lenient), closes=options.closes)
        self._schema = schema
        self._options = options
        self._known: dict[tuple[object, ...], Element] = {}
        self._kept: list[Any] = []
        """Schemas by whose identity elements are known."""
        self._left: list[tuple[Rule, list[Facts]]] = []

    def compiled(self) -> Compiled:
        """Return the grammar. Raises ConstraintError."""
        start = self.value([self._schema])
        while self._left:
            rule, ways = self._left.pop()
            for facts in ways:
                types = self.types(facts)
                if "object" in types:
                    self.rules.add(rule, *object_ways(self, facts))
                if "array" in types:
                    self.rules.add(rule, *array_ways(self, facts))
        lines = self.rules.written(start)
        if lines is None:
            reasons = "; ".join(dict.fromkeys(self.reasons[:3])) or "it needs itself without an end"
            raise ConstraintError(f"no JSON fits the schema: {reasons}")
        if self._options.white_space:
            space = regex_to_lark(self._options.white_space, use_ascii="")
            lines = ['%llguidance {"ignore_once": true}', f"%ignore /{space}/", *lines]
        return Compiled("\n".join([*lines, ""]), tuple(self.conjunctions.unenforced))

    def value(self, schemas: Sequence[Any]) -> Element:
        """Return an element for the values that fit all schemas."""
        schemas = [schema for schema in schemas if schema is not True and schema != {}]
        if not schemas:
            return self.any()
        key = tuple(dict.fromkeys(schema if isinstance(schema, bool) else id(schema) for schema in schemas))
        if key not in self._known:
            self._kept += schemas
            self._known[key] = self._new_value(schemas)
        return self._known[key]

    def _new_value(self, schemas: Sequence[Any]) -> Element:
        ways = list(dict.fromkeys(map(_Identical, self.conjunctions.alternatives(schemas))))
        found = [way.facts for way in ways]
        if not found:
            return self.impossible("a schema is false")
        if () in found:
            return self.any()
        scalars: dict[str, None] = {}
        others: list[Sequence[Element]] = []
        open_ways: list[Facts] = []
        for facts in found:
            values = values_of(facts)
            if values is not None:
                fitting = [value for value in values if fits_facts(value, facts, self.conjunctions)]
                if not fitting:
                    self.impossible("no value in enum or const fits the other keywords")
                for value in fitting:
                    if isinstance(value, list | dict):
                        others.append(self.constant(value))
                    else:
                        scalars[literal(value)] = None
                continue
            types = self.types(facts)
            if not types:
                self.impossible("no type is left")
            for expression in scalar_expressions(self, facts, types):
                if isinstance(expression, str):
                    scalars[expression] = None
                else:
                    others.append([expression])
            if types & {"object", "array"}:
                open_ways.append(facts)
        if scalars:
            text = self.rules.terminal(" | ".join(scalars))
            if not others and not open_ways:
                return text
            others.insert(0, [text])
        if not others and not open_ways:
            return IMPOSSIBLE
        rule = self.rules.add(self.rules.new(), *others)
        if open_ways:
            self._left.append((rule, open_ways))
        return rule


class _Identical:
    """Facts that are the same if their schemas are the same objects."""

    __slots__ = ("_key", "facts")

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._key = tuple(map(id, facts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)
