"""Load shedding: decides which requests to refuse because they would wait too long, and when they should come back.

Pure logic: all instants are of one clock, in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.services.gateway.http.errors import NoRoomError, Reason, retry_after
from paceline.services.gateway.queueing.fair_order import Demand, E, Expected, FairOrder, Lane, WaitingEntry
from paceline.services.gateway.queueing.forecast import AdmissionRate, FirstTokens

EARLY_SECONDS = 0.5
"""A request that comes back at most this many seconds before its promised time counts as in time."""
LATE = 0.25
LATE_SECONDS = 3.0
"""A promise ends if the request has not come back LATE_SECONDS after the promised instant. If the share LATE of the
told delay is longer than that, it ends later."""
MOST_PROMISES = 10_000
SHARE_OF = 32
"""Number of recent promises over which the share of kept promises is averaged."""

SPARE = 0.25
"""A request may join the queue if the requests that wait now delay it by at most this share of its longest wait, even
if promised requests would delay it too long: they may not come back."""
PACE = 0.75
"""Share of the measured rate that is promised to clients that come back. New requests use the rest of the rate."""
LONGEST_PROMISE = 300.0
"""Longest delay of a promise, in seconds. A client that is told to come back later gets no promise."""


@dataclass(slots=True, eq=False)
class Promise:
    """The promise to a refused request that it may come back at the instant `due`."""

    lane: Lane
    weight: float
    work: float
    due: float
    ends: float
    """Instant after which the request is not expected any more."""
    fingerprint: int
    """A hash of the request, by which it is recognised when it comes back."""
    ticket: int
    """Ticket of the request's first arrival. The request keeps this place when it comes back."""
    is_open: bool = field(default=True)


class Promises:
    """Promises to all refused requests that were told when to come back.

    A refused request keeps a place in a virtual queue until the time at which its client was told to return. Requests
    that are refused later are told to return after that time. So returning requests are spread over time, and a client
    that returns at its time finds room. Not all clients return, so only a share of the promised work is expected: the
    share that has returned lately.
    """

    def __init__(self) -> None:
        self._by_fingerprint: defaultdict[int, deque[Promise]] = defaultdict(deque)
        self._by_end: list[tuple[float, int, Promise]] = []
        self._numbers = itertools.count()
        self._promised: dict[Lane, Expected] = {}
        """Total work of the open promises of each lane."""
        self.kept = 0.5
        """Share of promised requests that came back lately; the first value is a guess."""

    def __len__(self) -> int:
        return sum(map(len, self._by_fingerprint.values()))

    def add(self, entry: WaitingEntry, fingerprint: int, now: float, seconds: float) -> None:
        """Promise a request that it may come back after this many seconds."""
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
        """Return how many seconds too early a request comes back, 0 if it is in time; None if it has no promise."""
        self._expire(now)
        promises = self._by_fingerprint.get(fingerprint)
        if not promises:
            return None
        early = promises[0].due - now
        return early if early > EARLY_SECONDS else 0.0

    def keep(self, fingerprint: int) -> int | None:
        """End the oldest promise for a request, because the request has come back and may wait.

        Returns the ticket of the request's first arrival; None if there is no promise.
        """
        promises = self._by_fingerprint.get(fingerprint)
        if not promises:
            return None
        ticket = promises[0].ticket
        self._close(promises[0], is_kept=True)
        return ticket

    def expected(self, now: float, share: float | None = None) -> Mapping[Lane, Expected]:
        """Return the work that is expected to come back, by lane.

        Args:
            share: share of the promised requests that come back; None for `kept`, the share of recent promises.
        """
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


class WaitLimit(NamedTuple):
    """Longest time that a request may wait for its admission from now on, and the reason to refuse it after that."""

    seconds: float
    reason: Reason


