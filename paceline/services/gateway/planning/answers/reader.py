"""Text that comes piece by piece, for parsers that are written as if the whole text were there.

A parser is a generator. It reads with `yield from`, and is suspended while it needs more text:

    marker = yield from reader.pass_until(("<tool_call>",), content)

All methods that may wait return such generators. How the text is cut into pieces never changes what they return.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A generator that yields whenever it needs more text, and returns a value of type T."""

Sink: TypeAlias = Callable[[str], None]
"""A function that takes text which has been read."""

_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_STOP_IN_STRING = re.compile(r'["\\]')
_STOP_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_STOP_OF_SCALAR = re.compile(r"[\s,\]}]")


class EndOfAnswerError(Exception):
    """The answer ended although its parser needs more text."""


class FormError(Exception):
    """The text does not have the form that its parser expects."""


class Reader:
    """The text of one answer.

    `AnswerParser` calls `feed` and `end`. All other methods are for the forms, which read the text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Index in `_text` of the first character that has not been read."""
        self._dropped = 0
        """Number of characters of the answer in front of `_text`."""
        self._kept: list[str] | None = None
        """Pieces of the text in front of `_text`, from the place of `keep` on; None if no place is kept."""
        self.has_ended = False
        self.is_cut_off = False
        """Whether the answer was ended by anything but the model."""
        self._follows = ""
        """Text of the model after the end of the answer, if it is known; else ""."""
        self.resting: tuple[re.Pattern[str], Sink] | None = None
        """Set while a parser passes text and has read all of it: new text without a match may go to the sink."""

    def feed(self, text: str) -> None:
        """Add the next piece of the answer."""
        self._drop_read()
        self._text += text

    def end(self, is_cut_off: bool = False, follows: str = "") -> None:
        """Say that no more text comes.

        Args:
            is_cut_off: whether the model did not end the answer itself. Then half a marker at its end is dropped.
            follows: known text after the cut, which may show that the answer's end is no half marker; "" if unknown.
        """
        self.has_ended = True
        self.is_cut_off = is_cut_off
        self._follows = follows

    @property
    def is_empty(self) -> bool:
        """Whether the parser has read all text that was fed."""
        return self._at == len(self._text)

    @property
    def unread(self) -> int:
        """Number of characters that were fed and are not read."""
        return len(self._text) - self._at

    @property
    def place(self) -> int:
        """Number of characters of the answer that have been read."""
        return self._dropped + self._at

    @property
    def held(self) -> str:
        """Text that was fed and not passed to a sink yet."""
        return self._text[self._at :] if self._kept is None else "".join([*self._kept, self._text])

    def keep(self) -> None:
        """Remember this place, so that `restore` can return to it. Text after it stays in memory."""
        self._kept = None
        self._drop_read()
        self._kept = []

    def restore(self) -> None:
        """Return to the place that `keep` has remembered, so that its text is read again."""
        assert self._kept is not None
        self._dropped -= sum(map(len, self._kept))
        self._text, self._at, self._kept = "".join([*self._kept, self._text]), 0, None

    def forget(self) -> None:
        """Forget the place that `keep` has remembered, so that its text leaves memory."""
        self._kept = None

    def _drop_read(self) -> None:
        """Remove the text that has been read from `_text`."""
        if self._kept is not None and self._at:
            self._kept.append(self._text[: self._at])
        self._dropped += self._at
        self._text, self._at = self._text[self._at :], 0

    def pass_until(self, markers: Sequence[str], sink: Sink, half: Sink | None = None) -> Steps[str | None]:
        """Pass text to a sink up to the first marker, and read the marker. Return it; None if the answer ends first.

        If several markers begin at the same place, the longest one counts.

        Args:
            half: takes half a marker at the end of an answer. It is dropped if this is None, or the answer was cut off.
        """
        firsts = re.compile("|".join(re.escape(first) for first in sorted({marker[0] for marker in markers})) or "(?!)")
        while True:
            if (found := self._find(markers)) is not None:
                start, marker = found
                if start > self._at:
                    sink(self._text[self._at : start])
                self._at = start + len(marker)
                return marker
            certain = len(self._text) - self._possible_start(markers)
            if certain > self._at:
                sink(self._text[self._at : certain])
                self._at = certain
            if self.has_ended:
                if half is not None and not self.is_cut_off and not self.is_empty:
                    half(self._text[self._at :])
                    self._at = len(self._text)
                return None
            if self.is_empty:
                self._rest(firsts, sink)
            yield
            self.resting = None

    def pass_to_end(self, ends: Sequence[str], sink: Sink) -> Steps[str]:
        """Pass text to a sink up to the first of the `ends`, and read this end. Return the end.

        Raises EndOfAnswerError if the answer ends first. Half an end is not passed then.
        """
        end = yield from self.pass_until(ends, sink)
        if end is None:
            raise EndOfAnswerError
        return end

    def choose(self, options: Sequence[str]) -> Steps[str | None]:
        """Read the longest option with which the unread text begins. Return this option; None if no option fits.

        Raises EndOfAnswerError if the answer is cut off within an option.
        """
        longest = max(map(len, options), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            possible = [option for option in options if len(option) > len(rest) and self._may_be(option, rest)]
            if self.has_ended or not possible:
                fitting = [option for option in options if rest.startswith(option)]
                if self.is_cut_off and rest and possible:
                    raise EndOfAnswerError
                chosen = max(fitting, key=len, default=None)
                self._at += len(chosen or "")
                return chosen
            yield

    def expect(self, *options: str) -> Steps[str]:
        """Read one of the options. Raises FormError if no option fits, EndOfAnswerError if the answer ends first."""
        chosen = yield from self.choose(options)
        if chosen is None:
            if self.has_ended and any(option.startswith(self._text[self._at :]) for option in options):
                raise EndOfAnswerError
            raise FormError(f"{options[0]!r} is missing")
        return chosen

    def skip_space(self) -> Steps[None]:
        """Read white space up to other text or the end of the answer."""
        yield from self._skip(_SPACE)

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest text that matches a pattern and return it.

        If the pattern matches a text, it must also match each beginning of the text, the empty one included.
        """
        while True:
            found = pattern.match(self._text, self._at)
            if found is None:
                return ""
            if found.end() < len(self._text) or self.has_ended:
                self._at = found.end()
                return found[0]
            yield

    def _skip(self, space: re.Pattern[str]) -> Steps[None]:
        """Read text up to the first character that is not `space`, while the text comes."""
        while True:
            found = space.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if not self.is_empty or self.has_ended:
                return
            yield

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. Raises EndOfAnswerError at the end of the answer."""
        while self.is_empty:
            if self.has_ended:
                raise EndOfAnswerError
            yield
        return self._text[self._at]

    def take(self, sink: Sink | None = None) -> Steps[str]:
        """Read one character, pass it to a sink and return it. Raises EndOfAnswerError at the end of the answer."""
        character = yield from self.peek()
        self._at += 1
        if sink is not None:
            sink(character)
        return character

    def pass_json(self, sink: Sink) -> Steps[None]:
        """Pass one JSON value to a sink while it comes, with its white space.

        Only strings and brackets are checked, so other text that is no valid JSON passes, too.

        Raises:
            EndOfAnswerError: the answer ends within the value. Its beginning has been passed.
        """
        first = yield from self.peek()
        if first not in '{["':
            yield from self._pass(_STOP_OF_SCALAR, sink)
            return
        depth = 0
        while True:
            character = yield from self.take(sink)
            if character == '"':
                yield from self._pass_string(sink)
            depth += (character in "{[") - (character in "}]")
            if depth <= 0:
                return
            yield from self._pass(_STOP_OUTSIDE_STRINGS, sink)

    def json_string(self) -> Steps[str]:
        """Read a JSON string and return its value. Raises FormError, or EndOfAnswerError if the string is cut off."""
        pieces: list[str] = []
        yield from self.expect('"')
        yield from self._pass_string(pieces.append)
        try:
            return str(json.loads('"' + "".join(pieces), strict=False))
        except ValueError as error:
            raise FormError(f"a JSON string is not valid: {error}") from error

    def json_members(self) -> Steps[str | None]:
        """Read a JSON object up to the value of its next member. Return the member's name; None after the last member.

        Call this at the beginning of the object, and again after each value.
        """
        yield from self._skip(_JSON_SPACE)
        if (yield from self.expect("{", ",", "}")) == "}":
            return None
        yield from self._skip(_JSON_SPACE)
        if (yield from self.peek()) == "}":
            yield from self.take()
            return None
        name = yield from self.json_string()
        yield from self._skip(_JSON_SPACE)
        yield from self.expect(":")
        yield from self._skip(_JSON_SPACE)
        return name

    def _pass_string(self, sink: Sink) -> Steps[None]:
        """Pass the rest of a JSON string after its first quote."""
        while True:
            yield from self._pass(_STOP_IN_STRING, sink)
            if (yield from self.take(sink)) == '"':
                return
            yield from self.take(sink)  # the character after a backslash; of \\uXXXX the rest is as good as text

    def _pass(self, stop: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Pass text while it comes, up to a character that matches `stop`."""
        while True:
            found = stop.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            if end > self._at:
                sink(self._text[self._at : end])
                self._at = end
            if found is not None:
                return
            if self.has_ended:
                raise EndOfAnswerError
            self._rest(stop, sink)
            yield
            self.resting = None

    def _rest(self, stop: re.Pattern[str], sink: Sink) -> None:
        # Text that `restore` may return to has to come by `feed`.
        if self._kept is None:
            self.resting = stop, sink

    def _find(self, markers: Sequence[str]) -> tuple[int, str] | None:
        """Return the place of the first marker and the marker; None while a longer marker may begin at this place."""
        # The longest one comes first. One search for all takes time in proportion to the text, however many there are.
        found = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)").search(
            self._text, self._at
        )
        if found is None:
            return None
        start = found.start()
        rest = self._text[start : start + max(map(len, markers))]
        if not self.has_ended and any(len(m) > len(rest) and m.startswith(rest) for m in markers):
            return None
        return start, found[0]

    def _possible_start(self, markers: Sequence[str]) -> int:
        """Return the number of characters at the end of the unread text that may be a marker or half a marker."""
        rest = self._text[self._at :]
        longest = min(len(rest), max(map(len, markers), default=0))
        return next((n for n in range(longest, 0, -1) if any(self._may_be(m, rest[-n:]) for m in markers)), 0)

    def _may_be(self, marker: str, begun: str) -> bool:
        """Return whether the last text of the answer may be a marker or half a marker."""
        text = begun + self._follows
        return marker.startswith(text) or (len(begun) <= len(marker) and text.startswith(marker))
