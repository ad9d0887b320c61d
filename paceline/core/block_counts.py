"""Counts of a memory's slots for KV blocks by their state, as a value and as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.core.metrics import Family, Sample

KV_USAGE = Family("kv_cache_usage_perc", "Share of KV blocks that requests use, from 0 to 1", "gauge")


class Counts(NamedTuple):
    """Numbers of slots by state. Each slot has one state: free + held + in_flight + cached == total."""

    total: int
    free: int
    held: int
    """Slots with references only from leases that are not in flight."""
    in_flight: int
    """Slots referenced by a lease that is changing hands, or by an ended lease that a worker may still touch."""
    cached: int
    """Slots of sealed, unreferenced blocks. A request may reuse such a block; it is evicted when room is needed."""

    def samples(self) -> Iterator[Sample]:
        """Yield one sample for each count, then one for the share of slots that requests use, from 0 to 1."""
        for name, count in self._asdict().items():
            yield Sample(f"blocks_{name}", count)
        if self.total:
            yield Sample("", (self.held + self.in_flight) / self.total, KV_USAGE)
