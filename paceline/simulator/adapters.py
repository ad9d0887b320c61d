"""The adapters in the memory of a simulated worker, as `services/worker/adapters.py` keeps them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.proto.fleet_pb2 import AdapterReport
from paceline.simulator.sequence import Sequence as Request


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """The options of workers about adapters."""

    max_cpu_loras: int = 32
    """Largest number of adapters in a worker's memory."""
    seconds: float = 0.1
    """Time to read an adapter, in seconds."""


DEFAULT = AdapterOptions()


class SimulatedAdapters:
    """The adapters of one worker. Those that were used longest ago, and that no sequence needs, make room."""

    def __init__(self, options: AdapterOptions) -> None:
        self._options = options
        self._ready: dict[int, float] = {}
        """Instant at which each adapter is in memory; the adapter that was used longest ago comes first."""
        self._needed: dict[Request, int] = {}
        self.loads = 0

    def hold(self, sequence: Request, now: float) -> float:
        """Keep a sequence's adapter in memory until `let_go`. Return the instant at which the worker has it; infinite
        if sequences need all places, so that the worker refuses this one.
        """
        adapter = sequence.adapter
        if not adapter:
            return now
        ready = self._ready.pop(adapter, None)
        if ready is None:
            if not self._make_room(now):
                return math.inf
            # One is read after the other.
            ready = max([now, *self._ready.values()]) + self._options.seconds
            self.loads += 1
        self._ready[adapter] = ready
        self._needed[sequence] = adapter
        return max(now, ready)

    def let_go(self, sequence: Request) -> None:
        """Note that a sequence does not need its adapter any more. Does nothing if it did not need one."""
        self._needed.pop(sequence, None)

    def _make_room(self, now: float) -> bool:
        if len(self._ready) < self._options.max_cpu_loras:
            return True
        needed = set(self._needed.values())
        unused = next((each for each, ready in self._ready.items() if each not in needed and ready <= now), None)
        if unused is None:
            return False
        del self._ready[unused]
        return True

    def report(self) -> AdapterReport:
        """Return what the worker's heartbeats report."""
        return AdapterReport(digests=sorted(self._ready), miss_seconds=self._options.seconds if self._ready else 0.0)


def hold_all(workers: Sequence[SimulatedAdapters], request: Request, now: float) -> int | None:
    """Let the workers of an attempt read its adapter, one after the other, and note when all have it.

    Returns the index of a worker that refuses; None if none does.
    """
    for index, worker in enumerate(workers):
        now = worker.hold(request, now)
        if now == math.inf:
            for each in workers[:index]:
                each.let_go(request)
            return index
    request.adapters_at = now
    return None
