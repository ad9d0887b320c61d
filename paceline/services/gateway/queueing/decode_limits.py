"""The most requests of each decode worker for which the time between tokens stays within objectives. Pure.

A decode step takes longer the more requests it serves, and how much longer depends on the model, the contexts and what
else the machine does. So the limit is found by measuring, as TCP finds its window: it falls by a tenth when too
many gaps between tokens have been long lately, and grows by one after an interval in which it was used and they were
not. All instants are of one clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

INTERVAL_SECONDS = 1.0
LEAST_GAPS = 50
"""An interval lasts at least INTERVAL_SECONDS and has at least LEAST_GAPS gaps."""
MARGIN = 0.9
"""A gap above this part of its objective is long, so that the limit is found before the objective is missed."""
DECREASE = 0.9
CREDIT_INTERVALS = 10
"""Intervals for which allowance that was not used is kept. A single late step makes many gaps long at once."""


@dataclass(slots=True)
class _Worker:
    limit: int | None = None
    """None while no objective has been missed."""
    began: float = 0.0
    gaps: int = 0
    allowance: float = 0.0
    """Number of gaps of the interval that may be long."""
    credit: float = 0.0
    """Number of gaps that might have been long in earlier intervals and were not."""
    long: int = 0
    peak: int = 0
    """Most requests that the worker had in the interval."""


class DecodeLimits:
    """The limits of all decode workers, by their ids."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def limited(self) -> list[str]:
        """Return the workers that have a limit."""
        return [worker_id for worker_id, worker in self._workers.items() if worker.limit is not None]

    def has_room(self, worker_id: str, running: int) -> bool:
        """Return whether a worker that has `running` requests may get another one."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.limit is None:
            return True
        worker.peak = max(worker.peak, min(running, worker.limit))
        return running < worker.limit

    def note(
        self,
        worker_id: str,
        running: int,
        gap: float,
        objective: float,
        percentile: float,
        now: float,
        times: int = 1,
    ) -> None:
        """Count times between two messages with tokens of a request.

        Args:
            running: requests that the worker has now.
            gap: seconds.
            objective: seconds that a share `percentile` of the request's gaps may take at most.
            times: number of gaps that took so long.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(began=now)
        worker.gaps += times
        worker.allowance += times * (1 - percentile)
        worker.long += times * (gap > MARGIN * objective)
        worker.peak = max(worker.peak, running)
        if worker.gaps >= LEAST_GAPS and now >= worker.began + INTERVAL_SECONDS:
            self._workers[worker_id] = _after_interval(worker, now)

    def keep(self, worker_ids: Set[str]) -> None:
        """Forget all other workers."""
        self._workers = {worker_id: worker for worker_id, worker in self._workers.items() if worker_id in worker_ids}


def _after_interval(worker: _Worker, now: float) -> _Worker:
    """Return the beginning of the next interval, with its limit."""
    limit, credit = worker.limit, worker.credit + worker.allowance - worker.long
    if credit < 0:
        credit, limit = 0.0, max(1, int(DECREASE * min(worker.peak, limit or worker.peak)))
    elif limit is not None and worker.peak >= limit and worker.long <= worker.allowance:
        limit += 1
    return _Worker(limit, now, credit=min(credit, CREDIT_INTERVALS * worker.allowance))
