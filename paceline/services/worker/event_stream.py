"""Queues that carry the engine's events to the handlers of requests, and reports for the gateway made from these
events.

Reports are statistics for people, which cost nothing per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from paceline.core.errors import PacelineError
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.telemetry import traceparent
from paceline.core.types import Key
from paceline.engine.request import Request, RequestStats
from paceline.engine.step import Computed, Filled, Preempted, Sampled, Scored, States
from paceline.proto import worker_pb2
from paceline.services.worker.leases import Reservation

RequestEvent = Sampled | Computed | Filled | Scored | States | Preempted
"""An event that the handler of a request gets."""

ALIVE_SECONDS = 1.0
"""Seconds between two `alive` events from a handler that has nothing else to report while the engine works."""

EFFORT_SECONDS = 1.0
"""Interval at which totals are reported while tokens come. The last event has the final totals."""

SHARED_MEMORY = "shared memory"
DEVICE = "device"
"""Path of blocks that were copied from another worker's pool on the same device."""


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
        """Return the next event and all waiting events after it; an empty list if no event comes within ALIVE_SECONDS.

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
        """Number of context tokens of all requests that the engine has not computed yet."""
        return sum(self._queued_tokens.values())

    @property
    def computed_tokens(self) -> int:
        """Number of context tokens that the engine has computed, over all requests that it has now."""
        return sum(request.computed_len for request in self._requests.values())

    def add(self, request: Request, stream: EventStream) -> None:
        self._streams[request.key] = stream
        self._requests[request.key] = request
        # The newest token of a request that decodes is never reported as computed.
        self._queued_tokens[request.key] = len(request.token_ids) - 1 - request.computed_len

    def get(self, key: Key) -> EventStream | None:
        return self._streams.get(key)

    def put(self, key: Key, event: RequestEvent | PacelineError) -> None:
        """Give an event to the request's handler, if the handler still waits for events."""
        if isinstance(event, Computed) and key in self._queued_tokens:
            self._queued_tokens[key] = max(0, self._queued_tokens[key] - event.length)
        if stream := self._streams.get(key):
            stream.put(event)

    def remove(self, key: Key) -> None:
        self._streams.pop(key, None)
        self._queued_tokens.pop(key, None)
        self._requests.pop(key, None)


class Reporter:
    """The part of one request's report that has not been sent yet."""

    def __init__(self) -> None:
        self.effort = RequestStats()
        """Totals of decoding, which the engine counts. They continue after a preemption."""
        self._preemptions = 0
        self._report = worker_pb2.Report()
        self._has_news = False
        """Whether there is something to report besides totals."""
        self._told = time.monotonic()

    def note(self, events: Iterable[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, Computed):
                self._report.chunks.add(first=event.first, tokens=event.length, step_ms=event.seconds * 1000)
                self._has_news = True
            self._preemptions += isinstance(event, Preempted)

    def adopted(self, blocks: int, bytes_moved: int, path: str, seconds: float) -> None:
        """Note that the blocks of the prompt belong to this worker, `seconds` after the gateway's handoff came."""
        self._report.adopted.blocks, self._report.adopted.bytes_moved = blocks, bytes_moved
        self._report.adopted.path, self._report.adopted.adopt_ms = path, seconds * 1000
        self._has_news = True

    @property
    def is_due(self) -> bool:
        """Whether there is news, or no totals were reported for EFFORT_SECONDS."""
        return self._has_news or time.monotonic() - self._told >= EFFORT_SECONDS

    def take(self, last: bool = False) -> worker_pb2.Report | None:
        """Return the next report; None if there is nothing to report. The `last` report always has the totals."""
        now = time.monotonic()
        if last or (self.effort.steps and now - self._told >= EFFORT_SECONDS):
            effort, self._told = self.effort, now
            self._report.effort.CopyFrom(
                worker_pb2.Effort(
                    steps=effort.steps,
                    drafts=effort.drafts,
                    draft_tokens=effort.draft_tokens,
                    accepted_tokens=effort.accepted_tokens,
                    preemptions=self._preemptions,
                )
            )
            self._has_news = True
        if not self._has_news:
            return None
        if self._report.HasField("adopted") and self.effort.device_blocks:
            self._report.adopted.path = DEVICE
        report, self._report, self._has_news = self._report, worker_pb2.Report(), False
        return report


def count_blocks(layout: KVLayout, reservation: Reservation, tokens: int) -> int:
    """Return the number of blocks of a lease that the first `tokens` tokens occupy."""
    tables = zip(layout.groups, reservation.tables)
    return sum(slot != NO_SLOT for group, table in tables for slot in table[: group.blocks_for(tokens)])
