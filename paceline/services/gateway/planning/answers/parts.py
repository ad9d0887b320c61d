"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call. It comes once for each call, before the call's arguments."""

    index: int
    """Counts the calls of an answer."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegin | CallArguments


def join_parts(parts: list[Part]) -> list[Part]:
    """Return the same parts, with neighbours of one kind joined."""
    joined: list[Part] = []
    for _, group in itertools.groupby(parts, key=lambda part: (type(part), getattr(part, "index", None))):
        first, *others = group
        if others and not isinstance(first, CallBegin):
            whole = "".join([first.text, *(part.text for part in others if not isinstance(part, CallBegin))])
            joined.append(dataclasses.replace(first, text=whole))
        else:
            joined += [first, *others]
    return joined


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str
    """JSON text, unless the answer was cut off."""


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """Return the tool calls of an answer."""
    pieces = defaultdict[int, list[str]](list)
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index].append(part.text)
    begun = (part for part in parts if isinstance(part, CallBegin))
    return [Call(call.id, call.name, "".join(pieces[call.index])) for call in begun]
