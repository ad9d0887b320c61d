"""Work of the kind ENCODE: the encoding of an image, a frame or audio, computed here or found in the host's cache."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.media import MediaInput, MediaSpan
from paceline.proto import common_pb2, worker_pb2
from paceline.services.common.wire import media_input_from_pb, spans_from_pb
from paceline.services.worker.encoder import AbandonedError, EncodeTimes, WorkerEncoder
from paceline.services.worker.encodings import Encodings, HeldEncoding
from paceline.services.worker.event_stream import ALIVE_SECONDS

Send = Callable[[worker_pb2.ComputeEvent], Awaitable[None]]

ROOM_SECONDS = (3.0, 8.0)
"""Shortest and longest time that work waits for free blocks, in seconds. Requests that hold blocks while they wait for
more give up at different times, so that one of them can continue.
"""
POLL_SECONDS = (0.01, 0.05)
"""Shortest and longest pause before the next look for free blocks, in seconds."""


@dataclass(frozen=True, slots=True)
class _Obtained:
    """A complete encoding, and the time that getting it took."""

    held: HeldEncoding
    times: EncodeTimes | None
    """The times of its computation; None if it was cached."""
    waited: float
    """Seconds that the work waited: for the same encoding by another call, for blocks, or for its turn at the encoder.
    """


class EncodeHandler:
    """Handles work of the kind ENCODE on a worker. Each encoding is computed once.

    Args:
        encodings: the encodings in the host's arena.
        source: address at which other hosts reach the kvtransfer service of this host.
        goes_on: returns whether the engine is idle or its step began a short time ago; see `Worker.goes_on`.
    """

    def __init__(self, encoder: WorkerEncoder, encodings: Encodings, source: str, goes_on: Callable[[], bool]) -> None:
        self.encoder = encoder
        self._encodings = encodings
        self._source = source
        self._goes_on = goes_on
        self._locks: weakref.WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = weakref.WeakValueDictionary()
        """A lock for each encoding under way. The second caller waits and finds the encoding in the cache."""
        self._tasks: set[asyncio.Task[_Obtained | None]] = set()

    async def serve(self, work: common_pb2.Work, send: Send) -> None:
        """Send `Opened`, then either `InputNeeded`, or `Encoded` and signs of life until the call is cancelled.

        While the encoder makes no progress, no sign of life is sent, so the gateway gives the call up after a while.

        Raises:
            BusyError: there are too few free blocks.
            InvalidRequestError: the input does not fit the span, or the encoder cannot read it.
            UnavailableError: the encoder failed, or the worker ends.
        """
        (span,) = spans_from_pb(work.media)
        media = media_input_from_pb(work.media_input) if work.HasField("media_input") else None
        await send(worker_pb2.ComputeEvent(opened=worker_pb2.Opened(key=work.key, source=self._source)))
        abandoned = asyncio.Event()
        # A task of its own, because a thread may write to the blocks for a while after this call was cancelled.
        obtaining = asyncio.create_task(self._obtain(work, span, media, abandoned))
        self._tasks.add(obtaining)
        try:
            while not (await asyncio.wait((obtaining,), timeout=ALIVE_SECONDS))[0]:
                if self._goes_on() and not self.encoder.stands_still:
                    await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive()))
            if (obtained := obtaining.result()) is None:
                await send(worker_pb2.ComputeEvent(input_needed=worker_pb2.InputNeeded()))
                return
            await send(worker_pb2.ComputeEvent(encoded=self._describe(obtained)))
            while True:
                await asyncio.sleep(ALIVE_SECONDS)
                await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive()))
        finally:
            abandoned.set()
            obtaining.add_done_callback(self._release)

    def _release(self, obtaining: asyncio.Task[_Obtained | None]) -> None:
        """Give back the lease that a task has obtained, if it has one."""
        self._tasks.discard(obtaining)
        if not obtaining.cancelled() and obtaining.exception() is None and (obtained := obtaining.result()):
            self._encodings.release(obtained.held)

    async def _obtain(
        self, work: common_pb2.Work, span: MediaSpan, media: MediaInput | None, abandoned: asyncio.Event
    ) -> _Obtained | None:
        """Return a lease of the complete encoding; None if it is not cached and there is no input. Do not cancel
        this.
        """
        began = time.monotonic()
        name = (work.cache_salt, span.digest)
        lock = self._locks.get(name) or self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            if (held := await self._reserve(work, span, media is None, abandoned)) is None:
                return None
            try:
                if held.is_complete:
                    self.encoder.note_found()
                    return _Obtained(held, None, time.monotonic() - began)
                if media is None:  # the encoding was evicted a moment ago
                    self._encodings.release(held)
                    return None
                await asyncio.to_thread(_check_digest, media, span)
                reserved = time.monotonic()
                write = partial(self._encodings.write, held)
                times = await self.encoder.compute(work.key.request_id, media, write, abandoned)
                await self._encodings.publish(held)
            except BaseException:
                self._encodings.release(held)
                raise
        return _Obtained(held, times, reserved - began + times.queued)

    async def _reserve(
        self, work: common_pb2.Work, span: MediaSpan, only_cached: bool, abandoned: asyncio.Event
    ) -> HeldEncoding | None:
        """Reserve blocks. If too few are free, wait a while for more. Raises BusyError.

        If `only_cached`, return None for an encoding that is not cached, so that no block is evicted for a lookup.
        """
        name, priority = (span.digest, span.length, work.cache_salt), work.priority
        give_up = time.monotonic() + random.uniform(*ROOM_SECONDS)
        while True:
            if abandoned.is_set():
                raise AbandonedError
            try:
                if only_cached and not await self._encodings.is_cached(*name):
                    return None
                return await self._encodings.reserve(*name, priority)
            except BusyError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(random.uniform(*POLL_SECONDS))

    def _describe(self, obtained: _Obtained) -> worker_pb2.Encoded:
        times = obtained.times
        return worker_pb2.Encoded(
            source=self._source,
            cached=times is None,
            queue_ms=obtained.waited * 1000,
            encode_ms=0.0 if times is None else times.computed * 1000,
            bytes=self._encodings.size(obtained.held),
        )


def _check_digest(media: MediaInput, span: MediaSpan) -> None:
    """Raise InvalidRequestError if the input is not the one that the span names."""
    if media.digest != span.digest or (media.kind, media.length) != (span.kind, span.length):
        raise InvalidRequestError("the input of an encoder is not the one that its span names")
