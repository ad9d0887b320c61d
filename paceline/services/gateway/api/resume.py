"""Streams that a client continues at another gateway, and the ids of events that make it possible.

A client asks for ids by the header X-Event-IDs. Each event of its stream then has an SSE id. After the stream broke,
the client sends the same request with the last id in the header Last-Event-ID. The gateway generates the answer again,
skips the events that the client has, and sends the later ones.

An id has all that another gateway needs: the seed, the time that the chat template saw, and how much of each choice the
client has. The id also has a digest of all other things that the answer depends on, and checksums of the client's
tokens, so that parts of two different answers are never joined.

An id has an entry for each choice, separated by commas: the number of tokens, "f" if the choice has finished, and the
checksum of the tokens. One message of a worker may become several events. All but the last of them have "-N": N events
of the same message follow. The split into messages differs from run to run. So the gateway gathers all tokens that the
client has into one message. Its last N events are those of the message that the first gateway got, because a new event
begins where the kind of text changes, and nowhere else within a message.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import json
import re
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pydantic import BaseModel

from paceline.core.types import Token
from paceline.services.common.wire import sampling_to_pb
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.http.errors import RETRY_AFTER_SECONDS, ApiError
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.sequences.progress import Ended, Event, Generated

ASKING = "X-Event-IDs"
HEADER = "Last-Event-ID"

_ID = re.compile(r"([A-Za-z0-9_-]{32}):(\S+)")
_ENTRY = re.compile(r"([0-9]{1,9})(f?)\.([0-9a-f]{8})(?:-([0-9]{1,4}))?")
_ORIGIN = struct.Struct(">12sQI")
_EPOCH = datetime.datetime(1970, 1, 1)
_END = b"\n\n"
_IN_PLANS = {"messages", "prompt", "token_ids"}
"""Fields of bodies that the digest of an answer leaves out, because it includes the plan's prompts instead."""


class Position(NamedTuple):
    """How much of one choice a client has received."""

    tokens: int = 0
    has_finished: bool = False
    checksum: int = 0
    """CRC-32 of the tokens' ids. A client that forges it deceives only itself."""
    missing: int = 0
    """Number of events at the end of the position's last delta that the client does not have."""

    def __str__(self) -> str:
        missing = f"-{self.missing}" if self.missing else ""
        return f"{self.tokens}{'f' * self.has_finished}.{self.checksum:08x}{missing}"


_NOTHING = Position(-1)
"""The position of a client that has received nothing, not even the events that begin the stream."""


class Origin(NamedTuple):
    """All that determines an answer. Gateways with equal models generate the same answer from the same origin."""

    digest: bytes
    """12 bytes; see `answer_digest`."""
    seed: int
    """The seed that the gateway drew for a request without a seed; unsigned, 64 bits."""
    rendered_at: int
    """Local time that the chat template saw, in seconds since 1970-01-01 00:00 local time; unsigned, 32 bits."""

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(_ORIGIN.pack(*self)).decode()

    @classmethod
    def of(cls, digest: bytes, seed: int, rendered_at: datetime.datetime | None) -> Origin:
        """Return the origin of an answer.

        Args:
            rendered_at: local time that the chat template saw; None if there was no template.
        """
        return cls(digest, seed, int((rendered_at - _EPOCH).total_seconds()) if rendered_at is not None else 0)

    @property
    def time(self) -> datetime.datetime:
        """The local time that the chat template saw."""
        return _EPOCH + datetime.timedelta(seconds=self.rendered_at)


class EventId(NamedTuple):
    """The id of an event: the origin of the answer, and how much of each choice the client has after the event."""

    origin: Origin
    positions: list[Position]


def read_event_id(text: str) -> EventId:
    """Return an event's id from its text. Raises ApiError if the text is not a valid id."""
    whole = _ID.fullmatch(text)
    entries = [_ENTRY.fullmatch(entry) for entry in whole[2].split(",")] if whole is not None else []
    positions = [Position(int(each[1]), bool(each[2]), int(each[3], 16), int(each[4] or 0)) for each in entries if each]
    if whole is None or len(positions) != len(entries):
        raise ApiError(400, f"{HEADER} must be the id of the last event of a stream from this server", param=HEADER)
    return EventId(Origin._make(_ORIGIN.unpack(base64.urlsafe_b64decode(whole[1]))), positions)


def received_id(headers: Mapping[str, str]) -> EventId | None:
    """Return the id of the last event that a client has; None if its stream begins. Raises ApiError if it is wrong."""
    given = headers.get(HEADER)
    return read_event_id(given) if given else None


def wants_ids(headers: Mapping[str, str]) -> bool:
    """Return whether a client asks for ids of events, by its headers. Raises ApiError if a header is not valid."""
    asked = headers.get(ASKING, "false").lower()
    if asked not in ("true", "false"):
        raise ApiError(400, f"{ASKING} must be true or false", param=ASKING)
    return asked == "true" or HEADER in headers


