"""Requests that were refused and told when to come back. Pure logic: all instants are of one clock, in seconds.

A refused request keeps a place in a virtual queue until the time at which its client was told to return. Later requests
are told to come after it. So the times spread by themselves, and a client that returns at its time finds room. Not all
clients return: promised work counts by the share that returned lately.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.services.gateway.queueing.fair_order import Expected, Lane, WaitingEntry

EARLY_SECONDS = 0.5
"""A request that comes back at most this much too early is in time."""
LATE = 0.25
LATE_SECONDS = 3.0
"""A promise ends if nobody has come LATE of the told time, or LATE_SECONDS, after its instant."""
MOST_PROMISES = 10_000
SHARE_OF = 32
"""Number of the latest promises of which the share that was kept is known."""


@dataclass(slots=True, eq=False)
class Promise:
    """A request that may come back at `due`."""

    lane: Lane
    weight: float
    work: float
    due: float
    ends: float
    """Instant after which the request is not expected any more."""
    fingerprint: int
    """A hash of the request, by which it is recognised."""
    ticket: int
    """Order of its first arrival, which it keeps."""
    is_open: bool = field(default=True)


class Promises:
    """All requests that may come back."""

    def __init__(self) -> None:
        self._by_fingerprint: defaultdict[int, deque[Promise]] = defaultdict(deque)
        self._by_end: list[tuple[float, int, Promise]] = []
        self._numbers = itertools.count()
        self._promised: dict[Lane, Expected] = {}
        """All open promises of a lane together."""
        self.kept = 0.5
        """Share of promised requests that came back lately; the first value is a guess."""

    def __len__(self) -> int:
        return sum(map(len, self._by_fingerprint.values()))

    def add(self, entry: WaitingEntry, fingerprint: int, now: float, seconds: float) -> None:
        """Promise a request that it may come back after `seconds`."""
        self._expire(now)
        if len(self._by_end) >= MOST_PROMISES:
            return
        due = now + seconds
        ends = due + max(LATE_SECONDS, LATE * seconds)
        lane = entry.priority, entry.owner
        promise = Promise(lane, entry.weight, entry.work, due, ends, fingerprint, entry.ticket)
        self._by_fingerprint[fingerprint].append(promise)
        heapq.heappush(self._by_end, (promise.ends, next(self._numbers), promise))
        self._change(promise, promise.work)

    def early(self, fingerprint: int, now: float) -> float | None:
        """Return how many seconds too early a request comes back, 0 if it is in time; None if nothing was promised."""
        self._expire(now)
        promises = self._by_fingerprint.get(fingerprint)
        if not promises:
            return None
        early = promises[0].due - now
        return early if early > EARLY_SECONDS else 0.0

    def keep(self, fingerprint: int) -> int | None:
        """End the oldest promise for a request, if there is one, because it has come back and may wait.

        Returns the ticket of its first arrival; None if there is no promise.
        """
        promises = self._by_fingerprint.get(fingerprint)
        if not promises:
            return None
        ticket = promises[0].ticket
        self._close(promises[0], is_kept=True)
        return ticket

    def expected(self, now: float, share: float | None = None) -> Mapping[Lane, Expected]:
        """Return the work that comes back, by lane, if a share of all promised requests does; by default `kept`."""
        self._expire(now)
        share = self.kept if share is None else share
        return (
            {lane: Expected(share * work, weight) for lane, (work, weight) in self._promised.items()} if share else {}
        )

    def _expire(self, now: float) -> None:
        while self._by_end and (self._by_end[0][0] < now or not self._by_end[0][2].is_open):
            _, _, promise = heapq.heappop(self._by_end)
            if promise.is_open:
                self._close(promise, is_kept=False)

    def _close(self, promise: Promise, *, is_kept: bool) -> None:
        promise.is_open = False
        promises = self._by_fingerprint[promise.fingerprint]
        promises.remove(promise)
        if not promises:
            del self._by_fingerprint[promise.fingerprint]
        self._change(promise, -promise.work)
        self.kept += (is_kept - self.kept) / SHARE_OF

    def _change(self, promise: Promise, work: float) -> None:
        total = self._promised.get(promise.lane, Expected(0.0, promise.weight)).work + work
        if total > 1e-6:
            self._promised[promise.lane] = Expected(total, promise.weight)
        else:
            self._promised.pop(promise.lane, None)
