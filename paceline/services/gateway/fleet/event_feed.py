"""The stream of events from each decode worker, and the queues that carry these events to the tasks of attempts."""

from __future__ import annotations

import asyncio
import itertools
import operator
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio

from paceline.core.types import Token
from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import end_tasks, heeding_cancellation, is_cancelled
from paceline.services.common.unix_socket import Framed, socket_address

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded queue from callbacks, which must not block, to the one task that reads it.

    It is used for every token. An asyncio.Queue would need more function calls per token.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def is_empty(self) -> bool:
        return not self._items

    def clear(self) -> None:
        self._items.clear()

    async def get(self) -> T:
        while not self._items:
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._items.popleft()


InboxItem = list[Token] | worker_pb2.DecodeEvent | Exception
"""An entry of an inbox: tokens without logprobs that arrived together, any other event, or an error, which is always
the last entry."""


class Inbox(Mailbox[InboxItem]):
    """A queue of the events of one attempt, in order. One task reads it.

    Events that have not been read wait here, so that a slow reader delays no other attempt. The queue never holds more
    than the requested answer. No entry follows an exception.

    Args:
        on_broken: called at once when the stream breaks, even while no task reads. It must not refer to the inbox: the
            reference cycle would keep both in memory until the next full garbage collection.
    """

    def __init__(self, on_broken: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.on_broken = on_broken
        self._take: Callable[[list[Token]], object] | None = None

    def divert(self, take: Callable[[list[Token]], object]) -> None:
        """Call `take` with tokens as soon as they come, from now on, unless earlier events wait in the queue.

        Waking a task for each token would cost more than handling the token. An error of `take` is put into the queue.
        """
        self._take = take

    def put(self, item: InboxItem) -> None:
        if isinstance(item, Exception):
            self._end(item)
        elif self._take is not None and self.is_empty and isinstance(item, list):
            try:
                self._take(item)
            except Exception as error:
                self._end(error)
        else:
            super().put(item)

    def _end(self, error: Exception) -> None:
        # `take` knows the attempt, which knows this inbox. The cycle would keep both in memory until the next full
        # garbage collection.
        self._take = None
        super().put(error)


class FeedError(Exception):
    """A worker's stream of events could not be opened, or has broken."""


class EventFeed:
    """The stream of events of one worker. It is opened for the worker's first attempt, and again after it has broken.

    Args:
        channel: the gRPC channel to the worker, for gateways on other hosts.
        name: the worker's name in error messages.
        socket: the path of the worker's Unix socket, for gateways on the worker's host; "" if there is no socket.
        on_draining: called when the worker reports that it drains.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        name: str,
        socket: str = "",
        on_draining: Callable[[], object] = lambda: None,
    ) -> None:
        self._name = name
        self.socket = socket
        self._on_draining = on_draining
        self._stub = worker_pb2_grpc.DecodeStub(channel)
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._opened: asyncio.Future[str] | None = None
        """The stream's name, once the worker has accepted the stream; None while there is no stream."""
        self._reading: asyncio.Task[None] | None = None

    async def join(self, inbox: Inbox) -> worker_pb2.Recipient:
        """Deliver an attempt's events to `inbox` until `leave`. Return the recipient to name in its admission.

        Raises FeedError if the stream cannot be opened.
        """
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            # Reads the exception, so that asyncio does not warn if no task waits for it any more.
            self._opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
            self._reading = asyncio.create_task(self._read(self._opened), name="events")
        opened = self._opened
        stream = await asyncio.shield(opened)
        if self._opened is not opened:
            raise self._ended()
        number = next(self._numbers)
        self._inboxes[number] = inbox
        return worker_pb2.Recipient(stream=stream, attempt=number)

    async def close(self) -> None:
        """End the stream, if it is open."""
        if self._reading is not None:
            await end_tasks(self._reading)

    def leave(self, recipient: worker_pb2.Recipient) -> None:
        self._inboxes.pop(recipient.attempt, None)

    async def _read(self, opened: asyncio.Future[str]) -> None:
        stream, error = secrets.token_hex(16), self._ended()

        def receive(message: worker_pb2.DecodeEvents) -> None:
            if not opened.done():
                opened.set_result(stream)
            self._hand_on(message)

        try:
            if not (self.socket and await self._read_socket(stream, receive)):
                await self._read_call(stream, receive)
        except grpc.aio.AioRpcError as failure:
            error = FeedError(str(unmapped_error(failure, self._name)))
        except grpc.aio.UsageError as failure:
            error = FeedError(f"{self._name}: {failure}")
        except asyncio.CancelledError:
            if is_cancelled():
                raise
        finally:
            self._opened = None
            inboxes, self._inboxes = self._inboxes, {}
            for inbox in inboxes.values():
                inbox.put(error)
                inbox.on_broken()
            if not opened.done():
                opened.set_exception(error)

    async def _read_socket(self, stream: str, receive: Callable[[worker_pb2.DecodeEvents], None]) -> bool:
        """Read events from the Unix socket until the connection ends. Return False if the socket cannot be opened.

        That is so if the worker runs on another host, or as another user.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        framed = Framed(
            lambda message: receive(worker_pb2.DecodeEvents.FromString(message)),
            lambda: None if ended.done() else ended.set_result(None),
        )
        try:
            with socket_address(Path(self.socket)) as address:
                await loop.create_unix_connection(lambda: framed, address)
        except OSError:
            return False
        try:
            framed.send(worker_pb2.EventsRequest(stream=stream))
            await ended
            return True
        finally:
            framed.abort()

    async def _read_call(self, stream: str, receive: Callable[[worker_pb2.DecodeEvents], None]) -> None:
        """Read events from the gRPC call until the call ends."""
        call: Any = self._stub.Events(worker_pb2.EventsRequest(stream=stream))
        try:
            while (message := await heeding_cancellation(call.read())) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                receive(message)
        finally:
            call.cancel()

    def _hand_on(self, message: worker_pb2.DecodeEvents) -> None:
        if message.draining:
            self._on_draining()
        tokens = zip(message.attempts, message.token_ids)
        for attempt, own in itertools.groupby(tokens, key=operator.itemgetter(0)):
            if (inbox := self._inboxes.get(attempt)) is not None:
                inbox.put([Token(token_id) for _, token_id in own])
        for event in message.events:
            if (inbox := self._inboxes.get(event.attempt)) is not None:
                # Copied, because a part of a message keeps the whole message in memory.
                copy = worker_pb2.DecodeEvent()
                copy.CopyFrom(event)
                inbox.put(copy)

    def _ended(self) -> FeedError:
        return FeedError(f"{self._name} has ended its stream of events")
