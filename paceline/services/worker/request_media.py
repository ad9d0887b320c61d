"""The encodings that requests on this worker read: held from `Media.Ready` until their prompts are computed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import grpc.aio

from paceline.core.errors import BusyError, InvalidRequestError, StaleError, TransferError, UnavailableError
from paceline.core.media import MediaSpan
from paceline.core.types import Key
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.wire import key_from_pb, spans_from_pb
from paceline.services.worker.encoding import ROOM_SECONDS
from paceline.services.worker.encodings import Encodings, HeldEncoding

_AGAIN_SECONDS = (0.1, 0.5)
"""Shortest and longest pause before the next try to fetch an encoding, in seconds."""

Provide = Callable[[HeldEncoding], None]
"""A function that gives an encoding to the engine, for all spans of a request that read it."""


class RequestMedia:
    """The encodings of one attempt, which need not be in the engine yet.

    Args:
        work: the attempt's work.
        encodings: the encodings in the host's arena.
        source: address at which other hosts reach the kvtransfer service of this host.
        cached_tokens: tokens of the context whose KV was cached when the attempt was admitted. The gateway sends no
            encodings for spans within them.
    """

    def __init__(self, work: common_pb2.Work, encodings: Encodings, source: str, cached_tokens: int) -> None:
        self._encodings = encodings
        self._source = source
        self._salt = work.cache_salt
        self._spans = {span.digest: span for span in spans_from_pb(work.media)}
        self._complete = {digest for digest, span in self._spans.items() if span.end <= cached_tokens}
        """Digests of encodings that are computed, because the gateway has reported it or the KV of their spans was
        cached.
        """
        self._held: dict[bytes, HeldEncoding] = {}
        self._provide: Provide | None = None
        self._reads = True
        """Whether the attempt reads encodings now: its prompt has to be computed, and is not preempted."""
        self._closed = False
        """Whether the attempt has left the engine."""

    def attach(self, provide: Provide) -> None:
        """Give all held encodings to the engine now, and further encodings as they come."""
        self._provide = provide
        for held in self._held.values():
            provide(held)

    async def ready(self, digest: bytes, source: str) -> int:
        """Hold an encoding that is complete on some host. Return the bytes that came from another host.

        Args:
            source: address of the kvtransfer service of that host.

        Raises:
            InvalidRequestError: the context has no such span.
            StaleError: the encoding is not there any more.
            BusyError: this host has too few free blocks to fetch the encoding.
            TransferError: the encoding could not be fetched.
        """
        if (span := self._spans.get(digest)) is None:
            raise InvalidRequestError("the context has no span with this digest")
        moved = 0
        if (held := await self._find(span)) is None:
            if source == self._source:
                raise StaleError("the encoding was evicted before it was read")
            held = await self._fetch(span, source)
            moved = self._encodings.size(held)
        self._complete.add(digest)
        if not self._reads or digest in self._held:
            self._encodings.release(held)
            return moved
        self._held[digest] = held
        if self._provide is not None:
            self._provide(held)
        return moved

    def finish(self) -> None:
        """Release all encodings, because the prompt is computed. The engine must not read them any more."""
        self._complete.update(self._spans)
        self.pause()

    def close(self) -> None:
        """Release all encodings and fetch no more, because the attempt has left the engine."""
        self._closed = True
        self.finish()

    def pause(self) -> None:
        """Release all encodings for now, because the request was preempted."""
        self._reads, self._provide = False, None
        for held in self._held.values():
            self._encodings.release(held)
        self._held.clear()

    async def resume(self, computed_tokens: int) -> None:
        """Hold the complete encodings of spans that end after `computed_tokens`, for a request that was preempted.

        The gateway announces the other encodings by `ready`. Raises StaleError if one of the encodings is no longer
        cached on this host.
        """
        self._reads = True
        for span in self._spans.values():
            if span.end > computed_tokens and span.digest in self._complete:
                await self.ready(span.digest, self._source)

    async def _find(self, span: MediaSpan) -> HeldEncoding | None:
        """Hold an encoding if it is cached on this host."""
        try:
            return await self._encodings.hold(span.digest, span.length, self._salt)
        except (BusyError, UnavailableError):
            return None

    async def _fetch(self, span: MediaSpan, source: str) -> HeldEncoding:
        """Bring an encoding from another host and hold it. If it does not come, try again for a while.

        A preemption does not end this, because the request needs the encoding when it continues.
        """
        give_up = time.monotonic() + random.uniform(*ROOM_SECONDS)
        while True:
            try:
                return await self._encodings.hold(span.digest, span.length, self._salt, source)
            except (BusyError, UnavailableError) as error:
                if self._closed:
                    raise StaleError("the attempt left the engine before its encoding came") from error
                if time.monotonic() >= give_up:
                    if isinstance(error, BusyError):
                        raise
                    raise TransferError(f"an encoding did not come from {source}: {error}") from error
            await asyncio.sleep(random.uniform(*_AGAIN_SECONDS))


class RequestMediaTable:
    """The media of each attempt that this worker computes.

    Args:
        encodings: the encodings in the host's arena; None if the model has no encoders.
        source: address at which other hosts reach the kvtransfer service of this host.
    """

    def __init__(self, encodings: Encodings | None, source: str) -> None:
        self._encodings = encodings
        self._source = source
        self._attempts: dict[tuple[str, int], RequestMedia] = {}

    def open(self, work: common_pb2.Work, cached_tokens: int) -> RequestMedia | None:
        """Accept encodings for an attempt from now on. Returns None if its context has no media.

        `cached_tokens` is the number of context tokens whose KV was cached at admission. Raises InvalidRequestError if
        the context has media and the model has no encoders.
        """
        if not work.media:
            return None
        if self._encodings is None:
            raise InvalidRequestError("the context has media, and this model has no encoders")
        media = RequestMedia(work, self._encodings, self._source, cached_tokens)
        self._attempts[key_from_pb(work.key)[:2]] = media
        return media

    def get(self, key: Key) -> RequestMedia | None:
        """Return the media of an attempt, whatever the key's generation is."""
        return self._attempts.get(key[:2])

    def finish(self, key: Key) -> None:
        """Release an attempt's encodings, because its prompt is computed."""
        if media := self._attempts.get(key[:2]):
            media.finish()

    def pause(self, key: Key) -> None:
        """Release an attempt's encodings until `RequestMedia.resume`, because the attempt was preempted."""
        if media := self._attempts.get(key[:2]):
            media.pause()

    def close(self, key: Key) -> None:
        """Release an attempt's encodings and accept no more, because it has left the engine. May be called twice."""
        if media := self._attempts.pop(key[:2], None):
            media.close()

    async def ready(self, key: Key, digest: bytes, source: str) -> int:
        """Call `RequestMedia.ready` of an attempt. Raises StaleError if this worker does not compute the attempt."""
        if (media := self._attempts.get(key[:2])) is None:
            raise StaleError(f"this worker does not compute {key}")
        return await media.ready(digest, source)


CallContext = grpc.aio.ServicerContext[worker_pb2.ReadyRequest, worker_pb2.ReadyReply]


class WorkerMedia(worker_pb2_grpc.MediaServicer):
    """The gRPC service `Media` of one worker, through which gateways announce complete encodings to its attempts."""

    def __init__(self, table: RequestMediaTable) -> None:
        self._table = table

    async def Ready(self, request: worker_pb2.ReadyRequest, context: CallContext) -> worker_pb2.ReadyReply:
        async with mapped_errors(context):
            moved = await self._table.ready(key_from_pb(request.key), request.digest, request.source)
            return worker_pb2.ReadyReply(bytes_moved=moved)
        raise AssertionError("an error ends the call")
