"""Grammars of the JSON texts that fit a schema.

A rule stands for a conjunction of schemas, which may refer to themselves. Conjunctions wait in a list until their rules
are written, so that a deep schema needs no deep stack.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import isfinite, lcm
from typing import Any

from llguidance import regex_to_lark

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.conjunctions import EXCLUDED, Conjunctions, Facts, Unenforced
from paceline.core.json_grammar.document import Document
from paceline.core.json_grammar.facts import (
    Members,
    bounds,
    combined,
    fits,
    fits_facts,
    item_schemas,
    least_and_most,
    pattern_terminals,
    patterns_of,
    prefix_length,
    steps,
    types_of,
)
from paceline.core.json_grammar.languages import is_possible
from paceline.core.json_grammar.numbers import NUMBER, Bound, fraction, has_multiple, number
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Impossible, Repeat, Rule, Rules
from paceline.core.json_grammar.strings import spelled, string_of

MAX_MULTIPLE = 10_000
"""Largest `multipleOf` without its point. The library makes a state for each remainder: large primes take minutes."""

_MAX_COUNTED = 200
"""Most properties of an object whose members are counted, for `minProperties` and `maxProperties`."""
_MAX_COUNT = 50
_OVERLAPPING = 3
"""Most patterns for names that may overlap: each set of them is a case of its own."""

_STRING = string_of(0, None)
_SCALARS = f'{_STRING} | /{NUMBER}/ | "true" | "false" | "null"'
_WHITE_SPACE = r"[ \n\r\t]+"
_BOUND = Fraction(10**15)
"""Numbers with `multipleOf` are at most this."""


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


class _Compiler:
    def __init__(self, schema: Any, options: Options) -> None:
        self._schema = schema
        self._options = options
        self._conjunctions = Conjunctions(Document(schema), options.is_lenient)
        self._rules = Rules()
        self._known: dict[tuple[object, ...], Element] = {}
        self._kept: list[Any] = []
        """Schemas by whose identity elements are known."""
        self._left: list[tuple[Rule, list[Facts]]] = []
        self._anything: Rule | None = None
        self._reasons: list[str] = []
        """Why parts of the schema are impossible."""

    def compiled(self) -> Compiled:
        start = self._value([self._schema])
        while self._left:
            rule, ways = self._left.pop()
            for facts in ways:
                types = self._types(facts)
                if "object" in types:
                    self._rules.add(rule, *self._object(facts))
                if "array" in types:
                    self._rules.add(rule, *self._array(facts))
        lines = self._rules.written(start)
        if lines is None:
            reasons = "; ".join(dict.fromkeys(self._reasons[:3])) or "it needs itself without an end"
            raise ConstraintError(f"no JSON fits the schema: {reasons}")
        if self._options.white_space:
            space = regex_to_lark(self._options.white_space, use_ascii="")
            lines = ['%llguidance {"ignore_once": true}', f"%ignore /{space}/", *lines]
        return Compiled("\n".join([*lines, ""]), tuple(self._conjunctions.unenforced))

    def _impossible(self, reason: str) -> Impossible:
        self._reasons.append(reason)
        return IMPOSSIBLE

    # ---- values

    def _value(self, schemas: Sequence[Any]) -> Element:
        """Return an element for the values that fit all schemas."""
        schemas = [schema for schema in schemas if schema is not True and schema != {}]
        if not schemas:
            return self._any()
        key = tuple(dict.fromkeys(schema if isinstance(schema, bool) else id(schema) for schema in schemas))
        if key not in self._known:
            self._kept += schemas
            self._known[key] = self._new_value(schemas)
        return self._known[key]

    def _new_value(self, schemas: Sequence[Any]) -> Element:
        ways = list(dict.fromkeys(map(_Identical, self._conjunctions.alternatives(schemas))))
        found = [way.facts for way in ways]
        if not found:
            return self._impossible("a schema is false")
        if () in found:
            return self._any()
        scalars: dict[str, None] = {}
        others: list[Sequence[Element]] = []
        open_ways: list[Facts] = []
        for facts in found:
            values = _values(facts)
            if values is not None:
                fitting = [value for value in values if fits_facts(value, facts, self._conjunctions)]
                if not fitting:
                    self._impossible("no value in enum or const fits the other keywords")
                for value in fitting:
                    if isinstance(value, list | dict):
                        others.append(self._constant(value))
                    else:
                        scalars[_literal(value)] = None
                continue
            types = self._types(facts)
            if not types:
                self._impossible("no type is left")
            for expression in self._scalars(facts, types):
                if isinstance(expression, str):
                    scalars[expression] = None
                else:
                    others.append([expression])
            if types & {"object", "array"}:
                open_ways.append(facts)
        if scalars:
            text = self._rules.terminal(" | ".join(scalars))
            if not others and not open_ways:
                return text
            others.insert(0, [text])
        if not others and not open_ways:
            return IMPOSSIBLE
        rule = self._rules.add(self._rules.new(), *others)
        if open_ways:
            self._left.append((rule, open_ways))
        return rule

    def _types(self, facts: Facts) -> frozenset[str]:
        return types_of(facts, self._conjunctions, by_keywords=self._options.closes)

    def _any(self) -> Rule:
        if self._anything is None:
            self._anything = anything = self._rules.new()
            member = (self._rules.terminal(_STRING), '":"', anything)
            self._rules.add(anything, [self._rules.terminal(_SCALARS)])
            self._rules.add(anything, ['"["', _list((anything,), 0, None), '"]"'])
            self._rules.add(anything, ['"{"', _list(member, 0, None), '"}"'])
        return self._anything

    def _constant(self, value: Any) -> list[Element]:
        """Return elements for exactly this value."""
        if isinstance(value, list):
            inside = [self._constant(item) for item in value]
            return ['"["', *_separated(inside), '"]"']
        if isinstance(value, dict):
            inside = [[self._name(name), '":"', *self._constant(item)] for name, item in value.items()]
            return ['"{"', *_separated(inside), '"}"']
        return [self._rules.terminal(_literal(value))]

    def _name(self, name: str) -> str:
        return self._rules.terminal(_literal(name))

    def _scalars(self, facts: Facts, types: frozenset[str]) -> list[str | Element]:
        """Return expressions of terminals, or other elements, for null, booleans, numbers and texts."""
        excluded = [value for schema in facts for value in schema.get(EXCLUDED, ())]
        found: list[str | Element] = []
        if "null" in types and None not in excluded:
            found.append('"null"')
        if "boolean" in types:
            found += [f'"{word}"' for word, value in (("true", True), ("false", False)) if not _has(excluded, value)]
        if types & {"number", "integer"}:
            numbers = [fraction(each) for each in excluded if _is_number(each)]
            found += self._numbers(facts, numbers, is_integer="number" not in types)
        if "string" in types:
            found += self._strings(facts, [value for value in excluded if isinstance(value, str)])
        return found

    def _miss(self, facts: Facts, keyword: str, name: str = "") -> None:
        for schema in facts:
            if keyword in schema:
                self._conjunctions.miss(schema, name or keyword)

    # ---- numbers

    def _numbers(self, facts: Facts, excluded: Sequence[Fraction], *, is_integer: bool) -> list[str | Element]:
        low, high = bounds(facts, self._conjunctions)
        step = self._step(facts)
        if step is None or (is_integer and step.numerator == 1):
            expression = number(low, high, is_integer=is_integer, excluded=excluded)
            if expression is None or (excluded and not is_possible(expression)):
                self._impossible(_interval(low, high))
                return []
            return [f"({expression})"]
        if is_integer:
            step = Fraction(step.numerator)  # of a fraction in its lowest terms, the whole multiples
        if not has_multiple(low, high, step):
            self._impossible("no multiple is within its bounds")
            return []
        schema: dict[str, Any] = {"type": "integer" if is_integer else "number", "multipleOf": _plain(step)}
        for bound, closed, opened in ((low, "minimum", "exclusiveMinimum"), (high, "maximum", "exclusiveMaximum")):
            value, is_outside = bound or ((-_BOUND if closed == "minimum" else _BOUND), False)
            schema[opened if is_outside else closed] = _plain(value)
        if excluded:
            self._miss(facts, EXCLUDED, "not")
        return [self._rules.add(self._rules.new(), [f"%json {json.dumps(schema)}"])]

    def _step(self, facts: Facts) -> Fraction | None:
        """Return the number of which a number must be a multiple; None if there is none."""
        step: Fraction | None = None
        for schema, own in steps(facts, self._conjunctions):
            both = own if step is None else _common_multiple(step, own)
            if _coefficient(both) > MAX_MULTIPLE:
                reason = (
                    f"multipleOf {schema['multipleOf']} takes too long to enforce; it can be at most {MAX_MULTIPLE}"
                )
                self._conjunctions.refuse(schema, "multipleOf", reason)
            else:
                step = both
        return step

    # ---- texts

    def _strings(self, facts: Facts, excluded: Sequence[str]) -> list[str | Element]:
        low, high = least_and_most(facts, "Length", self._conjunctions)
        if high is not None and low > high:
            self._impossible(f"minLength ({low}) is greater than maxLength ({high})")
            return []
        patterns = patterns_of(facts, self._conjunctions)
        plain = string_of(low, high)
        terminals = [*patterns, *([(_spellings(excluded), False)] if excluded else [])]
        if not terminals:
            return [plain]
        needs_plain = plain != _STRING or not any(is_wanted for _, is_wanted in patterns)
        expression = combined(terminals, *([plain] if needs_plain else []))
        if not is_possible(expression):
            self._impossible("no text fits pattern, format and length together")
            return []
        return [f"({expression})"]

    # ---- arrays

    def _array(self, facts: Facts) -> list[list[Element]]:
        low, high = least_and_most(facts, "Items", self._conjunctions)
        if high is not None and low > high:
            self._impossible(f"minItems ({low}) is greater than maxItems ({high})")
            return []
        if any(schema.get("uniqueItems") is True for schema in facts) and (high is None or high > 1):
            self._miss(facts, "uniqueItems")
        first = prefix_length(facts)
        rest = self._value(item_schemas(facts, None))
        if contained := self._contained(facts, rest, low, high if first == 0 else 0):
            return contained
        count = first if high is None else min(first, high)
        most = None if high is None else high - count
        least = max(0, low - count)
        if count == 0:
            return [['"["', _list((rest,), least, most), '"]"']]
        tail: list[Element] = [Repeat(('","', rest), least, most)]
        for index in range(count - 1, -1, -1):
            item = self._value(item_schemas(facts, index))
            elements = [item, *tail] if index == 0 else ['","', item, *tail]
            tail = elements if index < low else [self._rules.add(self._rules.new(), elements, [])]
        return [['"["', *tail, '"]"']]

    def _contained(self, facts: Facts, rest: Element, low: int, high: int | None) -> list[list[Element]]:
        """Return alternatives for an array some of whose items fit a schema; none if that is not asked for."""
        given = [schema for schema in facts if "contains" in schema and schema.get("minContains") != 0]
        for schema in facts:
            if "maxContains" in schema or ("contains" in schema and schema not in given[:1] and schema in given):
                self._conjunctions.miss(schema, "contains")
        if not given:
            return []
        count = given[0].get("minContains", 1)
        if high is not None or not isinstance(count, int) or not 0 < count <= _MAX_COUNT or low > count:
            self._conjunctions.miss(given[0], "contains")
            return []
        found = self._value([*item_schemas(facts, None), given[0]["contains"]])
        others = Repeat((rest, '","'), 0, None)
        again = Repeat(('","', others, found), count - 1, count - 1)
        return [['"["', others, found, again, Repeat(('","', rest), 0, None), '"]"']]

    # ---- objects

    def _object(self, facts: Facts) -> list[list[Element]]:
        members = Members(facts, self._conjunctions, closes=self._options.closes)
        low, high = least_and_most(facts, "Properties", self._conjunctions)
        if high is not None and low > high:
            self._impossible(f"minProperties ({low}) is greater than maxProperties ({high})")
            return []
        listed = self._listed_names(facts)
        names_fit = [schema["propertyNames"] for schema in facts if "propertyNames" in schema]
        names = members.names if listed is None else list(dict.fromkeys([*members.names, *listed]))
        required = frozenset(members.required)
        wanted: list[tuple[Sequence[Element], bool]] = []
        for name in names:
            value: Element = IMPOSSIBLE
            if all(fits(name, [each], self._conjunctions) for each in names_fit):
                value = self._value(members.schemas(name, members.fitting(name) if members.patterns else frozenset()))
            is_required = name in required
            if is_required and isinstance(value, Impossible):
                self._impossible(f"the required property {name!r} is impossible")
            wanted.append(((self._name(name), '":"', value), is_required))
        other = None if listed is not None else self._other_members(facts, members)
        needed = sum(is_required for _, is_required in wanted)
        if (low <= needed and high is None) or needed == len(wanted):
            tail = (
                () if other is None else (_Tail(other, max(0, low - needed), None if high is None else high - needed),)
            )
            if (tail and tail[0].high is not None and tail[0].high < 0) or (not tail and low > needed):
                self._impossible("no number of properties is possible")
                return []
            return [['"{"', *self._some([*wanted, *tail]), '"}"']]
        if len(wanted) > _MAX_COUNTED or max(low, high or 0) > _MAX_COUNT:
            self._miss(facts, "minProperties")
            self._miss(facts, "maxProperties")
            return [['"{"', *self._some([*wanted, *(() if other is None else (_Tail(other, 0, None),))]), '"}"']]
        return [['"{"', self._counted(wanted, other, low, high), '"}"']]

    def _some(self, members: Sequence[Any]) -> Sequence[Element]:
        """Return elements for members in their order, of which those that are not required may be left out."""
        if not members:
            return ()
        _, first, may_be_empty = self._range(members, 0, len(members))
        return (Repeat((first,), 0 if may_be_empty else 1, 1),)

    def _range(self, members: Sequence[Any], begin: int, end: int) -> tuple[Element, Element, bool]:
        """Return elements for a part of the members: with a comma before each; without a comma before the first, and at
        least one; and whether all may be left out.

        Halves of halves keep the number of rules small, and their depth, too.
        """
        if end - begin == 1:
            return _one(members[begin])
        middle = (begin + end) // 2
        later_left, first_left, left_may_be_empty = self._range(members, begin, middle)
        later_right, first_right, right_may_be_empty = self._range(members, middle, end)
        later = self._rules.add(self._rules.new(), [later_left, later_right])
        first = self._rules.add(self._rules.new(), [first_left, later_right])
        if left_may_be_empty:
            self._rules.add(first, [first_right])
        return later, first, left_may_be_empty and right_may_be_empty

    def _counted(
        self, wanted: Sequence[tuple[Sequence[Element], bool]], other: Element | None, low: int, high: int | None
    ) -> Rule:
        """Return a rule for members whose number has limits."""
        cap = max(low, 1) if high is None else high
        rules: dict[tuple[int, int], Rule] = {}
        for count in range(cap + 1):
            least, most = max(0, low - count), None if high is None else high - count
            ways: list[Sequence[Element]] = []
            if other is not None and most != 0:
                members = (Repeat(('","', other), least, most),) if count else (_list((other,), least, most),)
                ways = [members]
            elif least == 0:
                ways = [[]]
            rules[len(wanted), count] = self._rules.add(self._rules.new(), *ways)
        for index in range(len(wanted) - 1, -1, -1):
            member, is_required = wanted[index]
            for count in range(min(index, cap) + 1):
                rule = rules[index, count] = self._rules.new()
                if high is None or count < high:
                    after = rules[index + 1, min(count + 1, cap)]
                    self._rules.add(rule, [*(['","'] if count else []), *member, after])
                if not is_required:
                    self._rules.add(rule, [rules[index + 1, count]])
        self._conjunctions.spend(len(rules))
        return rules[0, 0]

    def _listed_names(self, facts: Facts) -> list[str] | None:
        """Return the only names that members may have by `propertyNames`; None if they are not listed."""
        found: list[str] | None = None
        for schema in facts:
            if "propertyNames" not in schema:
                continue
            ways = self._conjunctions.alternatives([schema["propertyNames"]])
            values = [_values(way) for way in ways]
            if any(each is None for each in values):
                continue
            own = [
                value
                for way, each in zip(ways, values)
                for value in each or ()
                if isinstance(value, str) and fits_facts(value, way, self._conjunctions)
            ]
            found = own if found is None else [name for name in found if name in own]
        return found

    def _other_members(self, facts: Facts, members: Members) -> Element | None:
        """Return an element for a member that is not listed; None if there can be none."""
        restricted: list[tuple[str, bool]] = []
        for schema in facts:
            if "propertyNames" in schema:
                expressions = []
                for way in self._conjunctions.alternatives([schema["propertyNames"]]):
                    values = _values(way)
                    expressions += (
                        [text for text in self._scalars(way, frozenset({"string"})) if isinstance(text, str)]
                        if values is None
                        else [_literal(value) for value in values if isinstance(value, str)]
                    )
                if not expressions:
                    return None
                restricted.append((f"({' | '.join(expressions)})", True))
        if members.names:
            restricted.append((_spellings(members.names), False))
        patterns = [pattern for pattern, terminals in members.patterns.items() if terminals]
        sizes = range(len(patterns) + 1) if len(patterns) <= _OVERLAPPING else (0, 1)
        ways: list[Sequence[Element]] = []
        for fitting in (frozenset(each) for size in sizes for each in combinations(patterns, size)):
            schemas = members.schemas(None, fitting)
            if any(schema is False for schema in schemas):
                continue
            name = self._other_name(facts, restricted, patterns, fitting)
            if name is not None:
                ways.append((name, '":"', self._value(schemas)))
        return self._rules.add(self._rules.new(), *ways) if ways else None

    def _other_name(
        self, facts: Facts, restricted: list[tuple[str, bool]], patterns: list[str], fitting: frozenset[str]
    ) -> str | None:
        """Return a terminal for a name that fits these patterns and no others; None if there is no such name."""
        terminals = list(restricted)
        self._conjunctions.spend(5 * len(patterns) ** 2)  # the library compares each with all others
        for pattern in patterns:
            own = pattern_terminals(facts[0], "patternProperties", pattern, self._conjunctions)
            if pattern in fitting:
                terminals += own
            else:
                every_way = pattern_terminals(
                    facts[0], "patternProperties", pattern, self._conjunctions, every_way=True
                )
                terminals.append((f"({combined(every_way, _STRING)})", False))
        if not terminals:
            return self._rules.terminal(_STRING)
        expression = combined(terminals, _STRING)
        return self._rules.terminal(expression) if is_possible(expression) else None


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


@dataclass(frozen=True, slots=True)
class _Tail:
    """Members that are not listed, and how many there may be."""

    member: Element
    low: int
    high: int | None


def _one(member: Any) -> tuple[Element, Element, bool]:
    """Return the elements of `_range` for one member."""
    if isinstance(member, _Tail):
        most = None if member.high is None else max(0, member.high - 1)
        if member.high == 0:
            return Repeat(('","', member.member), 0, 0), IMPOSSIBLE, True
        return (
            Repeat(('","', member.member), member.low, member.high),
            Repeat((member.member, Repeat(('","', member.member), max(0, member.low - 1), most)), 1, 1),
            member.low == 0,
        )
    elements, is_required = member
    return Repeat(('","', *elements), int(is_required), 1), Repeat(tuple(elements), 1, 1), not is_required


def _list(elements: tuple[Element, ...], low: int, high: int | None) -> Repeat:
    """Return elements several times, with commas between them."""
    most = None if high is None else max(0, high - 1)
    several = (*elements, Repeat(('","', *elements), max(0, low - 1), most))
    return Repeat(several, int(low > 0), 1 if high != 0 else 0)


def _separated(parts: Sequence[Sequence[Element]]) -> list[Element]:
    return [element for index, part in enumerate(parts) for element in (*(['","'] if index else []), *part)]


def _values(facts: Facts) -> list[Any] | None:
    """Return the values that `enum` or `const` lists; None if there is neither."""
    for schema in facts:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return schema["enum"]  # type: ignore[no-any-return]
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _has(values: Sequence[Any], value: bool) -> bool:
    return any(each is value for each in values)


@functools.lru_cache(maxsize=4096)
def _text_literal(text: str) -> str:
    plain, pattern = json.dumps(text, ensure_ascii=False), f'"{spelled(text)}"'
    if plain.isascii() and plain[1:-1] == text and not set("/<>&'\x7f") & set(text):
        return json.dumps(plain)
    return f"/{pattern}/"


def _literal(value: Any) -> str:
    """Return an expression for exactly this text, number, boolean or null."""
    return _text_literal(value) if isinstance(value, str) else json.dumps(json.dumps(value))


def _spellings(texts: Sequence[str]) -> str:
    """Return an expression for all spellings of texts."""
    return f'/"({"|".join(spelled(text, every_way=True) for text in texts)})"/'


def _interval(low: Bound | None, high: Bound | None) -> str:
    return (
        f"the minimum ({_plain(low[0]) if low else ''}) is greater than the maximum ({_plain(high[0]) if high else ''})"
    )


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    denominator = lcm(one.denominator, other.denominator)
    return Fraction(lcm(int(one * denominator), int(other * denominator)), denominator)


def _coefficient(value: Fraction) -> int:
    """Return a decimal fraction without its point: 25 for 0.25, but 1000 for 1000."""
    while value.denominator > 1 and value.numerator < MAX_MULTIPLE**2:
        value *= 10
    return value.numerator
