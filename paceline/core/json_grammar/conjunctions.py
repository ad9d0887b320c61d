"""Conjunctions: a value has to fit all of several schemas, in one of several ways.

The keywords that combine schemas (`$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if`, `dependentRequired` and others) are
resolved here. The schemas that are left, called facts, describe values directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.document import SchemaDocument
from paceline.core.json_grammar.languages import matcher_of, matches

Facts = tuple[Mapping[str, Any], ...]
"""Schemas without combining keywords. A value must fit all of them."""

EXCLUDED = "\0excluded"
"""A keyword that only this package uses: a list of values that are not allowed."""
EXCLUDED_TYPES = "\0excluded types"

_ASSERTIONS = frozenset(
    [
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "minItems",
        "maxItems",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "unevaluatedProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
    ]
) | {EXCLUDED, EXCLUDED_TYPES}

_MAX_STEPS = 200_000
"""Largest number of steps of work for one schema. A step takes some microseconds."""
_MATCHER_STEPS, _MATCHER_CHARACTERS = 300, 25
"""Price of compiling a pattern, in steps, and the pattern's characters that cost one step more."""
_MATCH_STEPS, _MATCH_CHARACTERS = 20, 8
"""Price of comparing a text with a pattern, in steps, and the text's characters that cost a step more."""
_MAX_WAYS = 1_000
_MOST_MISSED = 50
"""Largest number of places of one keyword that are listed as not enforced."""
_MOST_NESTED = 8
"""Largest number of references and unions between an alternative and its own properties that are followed for a
discriminator."""


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that is not enforced, or only partly."""

    path: str
    """Names with dots between them, from the root of the schema to the keyword."""
    keyword: str


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of a schema that describes values directly."""

    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Alternatives, each a sequence of parts. A value must fit at least one of them."""

    ways: tuple[tuple[Any, ...], ...]


_NEVER = _Choice(())


class Conjunctions:
    """Resolves the schemas of a document.

    Args:
        is_lenient: treat a keyword with an impossible value as not enforced; otherwise such a keyword is an error.
    """

    def __init__(self, document: SchemaDocument, is_lenient: bool) -> None:
        self.document = document
        self.unenforced: dict[Unenforced, None] = {}
        self._missed: Counter[str] = Counter()
        """Number of the places in `unenforced`, by keyword."""
        self._is_lenient = is_lenient
        self._steps = _MAX_STEPS
        self._opened: dict[int, tuple[Any, ...]] = {}
        self._matchers: dict[str, LLMatcher] = {}
        self._scalars: dict[int, tuple[list[Any], frozenset[tuple[bool, Any]]]] = {}
        """Keys of the scalars in lists by the identity of the lists, which are kept so that identities stay unique."""

    def spend(self, steps: int) -> None:
        """Add to the work that was done for this schema. Raises ConstraintError if the sum is too large."""
        self._steps -= steps
        if self._steps < 0:
            raise ConstraintError("it is too large to be enforced; make it smaller, especially combinations of schemas")

    def matches(self, terminal: str, text: str) -> bool:
        """Return whether a text matches a terminal. Raises ConstraintError if it takes too long."""
        if terminal not in self._matchers:
            self.spend(_MATCHER_STEPS + len(terminal) // _MATCHER_CHARACTERS)
            self._matchers[terminal] = matcher_of(terminal)
        self.spend(_MATCH_STEPS + len(text) // _MATCH_CHARACTERS)
        return matches(self._matchers[terminal], text)

    def scalars_of(self, values: list[Any]) -> frozenset[tuple[bool, Any]]:
        """Return the keys (`key_of`) of the scalars in a list. Results are cached, so the list must never change."""
        if id(values) not in self._scalars:
            self.spend(len(values) // 8)
            keys = frozenset(key_of(each) for each in values if not isinstance(each, list | dict))
            self._scalars[id(values)] = values, keys
        return self._scalars[id(values)][1]

    def miss(self, schema: object, keyword: str) -> None:
        """Note that a keyword of a schema is not enforced, for the list of such keywords."""
        if self._missed[keyword] >= _MOST_MISSED:
            return
        path = self.document.path(schema)
        missed = Unenforced(f"{path}.{keyword}" if path else keyword, keyword)
        if missed not in self.unenforced:
            self._missed[keyword] += 1
            self.unenforced[missed] = None

    def refuse(self, schema: object, keyword: str, reason: str) -> None:
        """Raise ConstraintError for a keyword that cannot be read, or only note it if `is_lenient`."""
        if not self._is_lenient:
            path = self.document.path(schema)
            raise ConstraintError(f"{path}.{keyword}: {reason}" if path else f"{keyword}: {reason}")
        self.miss(schema, keyword)

    def alternatives(self, parts: Iterable[Any]) -> list[Facts]:
        """Return the ways to fit all of several schemas; an empty list if no value fits all of them."""
        found: list[Facts] = []
        left: list[tuple[list[Any], Facts, frozenset[int]]] = [(list(parts)[::-1], (), frozenset())]
        while left:
            pending, facts, seen = left.pop()
            seen_here = set(seen)
            while pending:
                self.spend(1)
                part = pending.pop()
                if isinstance(part, _Own):
                    facts += (part.schema,)
                elif isinstance(part, _Choice):
                    self.spend(len(part.ways) * (1 + len(pending) + len(seen_here)))
                    branches = [([*pending, *reversed(way)], facts, frozenset(seen_here)) for way in part.ways]
                    left += reversed(branches)
                    break
                elif id(part) not in seen_here:
                    seen_here.add(id(part))
                    pending += reversed(self._open(part))
            else:
                found.append(facts)
                if len(found) > _MAX_WAYS:
                    self.spend(_MAX_STEPS)
        return found

    def _open(self, schema: Any) -> tuple[Any, ...]:
        """Return the parts of a schema: its own facts, schemas that also apply, and choices."""
        if isinstance(schema, bool):
            return () if schema else (_NEVER,)
        if not isinstance(schema, dict):
            raise ConstraintError("a schema must be a JSON object, or true")
        if id(schema) not in self._opened:
            parts = tuple(self._parts(schema))
            # In OpenAPI 3.0 it is beside a type. Generators write it beside `$ref`, too.
            if schema.get("nullable") is True:
                parts = (_Choice((parts, ({"type": "null"},))),)
            self._opened[id(schema)] = parts
        return self._opened[id(schema)]

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yield parts in the order of keywords, which is the order in which properties are written."""
        is_written = False
        for keyword, value in schema.items():
            if keyword in _ASSERTIONS:
                if not is_written:
                    is_written = True
                    yield _Own(schema)
                continue
            match keyword:
                case "$ref" | "$dynamicRef" | "$recursiveRef":
                    yield self.document.resolve(value)
                case "allOf" | "anyOf" | "oneOf":
                    if not isinstance(value, list) or not value:
                        self.refuse(schema, keyword, f'"{keyword}" must be a list of schemas')
                    elif keyword == "allOf":
                        yield from value
                    else:
                        yield _Choice(tuple((way, *self._tag(way, schema.get("discriminator"))) for way in value))
                        if keyword == "oneOf" and "discriminator" not in schema and not self._are_apart(value):
                            self.miss(schema, keyword)
                case "not":
                    yield from self._negated(value, schema, keyword)
                case "if" if "then" in schema or "else" in schema:
                    otherwise = (*self._negated(value, schema, "if"), schema.get("else", True))
                    yield _Choice(((value, schema.get("then", True)), otherwise))
                case "dependentRequired" | "dependentSchemas" | "dependencies" if isinstance(value, dict):
                    for name, needed in value.items():
                        more = {"required": [name, *needed]} if isinstance(needed, list) else needed
                        yield _Choice((({"properties": {name: False}},), ({"required": [name]}, more)))

    def _tag(self, way: Any, discriminator: Any) -> Iterator[Any]:
        """Yield a part that requires the discriminating property of an alternative, if the alternative declares it.

        Readers of such a union need the property, even if the alternative has a default for it.
        """
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(name, str) and self._declares(way, name, _MOST_NESTED):
            yield {"required": [name]}

    def _declares(self, schema: Any, name: str, depth: int) -> bool:
        """Return whether a schema, or each of its alternatives, has a property of this name."""
        self.spend(1)
        if not isinstance(schema, dict) or depth == 0:
            return False
        if _property(schema, name) is not None:
            return True
        if isinstance(schema.get("$ref"), str):
            return self._declares(self.document.resolve(schema["$ref"]), name, depth - 1)
        ways = schema.get("oneOf", schema.get("anyOf"))
        return isinstance(ways, list) and bool(ways) and all(self._declares(way, name, depth - 1) for way in ways)

    def _negated(self, schema: Any, place: object, keyword: str) -> Iterator[Any]:
        """Yield parts for the values that do not fit a schema. Note the keyword if they cannot be described exactly."""
        negation = self._negation(schema)
        if negation is None:
            self.miss(place, keyword)
        else:
            yield negation

    def _negation(self, schema: Any) -> Any | None:
        self.spend(1)  # references may lead to one schema in exponentially many ways
        if isinstance(schema, bool) or schema == {}:
            return _NEVER if schema is not False else True
        if not isinstance(schema, dict):
            return None
        keywords = schema.keys() & (_ASSERTIONS | {"$ref", "allOf", "anyOf", "oneOf", "not", "if"})
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        match sorted(keywords - ({"type"} if isinstance(values, list) else set())):
            case ["const"] | ["enum"] if isinstance(values, list):
                # Only scalars can be excluded one by one.
                return None if any(isinstance(value, list | dict) for value in values) else {EXCLUDED: values}
            case ["type"]:
                names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
                # There is no type for numbers that are not whole.
                is_known = _are_names(names) and ("integer" not in names or "number" in names)
                return {EXCLUDED_TYPES: names} if is_known else None
            case ["not"]:
                return schema["not"]
            case ["$ref"]:
                target = self.document.resolve(schema["$ref"])
                return self._negation(target) if "$ref" not in target else None
            case ["anyOf"] if isinstance(schema["anyOf"], list):
                parts = [self._negation(each) for each in schema["anyOf"]]
                return None if None in parts else {"allOf": parts} if _NEVER not in parts else _NEVER
            case ["required"] if isinstance(schema["required"], list):
                return _Choice(tuple(({"type": "object", "properties": {name: False}},) for name in schema["required"]))
            case (
                ["properties"]
                | ["properties", "required"]
                | ["properties", "required", "type"]
                | [
                    "properties",
                    "type",
                ]
            ):
                return self._negated_property(schema)
        return None

    def _negated_property(self, schema: Mapping[str, Any]) -> Any | None:
        """Return a schema for values that do not fit a schema of one property, which conditions usually have."""
        if not isinstance(schema["properties"], dict) or len(schema["properties"]) != 1:
            return None
        ((name, value),) = schema["properties"].items()
        if schema.get("required", [name]) != [name] or schema.get("type", "object") != "object":
            return None
        other = self._negation(value)
        if other is None or isinstance(other, _Choice):
            return None
        differs = ({"type": "object", "properties": {name: other}, "required": [name]},)
        absent = ({"type": "object", "properties": {name: False}},)
        return _Choice((differs, absent) if "required" in schema else (differs,))

    def _are_apart(self, ways: list[Any]) -> bool:
        """Return whether types, or the value of a property, show that no value fits two of these schemas."""
        schemas = []
        for way in ways:
            target = way
            for _ in range(16):
                if isinstance(target, dict) and "$ref" in target:
                    target = self.document.resolve(target["$ref"])
            schemas.append(target)
        self.spend(len(schemas))
        if not all(isinstance(each, dict) for each in schemas):
            return False
        types = ["number" if each.get("type") == "integer" else each.get("type") for each in schemas]
        if all(isinstance(each, str) for each in types) and len(set(types)) == len(types):
            return True
        if _are_distinct(schemas):
            return True
        required = [frozenset(each["required"]) if _are_names(each.get("required")) else () for each in schemas]
        self.spend(sum(map(len, required)))
        names = set(schemas[0]["properties"]) if isinstance(schemas[0].get("properties"), dict) else set()
        for name in names.intersection(*required):
            self.spend(len(schemas))
            if _are_distinct([_property(each, name) for each in schemas]):
                return True
        return False


def key_of(scalar: Any) -> tuple[bool, Any]:
    """Return a key that is the same for equal scalars. In JSON, 1 equals 1.0, but not true."""
    return isinstance(scalar, bool), scalar


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _are_distinct(schemas: list[Any]) -> bool:
    """Return whether schemas list their values and have none in common."""
    seen: set[str] = set()
    count = 0
    for schema in schemas:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, dict) else 0
        if not isinstance(values, list):
            return False
        texts = {repr(value) for value in values}
        seen |= texts
        count += len(texts)
    return len(seen) == count
