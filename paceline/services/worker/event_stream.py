"""Queues that carry the engine's events to the handlers of requests."""

from __future__ import annotations

import asyncio

from paceline.core.errors import PacelineError
from paceline.core.telemetry import traceparent
from paceline.core.types import Key
from paceline.engine.request import Request
from paceline.engine.step import Computed, Filled, Preempted, Sampled, Scored

RequestEvent = Sampled | Computed | Filled | Scored | Preempted
"""An event that the handler of a request gets."""

ALIVE_SECONDS = 1.0
"""Seconds between two `alive` events from a handler that has nothing else to report while the engine works."""


class EventStream:
    """The events of one request, in order."""

    def __init__(self) -> None:
        self.traceparent = traceparent()
        """Trace context of the request, which the engine does not know."""
        self.sealed_at = 0.0
        """Time, on time.time(), at which the worker learned that all blocks of the request are filled."""
        self._queue: asyncio.Queue[RequestEvent | PacelineError] = asyncio.Queue()

    def put(self, event: RequestEvent | PacelineError) -> None:
        self._queue.put_nowait(event)

    async def batch(self) -> list[RequestEvent]:
        """Return the next event and all that wait after it; an empty list if no event comes within ALIVE_SECONDS.

        Raises StaleError if the request lost its blocks, InvalidRequestError if the engine cannot go on with it.
        """
        events: list[RequestEvent] = []
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                event = await self._queue.get()
        except TimeoutError:
            return events
        while True:
            if isinstance(event, PacelineError):
                raise event
            events.append(event)
            if self._queue.empty():
                return events
            event = self._queue.get_nowait()


class EventStreams:
    """The event streams of all requests in the engine, and the number of their tokens that are not computed yet."""

    def __init__(self) -> None:
        self._streams: dict[Key, EventStream] = {}
        self._queued_tokens: dict[Key, int] = {}
        self._requests: dict[Key, Request] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, key: Key) -> bool:
        return key in self._streams

    @property
    def queued_tokens(self) -> int:
        """Tokens of contexts that the engine has not computed yet."""
        return sum(self._queued_tokens.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens of contexts that the engine has computed."""
        return sum(request.computed_len for request in self._requests.values())

    def add(self, request: Request, stream: EventStream) -> None:
        self._streams[request.key] = stream
        self._requests[request.key] = request
        # The newest token of a request that decodes is never reported as computed.
        self._queued_tokens[request.key] = len(request.token_ids) - 1 - request.computed_len

    def get(self, key: Key) -> EventStream | None:
        return self._streams.get(key)

    def put(self, key: Key, event: RequestEvent | PacelineError) -> None:
        """Give an event to the request's handler, if it still waits for one."""
        if isinstance(event, Computed) and key in self._queued_tokens:
            self._queued_tokens[key] = max(0, self._queued_tokens[key] - event.length)
        if stream := self._streams.get(key):
            stream.put(event)

    def remove(self, key: Key) -> None:
        self._streams.pop(key, None)
        self._queued_tokens.pop(key, None)
        self._requests.pop(key, None)
