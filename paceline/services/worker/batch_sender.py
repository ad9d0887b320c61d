"""The sending of a worker's operations to kvtransfer: in order, in batches, and each with an answer or an error."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.unix_socket import MAX_MESSAGE_BYTES, Framed, socket_address

RETRY_SECONDS = 0.5
"""Pause after a batch that could not be sent, in seconds. If the session broke, the worker has noticed by then."""
LINGER_SECONDS = 0.5
"""Longest time that an operation waits for others to share its call, if no caller waits for it, in seconds. A call
costs both sides as much as a token.
"""
MAX_OPERATIONS = 512
"""Largest number of operations in one batch, so that kvtransfer serves other workers between batches."""
MAX_BATCH_BYTES = MAX_MESSAGE_BYTES // 4
"""Largest size of a batch with more than one operation. A reservation carries 18 bytes for each 16 tokens of its
context."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    operation: pb.Operation
    future: asyncio.Future[pb.Result]


class BatchSender:
    """Sends operations in the order in which they were submitted. Each batch has all operations that are waiting at
    that time.

    An operation that may linger waits up to LINGER_SECONDS for others. An operation that may not linger is sent at
    once, together with all waiting ones.

    Every operation ends with its result, or with UnavailableError if no answer came or the sender was closed. A release
    without an answer is sent again until it gets one, because blocks that nobody needs must not stay leased. Nothing is
    sent between `pause` and `resume`. Operations without an answer are sent again after `resume`, in their old order.

    Args:
        call: sends one batch. The reply has one result for each operation, in order. Raises UnavailableError.
    """

    def __init__(self, call: Callable[[Sequence[pb.Operation]], Awaitable[pb.BatchReply]]) -> None:
        self._call = call
        self._waiting: deque[_Submitted] = deque()
        self._came = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None
        self._unanswered: set[asyncio.Future[pb.Result]] = set()
        self._closed = False
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._pauses = 0

    def pause(self) -> None:
        """Send nothing until `resume`. An answer that is on its way already is ignored."""
        self._may_send.clear()
        self._pauses += 1

    def resume(self) -> None:
        self._may_send.set()

    def submit(self, operation: pb.Operation, may_linger: bool = False) -> asyncio.Future[pb.Result]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[pb.Result] = loop.create_future()
        if self._closed:
            future.set_exception(_closed())
            return future
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        self._waiting.append(_Submitted(operation, future))
        if not may_linger:
            self._came.set()
        elif self._lingering is None and not self._came.is_set():
            self._lingering = loop.call_later(LINGER_SECONDS, self._came.set)
        return future

    async def run(self) -> None:
        """Send until cancelled. Raises ValueError if a reply has too few or too many results for its batch."""
        while True:
            await self._came.wait()
            await self._may_send.wait()
            batch, pauses = self._take_batch(), self._pauses
            try:
                reply = await self._call([each.operation for each in batch])
            except UnavailableError as error:
                await asyncio.sleep(RETRY_SECONDS)
                reply = None
                if pauses == self._pauses:
                    self._fail(batch, error)
                    continue
            if reply is None or pauses != self._pauses:
                self._put_back(batch)
                continue
            for submitted, result in zip(batch, reply.results, strict=True):
                submitted.future.set_result(result)

    async def answered(self, seconds: float) -> None:
        """Wait up to `seconds` until every submitted operation has ended."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=seconds)

    def close(self) -> None:
        """Fail all operations without an answer, and all later submitted operations. Cancel `run` first."""
        self._closed = True
        if self._lingering is not None:
            self._lingering.cancel()
        for future in list(self._unanswered):
            if not future.done():
                future.set_exception(_closed())

    def _take_batch(self) -> list[_Submitted]:
        batch: list[_Submitted] = []
        size = 0
        while self._waiting and len(batch) < MAX_OPERATIONS:
            size += self._waiting[0].operation.ByteSize()
            if batch and size > MAX_BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        if not self._waiting:
            self._came.clear()
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        return batch

    def _fail(self, batch: Sequence[_Submitted], error: UnavailableError) -> None:
        """Fail a batch except for its releases, which keep their place: later operations may need the freed blocks."""
        for submitted in batch:
            if not submitted.operation.HasField("release"):
                submitted.future.set_exception(error)
        self._put_back([each for each in batch if each.operation.HasField("release")])

    def _put_back(self, operations: Sequence[_Submitted]) -> None:
        self._waiting.extendleft(reversed(operations))
        if operations:
            self._came.set()


def _closed() -> UnavailableError:
    return UnavailableError("this worker has no session with kvtransfer")


class HostConnection:
    """A worker's connection to the kvtransfer of its host. `connect` opens it."""

    def __init__(self) -> None:
        self._framed = Framed(self._take_reply, self._fail)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.BatchReply]] = {}

    @classmethod
    async def connect(cls, path: str) -> HostConnection:
        """Connect to the Unix socket at `path`. Raises OSError."""
        connection, loop = cls(), asyncio.get_running_loop()
        with socket_address(Path(path)) as address:
            await loop.create_unix_connection(lambda: connection._framed, address)
        return connection

    @property
    def is_open(self) -> bool:
        return self._framed.is_open

    async def call(self, request: pb.BatchRequest) -> pb.BatchReply:
        """Send a request and wait for its reply. Raises UnavailableError if the connection has ended.

        If the caller is cancelled, a late reply is ignored.
        """
        request.id = next(self._ids)
        reply: asyncio.Future[pb.BatchReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = reply
        try:
            if not self.is_open:
                self._fail()
            self._framed.send(request)
            return await reply
        finally:
            del self._waiting[request.id]

    def close(self) -> None:
        self._framed.abort()

    def _take_reply(self, message: bytes) -> None:
        reply = pb.BatchReply.FromString(message)
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UnavailableError("the connection to kvtransfer has ended"))
