"""The compiler from a schema to a grammar of the texts that fit the schema, in JSON or in another notation.

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
from paceline.core.json_grammar.builder import Builder, Scalars, Work
from paceline.core.json_grammar.conjunctions import Conjunctions, Facts, Unenforced
from paceline.core.json_grammar.document import SchemaDocument
from paceline.core.json_grammar.facts import values_of
from paceline.core.json_grammar.fitting import fits_facts
from paceline.core.json_grammar.notations import JSON_VALUES, Notation
from paceline.core.json_grammar.objects import object_ways
from paceline.core.json_grammar.parameters import ArgumentTypes
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Rule
from paceline.core.json_grammar.scalars import add_scalars

_WHITE_SPACE = r"[ \n\r\t]+"


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """Options for reading a schema."""

    white_space: str | None = _WHITE_SPACE
    """A regular expression for the white space between two JSON tokens; None if there is none."""
    closes: bool = True
    """Whether an object has only the members that its schema names, unless the schema has rules for other members. By
    the letter of JSON Schema, there may always be others.
    """
    is_lenient: bool = False
    """Treat a keyword with an impossible value as not enforced; otherwise it is an error."""
    notation: Notation = JSON_VALUES


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar, and the keywords that it does not enforce."""

    grammar: str
    unenforced: tuple[Unenforced, ...]


def compile_schema(schema: Any, options: SchemaOptions) -> Compiled:
    """Return the grammar of a schema.

    Raises:
        ConstraintError: no JSON fits the schema, it cannot be read, or it is too large.
    """
    return _Compiler(schema, options).compiled()


class _Compiler:
    def __init__(self, schema: Any, options: SchemaOptions) -> None:
        conjunctions = Conjunctions(SchemaDocument(schema), options.is_lenient)
        self._schema = schema
        self._options = options
        self.work = Work(conjunctions, options.closes)
        self.arguments = ArgumentTypes(schema) if options.notation.of_member else None
        self.left: list[tuple[Rule, Builder, list[Facts]]] = []
        """Rules of arrays and objects that wait until they are written."""
        self._builders: dict[Notation, _Values] = {}

    def builder(self, notation: Notation) -> _Values:
        """Return the builder of a notation's values."""
        if notation not in self._builders:
            limit = [{"type": sorted(notation.types)}] if notation.types and not self._options.closes else []
            self._builders[notation] = _Values(self, notation, limit)
        return self._builders[notation]

    def compiled(self) -> Compiled:
        """Return the grammar. Raises ConstraintError."""
        notation = self._options.notation
        start = self.builder(notation).value([self._schema, *([{"type": "object"}] if notation.of_member else [])])
        while self.left:
            rule, builder, ways = self.left.pop()
            for facts in ways:
                types = builder.types(facts)
                if "object" in types:
                    self.work.rules.add(rule, *object_ways(builder, facts))
                if "array" in types and not builder.notation.of_member:
                    self.work.rules.add(rule, *array_ways(builder, facts))
        lines = self.work.rules.written(start)
        if lines is None:
            reasons = "; ".join(dict.fromkeys(self.work.reasons[:3])) or "it needs itself without an end"
            raise ConstraintError(f"no JSON fits the schema: {reasons}")
        if notation is JSON_VALUES and self._options.white_space:
            space = regex_to_lark(self._options.white_space, use_ascii="")
            lines = ['%llguidance {"ignore_once": true}', f"%ignore /{space}/", *lines]
        return Compiled("\n".join([*lines, ""]), tuple(self.work.conjunctions.unenforced))


class _Values(Builder):
    """Builds the rules of values in one notation.

    Args:
        limit: schemas that all values have to fit.
    """

    def __init__(self, compiler: _Compiler, notation: Notation, limit: list[Any]) -> None:
        super().__init__(compiler.work, notation)
        self._compiler = compiler
        self._limit = limit
        self._known: dict[tuple[object, ...], Element] = {}
        self._kept: list[Any] = []
        """Schemas that must stay alive, because elements are looked up by the identity of their schemas."""

    @property
    def inside(self) -> Builder:
        return self if self.notation.inside is None else self._compiler.builder(self.notation.inside)

    def of_member(self, name: str | None) -> Builder:
        notation, arguments = self.notation.of_member, self._compiler.arguments
        if notation is None or arguments is None:
            return self
        return self._compiler.builder(notation(arguments.of(name)))

    def value(self, schemas: Sequence[Any]) -> Element:
        schemas = [schema for schema in [*schemas, *self._limit] if schema is not True and schema != {}]
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
        scalars = Scalars()
        others: list[Sequence[Element]] = []
        open_ways: list[Facts] = []
        for facts in found:
            values = values_of(facts)
            if values is not None:
                self._add_constants(values, facts, scalars, others)
                continue
            types = self.types(facts)
            if not types:
                self.impossible("no type is left")
            add_scalars(self, facts, types, scalars)
            if types & {"object", "array"}:
                open_ways.append(facts)
        ways_of_scalars = self.ways_of(scalars)
        if not others and not open_ways:
            if len(ways_of_scalars) == 1 and len(ways_of_scalars[0]) == 1:
                return ways_of_scalars[0][0]
            if not ways_of_scalars:
                return IMPOSSIBLE
        rule = self.rules.add(self.rules.new(), *ways_of_scalars, *others)
        if open_ways:
            if end := self.end():
                inside = self.rules.new()
                self.rules.add(rule, [inside, *end])
            else:
                inside = rule
            self._compiler.left.append((inside, self.inside, open_ways))
        return rule

    def _add_constants(
        self, values: Sequence[Any], facts: Facts, scalars: Scalars, others: list[Sequence[Element]]
    ) -> None:
        """Add the values of `enum` or `const` that fit all other keywords."""
        fitting = [value for value in values if fits_facts(value, facts, self.conjunctions)]
        if not fitting:
            self.impossible("no value in enum or const fits the other keywords")
        for value in fitting:
            if isinstance(value, list | dict):
                others.append([self.constant(value)])
            else:
                self.add_constant(scalars, value)


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
