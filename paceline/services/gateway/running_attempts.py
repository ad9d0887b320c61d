"""The attempts of one gateway that have begun and not ended."""

from __future__ import annotations

from paceline.core.numerics import may_differ
from paceline.services.gateway.candidates import Need
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.kinds import KINDS, AnyAttempt
from paceline.services.gateway.sequence import SequenceRun


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
        """End the calls of all attempts. Each one fails in the task that runs it, which discards it."""
        for attempt in list(self._sequences):
            attempt.close()

    def leave_draining_workers(self, fleet: Fleet) -> None:
        """Move sequences from draining decode workers to others, as many as these have room for.

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
                sequence.context_tokens,
                len(sequence.context.token_ids),
                decoded_with=member.numerics,
                weights=member.weights,
            )
            place = KINDS[sequence.kind].place(need, snapshot)
            decode = None if place is None else place.decode
            if decode is not None and not may_differ(member.numerics, decode.numerics):
                attempt.leave()
