"""Grammars of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from paceline.core.errors import ConstraintError
from paceline.core.json_grammar.builder import Builder, Scalars
from paceline.core.json_grammar.conjunctions import Facts
from paceline.core.json_grammar.facts import least_and_most, pattern_terminals, values_of
from paceline.core.json_grammar.fitting import fits, fits_facts
from paceline.core.json_grammar.members import ObjectMembers
from paceline.core.json_grammar.rules import IMPOSSIBLE, Element, Impossible, Repeat, Rule
from paceline.core.json_grammar.scalars import add_texts
from paceline.core.json_grammar.strings import Quoting

_MAX_COUNTED = 200
"""Largest number of properties of an object whose members are counted, for `minProperties` and `maxProperties`."""
_MAX_COUNT = 50
"""Largest limit on the number of properties that is enforced by counting."""
_MAX_OPTIONAL, _NESTED_SIZE = 2_000, 3
"""Largest number of optional properties between two required ones, and as how many one with a nested value counts.
Masks for more exceed the limits of the library, which would be noticed in the middle of an answer."""
_OVERLAPPING = 3
"""Largest number of name patterns that may overlap, because each subset of them is a case of its own."""


@dataclass(frozen=True, slots=True)
class _Tail:
    """Members that are not listed, with limits on their number."""

    member: Element
    low: int
    high: int | None


def object_ways(builder: Builder, facts: Facts) -> list[list[Element]]:
    """Return the alternatives of a rule for the objects that fit the schemas in `facts`."""
    members = ObjectMembers(facts, builder.conjunctions, closes=builder.closes)
    low, high = least_and_most(facts, "Properties", builder.conjunctions)
    if high is not None and low > high:
        builder.impossible(f"minProperties ({low}) is greater than maxProperties ({high})")
        return []
    listed = _listed_names(builder, facts)
    names_fit = [schema["propertyNames"] for schema in facts if "propertyNames" in schema]
    names = members.names if listed is None else list(dict.fromkeys([*members.names, *listed]))
    required = frozenset(members.required)
    wanted: list[tuple[Sequence[Element], bool]] = []
    for name in names:
        value: Element = IMPOSSIBLE
        written = builder.name(name)
        if not isinstance(written, Impossible) and all(fits(name, [e], builder.conjunctions) for e in names_fit):
            fitting = members.fitting(name) if members.patterns else frozenset()
            value = builder.of_member(name).value(members.schemas(name, fitting))
        is_required = name in required
        if is_required and isinstance(value, Impossible):
            builder.impossible(f"the required property {name!r} is impossible")
        wanted.append(((written, builder.notation.colon, value), is_required))
    other = None if listed is not None else _other_members(builder, facts, members)
    needed = sum(is_required for _, is_required in wanted)
    if other is not None and low > needed + 1:
        builder.miss(facts, "minProperties")  # no grammar can tell that two free names differ
    if (low <= needed and high is None) or needed == len(wanted):
        tail = () if other is None else (_Tail(other, max(0, low - needed), None if high is None else high - needed),)
        if (high is not None and needed > high) or (not tail and low > needed):
            builder.impossible("no number of properties is possible")
            return []
        return [_object(builder, _some(builder, [*wanted, *tail]))]
    if len(wanted) > _MAX_COUNTED or max(low, high or 0) > _MAX_COUNT:
        builder.miss(facts, "minProperties")
        builder.miss(facts, "maxProperties")
        return [_object(builder, _some(builder, [*wanted, *(() if other is None else (_Tail(other, 0, None),))]))]
    return [_object(builder, [_counted(builder, wanted, other, low, high)])]


def _object(builder: Builder, members: Sequence[Element]) -> list[Element]:
    return [builder.notation.opening, *members, builder.notation.closing]


def _some(builder: Builder, members: Sequence[Any]) -> Sequence[Element]:
    """Return elements for members in their order. Members that are not required may be left out."""
    if not members:
        return ()
    _check_optional(members)
    _, first, may_be_empty = _range(builder, members, 0, len(members))
    return (Repeat((first,), 0 if may_be_empty else 1, 1),)


def _check_optional(members: Sequence[Any]) -> None:
    """Raise ConstraintError if too many properties may come next at some place."""
    size = 0
    for member in members:
        is_required = not isinstance(member, _Tail) and member[1]
        is_nested = not isinstance(member, _Tail) and isinstance(member[0][-1], Rule)
        size = 0 if is_required else size + (_NESTED_SIZE if is_nested else 1)
        if size > _MAX_OPTIONAL:
            raise ConstraintError(
                f"an object has more than {_MAX_OPTIONAL} optional properties one after the other, or more than "
                f"{_MAX_OPTIONAL // _NESTED_SIZE} with nested values or values of any kind; make some of them "
                "required, or put them into objects"
            )


def _range(builder: Builder, members: Sequence[Any], begin: int, end: int) -> tuple[Element, Element, bool]:
    """Return elements for a part of the members: with a comma before each; without a comma before the first, and at
    least one; and whether all may be left out.

    Halves of halves keep the number of rules small, and their depth, too.
    """
    if end - begin == 1:
        return _one(builder, members[begin])
    middle = (begin + end) // 2
    later_left, first_left, left_may_be_empty = _range(builder, members, begin, middle)
    later_right, first_right, right_may_be_empty = _range(builder, members, middle, end)
    later = builder.rules.add(builder.rules.new(), [later_left, later_right])
    first = builder.rules.add(builder.rules.new(), [first_left, later_right])
    if left_may_be_empty:
        builder.rules.add(first, [first_right])
    return later, first, left_may_be_empty and right_may_be_empty


def _one(builder: Builder, member: Any) -> tuple[Element, Element, bool]:
    """Return the elements of `_range` for one member."""
    comma = builder.notation.comma
    if isinstance(member, _Tail):
        most = None if member.high is None else max(0, member.high - 1)
        if member.high == 0:
            return Repeat((comma, member.member), 0, 0), IMPOSSIBLE, True
        return (
            Repeat((comma, member.member), member.low, member.high),
            Repeat((member.member, Repeat((comma, member.member), max(0, member.low - 1), most)), 1, 1),
            member.low == 0,
        )
    elements, is_required = member
    return Repeat((comma, *elements), int(is_required), 1), Repeat(tuple(elements), 1, 1), not is_required


def _counted(
    builder: Builder,
    wanted: Sequence[tuple[Sequence[Element], bool]],
    other: Element | None,
    low: int,
    high: int | None,
) -> Rule:
    """Return a rule for members whose number has limits."""
    comma = builder.notation.comma
    cap = max(low, 1) if high is None else high
    rules: dict[tuple[int, int], Rule] = {}
    for count in range(cap + 1):
        least, most = max(0, low - count), None if high is None else high - count
        ways: list[Sequence[Element]] = []
        if other is not None and most != 0:
            more = Repeat((comma, other), least, most)
            ways = [(more if count else builder.several((other,), least, most),)]
        elif least == 0:
            ways = [[]]
        rules[len(wanted), count] = builder.rules.add(builder.rules.new(), *ways)
    for index in range(len(wanted) - 1, -1, -1):
        member, is_required = wanted[index]
        for count in range(min(index, cap) + 1):
            rule = rules[index, count] = builder.rules.new()
            if high is None or count < high:
                after = rules[index + 1, min(count + 1, cap)]
                builder.rules.add(rule, [*([comma] if count else []), *member, after])
            if not is_required:
                builder.rules.add(rule, [rules[index + 1, count]])
    builder.conjunctions.spend(len(rules))
    return rules[0, 0]


def _listed_names(builder: Builder, facts: Facts) -> list[str] | None:
    """Return the only names that members may have by `propertyNames`; None if they are not listed."""
    found: list[str] | None = None
    for schema in facts:
        if "propertyNames" not in schema:
            continue
        ways = builder.conjunctions.alternatives([schema["propertyNames"]])
        values = [values_of(way) for way in ways]
        if any(each is None for each in values):
            continue
        names = [
            value
            for way, each in zip(ways, values)
            for value in each or ()
            if isinstance(value, str) and fits_facts(value, way, builder.conjunctions)
        ]
        found = names if found is None else [name for name in found if name in names]
    return found


def _other_members(builder: Builder, facts: Facts, members: ObjectMembers) -> Element | None:
    """Return an element for a member that is not listed; None if there can be none."""
    patterns = [pattern for pattern, terminals in members.patterns.items() if terminals]
    sizes = range(len(patterns) + 1) if len(patterns) <= _OVERLAPPING else (0, 1)
    ways: list[Sequence[Element]] = []
    for fitting in (frozenset(each) for size in sizes for each in combinations(patterns, size)):
        schemas = members.schemas(None, fitting)
        if any(schema is False for schema in schemas):
            continue
        name = _other_name(builder, facts, members.names, patterns, fitting)
        if not isinstance(name, Impossible):
            ways.append((name, builder.notation.colon, builder.of_member(None).value(schemas)))
    return builder.rules.add(builder.rules.new(), *ways) if ways else None


def _other_name(
    builder: Builder, facts: Facts, listed: list[str], patterns: list[str], fitting: frozenset[str]
) -> Element:
    """Return an element for a name that is not listed and fits these patterns and no others."""
    conjunctions = builder.conjunctions
    conjunctions.spend(5 * len(patterns) ** 2)  # the library compares each with all others

    def own(quoting: Quoting) -> list[tuple[str, bool]]:
        terminals = [quoting.excluded(listed)] if listed else []
        for pattern in patterns:
            if pattern in fitting:
                terminals += pattern_terminals(facts[0], "patternProperties", pattern, conjunctions, quoting)
            else:
                every_way = pattern_terminals(
                    facts[0], "patternProperties", pattern, conjunctions, quoting, every_way=True
                )
                terminals.append((quoting.text(every_way), False))
        return terminals

    def listed_of(texts: list[str], quoting: Quoting) -> list[tuple[str, bool]]:
        return [*own(quoting), (f"({' | '.join(map(quoting.constant, texts))})", True)]

    found = Scalars()
    for way in conjunctions.alternatives([schema["propertyNames"] for schema in facts if "propertyNames" in schema]):
        values = values_of(way)
        if values is None:
            add_texts(builder, way, builder.notation.names, found, own)
            continue
        texts = [each for each in values if isinstance(each, str) and fits_facts(each, way, conjunctions)]
        if texts:
            add_texts(builder, (), builder.notation.names, found, partial(listed_of, texts))
    return builder.one_of(found)
