"""How events of the engine reach the handler of a request."""

from __future__ import annotations

import asyncio

from paceline.core.errors import PacelineError
from paceline.core.telemetry import traceparent
from paceline.engine.step import Computed, Filled, Preempted, Sampled, Scored

RequestEvent = Sampled | Computed | Filled | Scored | Preempted
"""What the handler of a request gets to see."""

ALIVE_SECONDS = 1.0
"""A handler that has nothing to report says so this often, while the engine works."""


class EventStream:
    """What happens to one request, in order."""

    def __init__(self) -> None:
        self.traceparent = traceparent()
        """Of the request's trace, which the engine does not know."""
        self.sealed_at = 0.0
        """When the results came with which all of its blocks can be sealed, on time.time()."""
        self._queue: asyncio.Queue[RequestEvent | PacelineError] = asyncio.Queue()

    def put(self, event: RequestEvent | PacelineError) -> None:
        self._queue.put_nowait(event)

    async def batch(self) -> list[RequestEvent]:
        """The next event and all that are there behind it; none where none came within ALIVE_SECONDS.

        Raises StaleError where the request lost its blocks, InvalidRequestError where the engine cannot go on with it.
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
