"""Streams that a client continues at another gateway, and the ids of events that make it possible.

If a client chose its request's id, each event of its stream has an SSE id, which says how much of each choice the
client has then. After the stream broke, the client sends the same request with the header Last-Event-ID. The gateway
generates the answer again, gives to the client what comes after that event, and keeps back what the client has.

An id has an entry for each choice, separated by commas: the number of tokens, then "f" if the choice has finished. One
message of a worker may become several events. All but the last of them have "-N": N events of the same message follow.
The split into messages differs from run to run. So the gateway gathers all tokens that the client has into one message.
Its last N events are those of the message that the first gateway got, because a new event begins where the kind of text
changes, and nowhere else within a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.core.types import Token
from paceline.services.gateway.attempt import Ended, Event, Generated
from paceline.services.gateway.choice import Delta
from paceline.services.gateway.errors import ApiError

HEADER = "Last-Event-ID"

_ENTRY = re.compile(r"([0-9]{1,9})(f?)(?:-([0-9]{1,4}))?")
_END = b"\n\n"


class Position(NamedTuple):
    """How much of one choice a client has."""

    tokens: int = 0
    has_finished: bool = False
    missing: int = 0
    """Last events of the delta that ends here that the client does not have."""

    def __str__(self) -> str:
        return f"{self.tokens}{'f' * self.has_finished}{f'-{self.missing}' if self.missing else ''}"


_NOTHING = Position(-1)
"""The position of a client that does not have the stream's beginning either."""


def read_positions(text: str, choices: int) -> list[Position]:
    """Return the position in each choice that an event's id names. Raises ApiError."""
    found = [_ENTRY.fullmatch(entry) for entry in text.split(",")]
    positions = [Position(int(each[1]), bool(each[2]), int(each[3] or 0)) for each in found if each is not None]
    if len(positions) != len(found) or len(found) != choices:
        numbers = "a number" if choices == 1 else f"{choices} numbers"
        raise ApiError(400, f"{HEADER} must be the id of the stream's last event: {numbers} of tokens", param=HEADER)
    return positions


class Gathering:
    """A function that passes events on. Of the tokens, it keeps back the first ones until it has `count` of them."""

    def __init__(self, count: int, take: Callable[[Event], object]) -> None:
        self._count = count
        self._take = take
        self._tokens: list[Token] = []

    def __call__(self, event: Event) -> None:
        if not self._count or not isinstance(event, Generated | Ended):
            self._take(event)
            return
        if isinstance(event, Generated):
            self._tokens += event.tokens
            if len(self._tokens) < self._count:
                return
        tokens, count, self._count = self._tokens, self._count, 0
        self._take(Generated(tokens[:count]))
        if isinstance(event, Ended):
            self._take(event)
        elif tokens[count:]:
            self._take(Generated(tokens[count:]))


class StreamIds:
    """The ids of one stream's events.

    Args:
        received: the client's position in each choice; None if the stream begins.
        choices: number of choices.
    """

    def __init__(self, received: Sequence[Position] | None, choices: int) -> None:
        self.resumes = received is not None
        self._received = list(received or [_NOTHING] * choices)
        self._sent = [Position()] * choices

    def gathering(self, index: int, take: Callable[[Event], object]) -> Callable[[Event], object]:
        """Return a function that gives a choice's events to `take`, all tokens that the client has in one of them."""
        received = self._received[index].tokens
        return Gathering(received, take) if received > 0 else take

    def begin(self, events: bytes) -> bytes:
        """Return the events before the first delta, with an id."""
        return self._with_id(events, 0, Position()) if events else events

    def mark(self, delta: Delta, written: bytes) -> bytes:
        """Return the events of a delta with their ids, without those that the client has already."""
        index, received = delta.index, self._received[delta.index]
        has_finished = delta.finish_reason is not None
        now = self._sent[index] = Position(self._sent[index].tokens + len(delta.tokens), has_finished)
        if now[:2] < received[:2]:
            if has_finished:
                raise ApiError(400, f"{HEADER} names more tokens than the answer has: send the same body", param=HEADER)
            return b""
        events = written.split(_END)[:-1]
        if now[:2] == received[:2]:
            events = events[max(0, len(events) - received.missing) :]
        left = len(events)
        return b"".join(
            self._with_id(event + _END, index, now._replace(missing=left - number))
            for number, event in enumerate(events, 1)
        )

    def _with_id(self, event: bytes, index: int, position: Position) -> bytes:
        # Until the gathered tokens of another choice have come, the client's position there is the one that it named.
        both = zip(self._sent, self._received, strict=True)
        entries = [str(sent if sent[:2] >= received[:2] else received) for sent, received in both]
        entries[index] = str(position)
        return f"id: {','.join(entries)}\n".encode() + event
