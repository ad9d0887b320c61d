"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

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
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case Content(before), Content(text):
                joined[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(other, text) if index == other:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(part)
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
    begun = [part for part in parts if isinstance(part, CallBegin)]
    pieces = [part for part in parts if isinstance(part, CallArguments)]
    return [Call(b.id, b.name, "".join(p.text for p in pieces if p.index == b.index)) for b in begun]
