"""The requests that run now, by their ids, and a bounded book of the newest requests' traces, in memory."""

from __future__ import annotations

import contextlib
import heapq
import re
from collections import deque
from collections.abc import Callable, Iterator

from paceline.services.common.tasks import InUse
from paceline.services.gateway.sequences.traces import RequestTrace


class RunningRequests:
    """The running requests of one model at one gateway. Several of them may have one id, because clients choose ids."""

    def __init__(self) -> None:
        self._running: dict[str, list[tuple[str, Callable[[], None]]]] = {}
        """The requests with each id: a request's owner, and the function that ends the request."""

    @contextlib.contextmanager
    def running(self, request_id: str, owner: str, abort: Callable[[], None]) -> Iterator[None]:
        """Keep a request in the registry while the context is open, so that `abort` finds it.

        Args:
            owner: the digest of the caller's key; "" if the caller has none.
            abort: function that ends the request; it does nothing if the request has ended.
        """
        own = owner, abort
        requests = self._running.setdefault(request_id, [])
        requests.append(own)
        try:
            yield
        finally:
            requests.remove(own)
            if not requests:
                del self._running[request_id]

    def abort(self, request_id: str, may_end: Callable[[str], bool]) -> None:
        """End all requests with this id whose owner `may_end` accepts. Do nothing if there is no such request."""
        for owner, abort in list(self._running.get(request_id, ())):
            if may_end(owner):
                abort()

    def abort_all(self) -> None:
        """End all requests."""
        for request_id in list(self._running):
            self.abort(request_id, lambda owner: True)


KEPT = 1000
"""Largest number of sequences of ended requests whose traces are kept."""

_CHOICE = re.compile(r"(.+)-(\d{1,9})")

MaySee = Callable[[str], bool]
"""A function that returns whether the caller may see requests of an owner, given the digest of the owner's key."""


class TraceBook:
    """The traces of all running requests, and of the requests that have ended most recently.

    Args:
        kept: largest number of sequences of ended requests whose traces are kept.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._by_id: dict[str, list[RequestTrace]] = {}
        self._ended: deque[RequestTrace] = deque()
        self._sequences = 0
        """Number of sequences of ended requests whose traces are kept now."""
        self.requests = InUse()
        """Requests that run, or whose clients have not received the whole answer yet."""

    def open(self, trace: RequestTrace) -> None:
        self.requests.begin()
        for name in _names(trace):
            self._by_id.setdefault(name, []).append(trace)

    def close(self, trace: RequestTrace) -> None:
        """Record the end of a request. If traces of too many ended requests are kept, forget the oldest of them."""
        trace.end()
        self.requests.end()
        self._ended.append(trace)
        self._sequences += len(trace.traces)
        # Requests are counted, too, because a request without any sequence also takes memory.
        while self._sequences > self._kept or len(self._ended) > self._kept:
            oldest = self._ended.popleft()
            self._sequences -= len(oldest.traces)
            for name in _names(oldest):
                self._by_id[name].remove(oldest)
                if not self._by_id[name]:
                    del self._by_id[name]

    def find(self, name: str, may_see: MaySee = lambda owner: True) -> RequestTrace | None:
        """Return the newest request with this id; None if there is none.

        Args:
            name: the id in the response, our own unique id, or the id that a sequence has at workers.
            may_see: only requests of owners for which it is true are searched, because two owners may use the same id.
        """
        if traces := self._seen(name, may_see):
            return traces[-1]
        if (choice := _CHOICE.fullmatch(name)) is None:
            return None
        own_id, index = choice[1], int(choice[2])
        candidates = (trace for trace in self._seen(own_id, may_see) if trace.own_id == own_id)
        return next((trace for trace in candidates if index < trace.sequences), None)

    def newest(self, most: int) -> list[RequestTrace]:
        """Return the `most` requests that arrived last, the newest first. They may still run."""
        known = {id(trace): trace for traces in self._by_id.values() for trace in traces}
        return heapq.nlargest(most, known.values(), key=lambda trace: trace.arrived)

    def earlier(self, trace: RequestTrace, may_see: MaySee = lambda owner: True) -> list[RequestTrace]:
        """Return older requests to which clients gave the same id, the newest first."""
        traces = self._seen(trace.request_id, may_see)
        return traces[: traces.index(trace)][::-1] if trace in traces else []

    def _seen(self, name: str, may_see: MaySee) -> list[RequestTrace]:
        return [trace for trace in self._by_id.get(name, ()) if may_see(trace.owner)]


def _names(trace: RequestTrace) -> set[str]:
    return {trace.request_id, trace.own_id}