def rendering_time(headers: Mapping[str, str]) -> datetime.datetime:
    """Return the local time for the chat template: the present, or the time that a continued stream's template saw."""
    received = received_id(headers)
    return received.origin.time if received is not None else datetime.datetime.now().replace(microsecond=0)


def answer_digest(plan: Plan, body: BaseModel) -> bytes:
    """Return a digest of the client's key and of all that an answer depends on, except the origin's seed and time.

    The largest length of the answer is included only if the client chose it. Otherwise it depends on the workers.
    """
    # Lists and objects of a body came from JSON, so this is its JSON in one order.
    fields = body.model_dump(exclude=_IN_PLANS, exclude_unset=True)
    parts = [plan.owner.encode(), json.dumps(fields, sort_keys=True, default=str).encode()]
    for prompt in plan.prompts:
        sampling = dataclasses.replace(prompt.sampling, seed=0, max_tokens=0)
        parts += [
            array("I", prompt.token_ids).tobytes(),
            repr(prompt.media).encode(),
            sampling_to_pb(sampling).SerializeToString(deterministic=True),
        ]
    if plan.adapter_digest:
        parts.append(plan.adapter_digest)
    # Digests of the parts, so that no byte can move from one part to another.
    whole = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(whole).digest()[:12]


class Gathering:
    """A function that passes events on, and joins the first `count` tokens into a single event."""

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
    """Makes the ids of one stream's events, and leaves out events that the client has.

    Args:
        origin: the seed, time and digest that determine the answer.
        received: id of the last event that the client has; None if the stream begins.
        choices: number of choices.

    Raises:
        ApiError: the id belongs to the stream of another answer.
    """

    def __init__(self, origin: Origin, received: EventId | None, choices: int) -> None:
        if received is not None and (received.origin != origin or len(received.positions) != choices):
            raise _conflict(
                "belongs to another request: the body, the key or the prompt that this server makes of them is not the "
                "same; send what began the stream"
            )
        self.resumes = received is not None
        self._origin = str(origin)
        self._received = received.positions if received is not None else [_NOTHING] * choices
        self._generated = [Position()] * choices
        """How much of each choice was generated. A writer may keep the last tokens until the choice ends."""
        self._sent = [Position()] * choices
        """How much of each choice the events have that were written so far."""
        self._unchecked = {index for index, position in enumerate(self._received) if position[:2] > (0, False)}
        """Indexes of choices in which not all tokens that the client has were generated again yet."""
        self._held = b""
        """Events that are not sent before the tokens of all choices are checked."""

    def gathering(self, index: int, take: Callable[[Event], object]) -> Callable[[Event], object]:
        """Return a function that passes a choice's events to `take`. One event has all tokens that the client has."""
        received = self._received[index].tokens
        return Gathering(received, take) if received > 0 else take

    def begin(self, events: bytes) -> bytes:
        """Return the events that begin a new stream, with an id; b"" if there are none."""
        return self._with_id(events, 0, Position()) if events else events

    def mark(self, delta: Delta, written: bytes) -> bytes:
        """Return the events that can be sent after a delta, with their ids and without those that the client has.

        Args:
            written: the delta's events.

        Raises ApiError if the client has tokens of another answer. Until then, no event of this answer was returned.
        """
        index, received, before = delta.index, self._received[delta.index], self._generated[delta.index]
        ids = array("I", [token.id for token in delta.tokens])
        has_finished = delta.finish_reason is not None
        now = Position(before.tokens + len(ids), has_finished, zlib.crc32(ids.tobytes(), before.checksum))
        self._generated[index] = now
        if written:
            self._sent[index] = now
        events = written.split(_END)[:-1]
        if index in self._unchecked:
            if now[:2] < received[:2] and not has_finished:
                return b""
            if now[:3] != received[:3]:
                raise _conflict("names an answer that is not generated again: this server's model or numerics differ")
            self._unchecked.remove(index)
            events = events[max(0, len(events) - received.missing) :]
        left = len(events)
        self._held += b"".join(
            self._with_id(event + _END, index, now._replace(missing=left - number))
            for number, event in enumerate(events, 1)
        )
        if self._unchecked:
            return b""
        marked, self._held = self._held, b""
        return marked

    def fail(self, error: ApiError, events: bytes) -> bytes:
        """Return the events of an error. If another gateway can go on, they say when the client should reconnect."""
        return f"retry: {RETRY_AFTER_SECONDS * 1000}\n".encode() + events if error.is_for_others else events

    def _with_id(self, event: bytes, index: int, position: Position) -> bytes:
        # Until the gathered tokens of another choice have come, the client's position there is the one that it named.
        both = enumerate(zip(self._sent, self._received, strict=True))
        entries = [str(received if choice in self._unchecked else sent) for choice, (sent, received) in both]
        entries[index] = str(position)
        return f"id: {self._origin}:{','.join(entries)}\n".encode() + event


def _conflict(what: str) -> ApiError:
    message = f"{HEADER} {what}, or leave the header out for a new answer"
    return ApiError(409, message, param=HEADER, code="stream_conflict")
