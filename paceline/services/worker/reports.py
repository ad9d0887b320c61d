"""What a worker tells of a request's life beside its tokens: for people, and at no cost per token."""

from __future__ import annotations

import time
from collections.abc import Iterable

from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.engine.request import RequestStats
from paceline.engine.step import Computed, Preempted
from paceline.proto import worker_pb2
from paceline.services.worker.event_stream import RequestEvent
from paceline.services.worker.leases import Reservation

EFFORT_SECONDS = 1.0
"""How often totals are told while tokens come. What they come to is told with the end."""

SHARED_MEMORY = "shared memory"
DEVICE = "device"
"""From one worker's pool into another one's."""


class Reporter:
    """What is to be told of one request and has not been yet."""

    def __init__(self) -> None:
        self.effort = RequestStats()
        """What decoding takes; the engine counts it, over preemptions."""
        self._preemptions = 0
        self._report = worker_pb2.Report()
        self._has_news = False
        """Beside totals."""
        self._told = time.monotonic()

    def note(self, events: Iterable[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, Computed):
                self._report.chunks.add(first=event.first, tokens=event.length, step_ms=event.seconds * 1000)
                self._has_news = True
            self._preemptions += isinstance(event, Preempted)

    def adopted(self, blocks: int, bytes_moved: int, path: str, seconds: float) -> None:
        """The blocks of the prompt belong to this worker now; it took so long since the gateway said so."""
        self._report.adopted.blocks, self._report.adopted.bytes_moved = blocks, bytes_moved
        self._report.adopted.path, self._report.adopted.adopt_ms = path, seconds * 1000
        self._has_news = True

    @property
    def is_due(self) -> bool:
        """Whether there are news, or totals that have not been told for long."""
        return self._has_news or time.monotonic() - self._told >= EFFORT_SECONDS

    def take(self, last: bool = False) -> worker_pb2.Report | None:
        """The news, if there are any. With the last word come the totals."""
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
    """Blocks of a lease in which the first `tokens` tokens are."""
    tables = zip(layout.groups, reservation.tables)
    return sum(slot != NO_SLOT for group, table in tables for slot in table[: group.blocks_for(tokens)])
