"""The time that a worker takes to read adapters: totals for metrics, and what the next one is expected to take."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.metrics import Family, Sample

LOADS = Family("lora_loads", "Adapters that a worker has read into memory")
LOAD_SECONDS = Family("lora_load_seconds", "Time in which a worker has read adapters, in seconds")

_NEWEST = 8
"""Number of readings over which the expected time is about the mean, because adapters differ in size."""


class AdapterTimes:
    """The times of all readings of one worker."""

    def __init__(self) -> None:
        self.expected = 0.0
        """Expected time to read an adapter, in seconds; 0 before the first reading."""
        self._loads = 0
        self._seconds = 0.0

    def note(self, seconds: float) -> None:
        """Note the time of a reading that succeeded, without the time for which it waited."""
        self._loads += 1
        self._seconds += seconds
        self.expected += (seconds - self.expected) / min(self._loads, _NEWEST)

    def samples(self) -> Iterator[Sample]:
        """Yield the totals for metrics."""
        yield Sample("lora_loads", self._loads, LOADS)
        yield Sample("lora_load_seconds", self._seconds, LOAD_SECONDS)