class LoadShedder:
    """Forecasts the waiting time of requests, and refuses requests that would wait too long.

    Args:
        queue_seconds: longest wait of a request, for a ready worker and in the queue together, in seconds.
    """

    def __init__(self, queue_seconds: float) -> None:
        self.rate = AdmissionRate()
        self.first_tokens = FirstTokens()
        self._promises = Promises()
        self._queue_seconds = queue_seconds

    def wait_limit(self, demand: Demand, now: float) -> WaitLimit:
        """Return the longest time that a request may wait from now on. It must have just joined the queue."""
        limits = [WaitLimit(self._queue_seconds - demand.waited, "timeout")]
        served = self.first_tokens.seconds(demand.prompt_seconds, demand.percentile, now)
        if demand.first_token_by is not None:
            limits.append(WaitLimit(demand.first_token_by - served - now, "overload"))
        if demand.deadline is not None:
            limits.append(WaitLimit(demand.deadline - served - now, "deadline"))
        return min(limits)

    def wait(self, order: FairOrder[E], entry: E, now: float, share: float | None = None) -> float | None:
        """Return the forecast wait of a request in seconds; None if too little has been measured.

        Args:
            entry: the request, which may be in the queue or not.
            share: share of the promised requests that come back before this one is served; None for the usual share.
        """
        rate = self.rate.per_second(now)
        if rate is None:
            return None
        ahead = order.ahead(entry, self._promises.expected(now, share))
        return ahead / rate if rate > 0 else (self._queue_seconds if ahead else 0.0)

    def check(self, order: FairOrder[E], entry: E, demand: Demand, now: float) -> None:
        """Raise RefusedError if a request that has to wait would wait too long.

        A request without an objective and without a deadline may wait for `queue_seconds`, whatever the forecast says.
        A request that comes back at its promised time is not refused, and gets its first arrival's place among its
        owner's requests.
        """
        early = self._promises.early(demand.fingerprint, now)
        wait_limit = self.wait_limit(demand, now)
        if early != 0 and self._is_too_long(order, entry, wait_limit, now):
            if early is None:
                raise self.refusal(order, entry, demand, wait_limit, now)
            seconds = retry_after(early)
            message = f"{self._why(wait_limit.reason)}; try again in {seconds} s, and not earlier"
            raise NoRoomError(message, wait_limit.reason, seconds)
        if (ticket := self._promises.keep(demand.fingerprint)) is not None:
            entry.ticket = ticket

    def _is_too_long(self, order: FairOrder[E], entry: E, wait_limit: WaitLimit, now: float) -> bool:
        most, reason = wait_limit
        if reason == "timeout":
            return False  # nothing is lost if it waits, and the forecast may be wrong
        if most <= 0:
            return True
        wait, present = self.wait(order, entry, now), self.wait(order, entry, now, 0.0)
        if wait is None or present is None:
            return False
        # A short queue takes requests although others are expected, because they may not come.
        return wait > most and present > SPARE * most

    def is_late(self, order: FairOrder[E], entry: E, gives_up: float, now: float) -> bool:
        """Return whether a waiting request is forecast to be admitted only after the instant `gives_up`."""
        wait = self.wait(order, entry, now)
        return wait is not None and now + wait > gives_up

    def refusal(self, order: FairOrder[E], entry: E, demand: Demand, wait_limit: WaitLimit, now: float) -> NoRoomError:
        """Return the error for a request that is refused now, and promise the request a time to come back."""
        # More than the usual share, because requests do not come back evenly.
        wait = (self.wait(order, entry, now, math.sqrt(self._promises.kept)) or 0.0) / PACE
        # It comes back when half of the time that it may wait is left, so that the queue does not run empty before.
        earliest = max(0.0, wait - max(0.0, wait_limit.seconds) / 2)
        seconds = retry_after(earliest)
        if earliest <= LONGEST_PROMISE:
            self._promises.add(entry, demand.fingerprint, now, seconds)
        expected = f" (it would wait {wait:.1f} s)" if wait else ""
        return NoRoomError(
            f"{self._why(wait_limit.reason)}{expected}; try again in {seconds} s", wait_limit.reason, seconds
        )

    def _why(self, reason: Reason) -> str:
        match reason:
            case "queue_full":
                return "the server is busy and its queue is full"
            case "priority":
                return "the server is busy with more urgent requests"
            case "timeout":
                return f"the server is busy: no worker had room within {self._queue_seconds:g} seconds"
            case "deadline":
                return "the server is busy: the first token would come after the deadline of this request"
            case _:
                return "the server is overloaded: the first token would come later than the objective of this request"
