"""Events for gateways, one stream for each gateway. Events that come together share a message, because a message costs
more than its content.

Gateways on the same host read them from a Unix socket. gRPC has threads of its own in both processes. For one message
these threads take longer than the rest of a token's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from google.protobuf.message import DecodeError

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.types import Token
from paceline.proto import worker_pb2
from paceline.services.common.tasks import is_cancelled
from paceline.services.common.unix_socket import Framed
from paceline.services.common.wire import fill_token

Write = Callable[[worker_pb2.DecodeEvents], Awaitable[None]]

MAX_TOKENS = 256
"""Approximate number of tokens in one message. A message stays far below MAX_MESSAGE_BYTES even if a gateway reads
slowly.
"""

TOKEN_LOGPROBS = 128
"""Number of logprobs that count as much as one token towards MAX_TOKENS."""

_MAX_NAME = 128


class Outbox:
    """The events of one gateway's attempts that are not written yet, in order."""

    def __init__(self) -> None:
        self._messages: deque[worker_pb2.DecodeEvents] = deque()
        self._tokens = 0
        """Number of tokens and other events in the last message."""
        self._came = asyncio.Event()
        self._flushing: list[tuple[worker_pb2.DecodeEvents, asyncio.Future[None]]] = []
        self._members: dict[int, Callable[[UnavailableError], None]] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def member(self, attempt: int, on_close: Callable[[UnavailableError], None]) -> AsyncIterator[None]:
        """Accept an attempt's events inside a `with` statement. At its end, wait until the events have been written.

        Raises InvalidRequestError if another attempt has this number.

        Args:
            on_close: called when the gateway's stream has ended.
        """
        if attempt in self._members:
            raise InvalidRequestError(f"another attempt on this stream of events is number {attempt}")
        self._members[attempt] = on_close
        try:
            yield
        except BaseException:
            self.event(attempt)  # earlier events are written first; then the call's status reports the outcome
            raise
        finally:
            del self._members[attempt]
            if not is_cancelled():
                await self.flush()

    def event(self, attempt: int) -> worker_pb2.DecodeEvent:
        """Add an event of an attempt and return it. The caller must fill it in at once."""
        if self._closed:
            return worker_pb2.DecodeEvent()
        event = self._message().events.add()
        event.attempt = attempt
        return event

    def token(self, attempt: int, token: Token) -> None:
        """Add a token of an attempt.

        A token with logprobs needs an event. It is added to the last event if that event has tokens of the same
        attempt, otherwise to a new one.
        """
        if not token.logprobs:
            if not self._closed:
                message = self._message()
                message.attempts.append(attempt)
                message.token_ids.append(token.id)
            return
        events = self._messages[-1].events if self._messages and self._tokens < MAX_TOKENS else ()
        if events and events[-1].attempt == attempt and events[-1].HasField("tokens"):
            event = events[-1]
            self._tokens += 1
        else:
            event = self.event(attempt)
        fill_token(event.tokens.tokens.add(), token)
        self._tokens += len(token.logprobs) // TOKEN_LOGPROBS

    def tell_draining(self) -> None:
        """Add the news that the worker takes no new attempts."""
        if not self._closed:
            self._message().draining = True

    def end_message(self) -> None:
        """End the present message, so that later events go into a new one."""
        self._tokens = MAX_TOKENS

    def _message(self) -> worker_pb2.DecodeEvents:
        """Return the message for the next event, which is counted here."""
        if not self._messages or self._tokens >= MAX_TOKENS:
            self._messages.append(worker_pb2.DecodeEvents())
            self._tokens = 0
            self._came.set()
        self._tokens += 1
        return self._messages[-1]

    @property
    def is_writing(self) -> bool:
        """Whether a message has not been written completely."""
        return bool(self._messages)

    async def flush(self) -> None:
        """Wait until all present events have been written, or the gateway's stream has ended."""
        if self.is_writing:
            self.end_message()  # later events are not waited for
            written = asyncio.get_running_loop().create_future()
            self._flushing.append((self._messages[-1], written))
            await written

    async def write(self, write: Write, is_draining: bool = False) -> None:
        """Write all events as they come, until the call is cancelled or a write fails."""
        try:
            await write(worker_pb2.DecodeEvents(draining=is_draining))
            while True:
                await self._came.wait()
                self._came.clear()
                while self._messages:
                    self.end_message()
                    await write(self._messages[0])
                    self._end_flush(self._messages.popleft())
        finally:
            self._closed = True
            self._messages.clear()
            self._end_flush(*(message for message, _ in self._flushing))
            for on_close in list(self._members.values()):
                on_close(UnavailableError("the gateway's stream of events has ended"))

    def _end_flush(self, *messages: worker_pb2.DecodeEvents) -> None:
        """Wake everybody who waits for these messages: they have been written, or never will be."""
        for message, written in self._flushing:
            if not written.done() and any(message is each for each in messages):
                written.set_result(None)
        self._flushing = [each for each in self._flushing if not each[1].done()]


class Outboxes:
    """The outboxes of one worker, by the names of streams that gateways chose.

    Args:
        is_draining: returns whether the worker takes no new attempts now.
    """

    def __init__(self, is_draining: Callable[[], bool] = lambda: False) -> None:
        self._by_name: dict[str, Outbox] = {}
        self._is_draining = is_draining

    def tell_draining(self) -> None:
        """Tell all gateways that have a stream that the worker takes no new attempts."""
        for outbox in self._by_name.values():
            outbox.tell_draining()

    async def serve(self, name: str, write: Write) -> None:
        """Write the events of the stream `name` until cancelled.

        Raises InvalidRequestError if `name` is empty, too long or in use.
        """
        if not 0 < len(name) <= _MAX_NAME or name in self._by_name:
            raise InvalidRequestError("a stream of events needs a name of its own")
        outbox = self._by_name[name] = Outbox()
        try:
            await outbox.write(write, self._is_draining())
        finally:
            del self._by_name[name]

    def of(self, recipient: worker_pb2.Recipient) -> Outbox:
        """Return the outbox of a recipient. Raises UnavailableError if its gateway has no such stream."""
        if (outbox := self._by_name.get(recipient.stream)) is None:
            raise UnavailableError("the gateway has no such stream of events here")
        return outbox


log = logging.getLogger(__name__)


class EventConnection(Framed):
    """The connection of one gateway. It sends one EventsRequest and reads the messages of `Decode.Events`."""

    def __init__(self, outboxes: Outboxes) -> None:
        super().__init__(self._take, self._end)
        self._outboxes = outboxes
        self._serving: asyncio.Task[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def _take(self, message: bytes) -> None:
        try:
            if self._serving is not None:
                raise InvalidRequestError("this connection has asked for a stream of events already")
            name = worker_pb2.EventsRequest.FromString(message).stream
            self._serving = asyncio.get_running_loop().create_task(self._serve(name))
        except (InvalidRequestError, DecodeError) as error:
            self._refuse(error)

    async def _serve(self, name: str) -> None:
        try:
            await self._outboxes.serve(name, self._write)
        except InvalidRequestError as error:
            self._refuse(error)
        finally:
            self.close()

    async def _write(self, message: worker_pb2.DecodeEvents) -> None:
        await self._has_room.wait()
        self.send(message)

    def _refuse(self, error: Exception) -> None:
        log.warning("the connection of a gateway is closed: %s", error)
        self.abort()

    def _end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    # ---- called by the event loop if the gateway reads slowly

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
