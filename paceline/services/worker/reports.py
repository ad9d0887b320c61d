"""A worker's reports about a request: statistics for people, which cost nothing per token."""

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
"""Interval at which totals are reported while tokens come. The last event has the final totals."""

SHARED_MEMORY = "shared memory"
DEVICE = "device"
"""Path of blocks that were copied from another worker's pool on the same device."""


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
