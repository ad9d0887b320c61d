"""Registries of the requests that run now, by the ids that clients know, and of the attempts that run now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paceline.core.numerics import may_differ
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.routing.candidates import Need
from paceline.services.gateway.sequences.attempt import AnyAttempt
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.sequence import SequenceRun


class RunningRequests:
    """The running requests of one gateway. Several requests may have the same id, because clients choose ids."""

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
        for owner, abort in self._running.get(request_id, ()):
            if may_end(owner):
                abort()


class RunningAttempts:
    """All attempts that have been started and not discarded, each with its sequence."""

    def __init__(self) -> None:
        self._sequences: dict[AnyAttempt, SequenceRun] = {}

    def add(self, attempt: AnyAttempt, sequence: SequenceRun) -> None:
        """Keep an attempt that is about to ask its workers."""
        self._sequences[attempt] = sequence

    def discard(self, attempt: AnyAttempt) -> None:
        """End the calls of an attempt, and forget it."""
        self._sequences.pop(attempt, None)
        attempt.close()

    def close(self) -> None:
        """End the calls of all attempts. Each attempt then fails in the task that runs it, which also discards it."""
        for attempt in list(self._sequences):
            attempt.close()

    def leave_draining_workers(self, fleet: Fleet) -> None:
        """Move sequences from draining decode workers to other workers, as many as the other workers have room for.

        A sequence stays if only workers with other numerics or weights have room, because its tokens might change.
        """
        draining = [
            (attempt, sequence, worker.member)
            for attempt, sequence in self._sequences.items()
            if (worker := attempt.decode) is not None and worker.member.state == "draining"
        ]
        if not draining:
            return
        snapshot = fleet.snapshot()
        room = sum(
            max(0, candidate.member.max_seqs - candidate.in_flight)
            for candidate in snapshot
            if candidate.member.role == "decode" and candidate.member.state == "ready"
        )
        for attempt, sequence, member in draining[:room]:
            need = Need(
                sequence.prompt.context_tokens,
                len(sequence.context.token_ids),
                decoded_with=member.numerics,
                weights=member.weights,
            )
            place = KINDS[sequence.plan.kind].place(need, snapshot)
            decode = None if place is None else place.decode
            if decode is not None and not may_differ(member.numerics, decode.numerics):
                attempt.leave()
