"""The parts of an answer, in the order in which the model wrote them, and the answer whose text is being read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.json_grammar.parameters import ArgumentTypes
from paceline.services.gateway.planning.answers.reader import Reader, Steps


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
    """Number of the call in its answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Content | Reasoning | CallBegin | CallArguments


def join_parts(parts: list[Part]) -> list[Part]:
    """Return the parts of an answer with neighbouring pieces of one kind joined into one part."""
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
    """JSON text; only its beginning if the answer was cut off."""


def calls_of(parts: Sequence[Part]) -> list[Call]:
    """Return the tool calls of an answer."""
    pieces = defaultdict[int, list[str]](list)
    for part in parts:
        if isinstance(part, CallArguments):
            pieces[part.index].append(part.text)
    begun = (part for part in parts if isinstance(part, CallBegin))
    return [Call(call.id, call.name, "".join(pieces[call.index])) for call in begun]


def new_call_id() -> str:
    """Return a new id for a tool call, in the form of OpenAI's ids."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Answer:
    """An answer while it is parsed: the text to read, and the parts that the parser has found.

    White space before and after reasoning and calls is dropped. An answer that is nothing but content keeps the white
    space at its end.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.reader = Reader()
        self.tools: Mapping[str, ArgumentTypes] = {}
        """The tools that may be called, by name, with the types of their arguments."""
        self.parts: list[Part] = []
        """Parts that have been found and that `AnswerParser` has not taken yet."""
        self.is_thinking = False
        """Whether the text that comes next is reasoning."""
        self.reasoning_length = 0
        """Number of characters of reasoning that have been read, the white space around it included."""
        self.failed_place = -1
        """End of the text that was read as a call and is none, as a number of characters; see `Reader.place`."""
        self._new_call_id = new_call_id
        self._calls = 0
        self._arguments: list[str] = []
        """The pieces of JSON text of the last call's arguments."""
        self._space = ""
        """White space that belongs to the text only if more text follows."""
        self._drops_space = False
        """Whether white space is dropped before the next text."""

    @property
    def call_count(self) -> int:
        """Number of tool calls that have begun in this answer."""
        return self._calls

    @property
    def ends_within_arguments(self) -> bool:
        """Whether the last call's arguments are incomplete JSON text."""
        if not self._calls:
            return False
        try:
            json.loads("".join(self._arguments), strict=False)
        except ValueError:
            return True
        except RecursionError:
            return False  # it is nested too deep to be checked
        return False

    @property
    def held(self) -> str:
        """Text that the model has written and that is in no part yet."""
        return self._space + self.reader.held

    def content(self, text: str) -> None:
        """Add text to the content, without white space next to other parts."""
        if text := self._trimmed(text):
            self.parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Add text to the reasoning, without white space next to other parts."""
        self.reasoning_length += len(text)
        if text := self._trimmed(text):
            self.parts.append(Reasoning(text))

    def read_reasoning(self, ends: Sequence[str]) -> Steps[str | None]:
        """Read reasoning and the end marker after it. Return the marker; None if the answer ends first."""
        self.end_text()
        self.is_thinking = True
        end = yield from self.reader.pass_until(ends, self.reasoning, self.reasoning)
        if end is not None:
            self.is_thinking = False
            self.end_text()
        return end

    def read_content(self, ends: Sequence[str]) -> Steps[str | None]:
        """Read content and the first of the `ends` after it. Return this text; None if the answer ends first."""
        return self.reader.pass_until(ends, self.content, self._half_marker)

    def begin_call(self, name: str, call_id: str | None = None) -> Callable[[str], None]:
        """Begin a tool call. Return the function that adds pieces of its arguments, which together must be JSON text.

        Args:
            name: name of the called tool.
            call_id: the id that the model chose; None makes a new one.
        """
        self.end_text()
        self.reader.forget()  # the text of a call that has begun will not be read again
        index = self._calls
        self._calls += 1
        arguments: list[str] = []
        self._arguments = arguments
        self.parts.append(CallBegin(index, call_id or self._new_call_id(), name))

        def add(text: str) -> None:
            if text:
                arguments.append(text)
                self.parts.append(CallArguments(index, text))

        return add

    def end_text(self) -> None:
        """End the reasoning or content, because a part of another kind follows. Drop the white space between them."""
        self._space = ""
        self._drops_space = True

    def close(self) -> None:
        """End the answer. Keep the white space at its end if it ends with content."""
        if self._space and not self.is_thinking:
            self.parts.append(Content(self._space))
        self._space = ""

    def _half_marker(self, text: str) -> None:
        """Add an unfinished marker at the answer's end to the content; drop it if it follows a call."""
        if not (self._calls and self._drops_space):
            self.content(text)

    def _trimmed(self, text: str) -> str:
        if self._drops_space:
            text = text.lstrip()
            if not text:
                return ""
            self._drops_space = False
        kept = text.rstrip()
        if not kept:
            self._space += text
            return ""
        text, self._space = self._space + kept, text[len(kept) :]
        return text
