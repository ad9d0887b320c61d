"""What gateways are told, one stream each: all that comes together travels together, because a message costs more than
what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.types import Token
from paceline.proto import worker_pb2
from paceline.services.common.rpc import is_cancelled
from paceline.services.common.wire import fill_token

Write = Callable[[worker_pb2.DecodeEvents], Awaitable[None]]

MAX_TOKENS = 256
"""Of one message, about, so that it stays far below what one may have when a gateway reads slowly and much has come."""

_MAX_NAME = 128


class Outbox:
    """What one gateway is told of its attempts, in order."""

    def __init__(self) -> None:
        self._messages: deque[worker_pb2.DecodeEvents] = deque()
        self._tokens = 0
        """Or other events, in the last message."""
        self._came = asyncio.Event()
        self._flushing: list[tuple[worker_pb2.DecodeEvents, asyncio.Future[None]]] = []
        self._members: dict[int, Callable[[UnavailableError], None]] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def member(self, attempt: int, on_close: Callable[[UnavailableError], None]) -> AsyncIterator[None]:
        """An attempt that is told of, until all has been. Raises InvalidRequestError where another one has its number.

        Args:
            on_close: called when nobody listens any more.
        """
        if attempt in self._members:
            raise InvalidRequestError(f"another attempt on this stream of events is number {attempt}")
        self._members[attempt] = on_close
        try:
            yield
        except BaseException:
            self.event(attempt)  # what has happened before comes first, and the status of the call says the rest
            raise
        finally:
            del self._members[attempt]
            if not is_cancelled():
                await self.flush()

    def event(self, attempt: int) -> worker_pb2.DecodeEvent:
        """A new event, to be filled in at once."""
        if self._closed:
            return worker_pb2.DecodeEvent()
        event = self._message().events.add()
        event.attempt = attempt
        return event

    def token(self, attempt: int, token: Token) -> None:
        """A new token. One with logprobs needs an event: the last one, where that has tokens of the same attempt."""
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

    def tell_draining(self) -> None:
        """Tell the gateway that the worker takes no new attempts."""
        if not self._closed:
            self._message().draining = True

    def end_message(self) -> None:
        """What comes from now on travels in another message."""
        self._tokens = MAX_TOKENS

    def _message(self) -> worker_pb2.DecodeEvents:
        """The one that takes a further event."""
        if not self._messages or self._tokens >= MAX_TOKENS:
            self._messages.append(worker_pb2.DecodeEvents())
            self._tokens = 0
            self._came.set()
        self._tokens += 1
        return self._messages[-1]

    @property
    def is_writing(self) -> bool:
        """Whether something is on its way."""
        return bool(self._messages)

    async def flush(self) -> None:
        """Waits until all that there is has been written, or nobody listens any more."""
        if self.is_writing:
            self.end_message()  # what comes meanwhile is not waited for
            written = asyncio.get_running_loop().create_future()
            self._flushing.append((self._messages[-1], written))
            await written

    async def write(self, write: Write, is_draining: bool = False) -> None:
        """Write all that comes, until this is cancelled or fails."""
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
        """These have been written, or never will be."""
        for message, written in self._flushing:
            if not written.done() and any(message is each for each in messages):
                written.set_result(None)
        self._flushing = [each for each in self._flushing if not each[1].done()]


class Outboxes:
    """Those of one worker, by the names that gateways gave them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Outbox] = {}
        self._draining = False

    def tell_draining(self) -> None:
        """Tell all gateways, also those that come later, that the worker takes no new attempts."""
        self._draining = True
        for outbox in self._by_name.values():
            outbox.tell_draining()

    async def serve(self, name: str, write: Write) -> None:
        """Until it is cancelled. Raises InvalidRequestError for a name that is none, or taken."""
        if not 0 < len(name) <= _MAX_NAME or name in self._by_name:
            raise InvalidRequestError("a stream of events needs a name of its own")
        outbox = self._by_name[name] = Outbox()
        try:
            await outbox.write(write, self._draining)
        finally:
            del self._by_name[name]

    def of(self, recipient: worker_pb2.Recipient) -> Outbox:
        """Raises UnavailableError where nobody listens."""
        if (outbox := self._by_name.get(recipient.stream)) is None:
            raise UnavailableError("the gateway has no such stream of events here")
        return outbox
