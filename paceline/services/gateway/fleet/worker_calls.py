"""One gateway's own counts of the calls to a worker, which complete the load that the worker has reported."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.registry import HEARTBEAT_SECONDS, Member
from paceline.services.gateway.routing.candidates import Candidate

FIGURES_SECONDS = 3 * HEARTBEAT_SECONDS
"""Reported figures older than this are ignored, in seconds."""
RECENT_SECONDS = 10.0
"""Half-life of the recently sent tokens, in seconds."""


class Begun(NamedTuple):
    """Totals of what this gateway has sent to a worker."""

    calls: int
    tokens: int
    """Prompt tokens that the worker has to compute."""


class DecayingSum:
    """A sum that is halved every `half_life` seconds. All times that it is given are of one clock, in seconds."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._value = 0.0
        self._at = 0.0

    def value(self, now: float) -> float:
        return float(self._value * 0.5 ** ((now - self._at) / self._half_life))

    def add(self, part: float, now: float) -> None:
        self._value, self._at = self.value(now) + part, now


class WorkerCalls:
    """A worker's newest figures, and this gateway's counts of its calls to the worker.

    Args:
        clock: the time in seconds.
        on_change: called when a candidate that was made before is out of date.
    """

    def __init__(
        self,
        member: Member,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.member = member
        self._on_change = on_change
        self.in_flight = 0
        self.encodings = 0
        """Calls for encodings. They take none of the places for requests, so they are not in `in_flight`."""
        self._clock = clock
        self._prompts: Counter[int] = Counter()
        """Number of the prompts in flight whose computation has not ended, by their tokens."""
        self._tokens_in_flight = 0
        """Prompt tokens of calls in flight that the worker has not computed yet."""
        self._begun = Begun(0, 0)
        """Totals since this gateway first saw the member."""
        self._begun_at_updates = (self._begun, self._begun)
        """The totals at the last two updates of the member's figures, the older one first."""
        self._in_flight_at_updates = (0, 0)
        """Tokens in flight at the same two updates."""
        self._recent = DecayingSum(RECENT_SECONDS)
        self._current_at = clock()
        """When the member's figures were last known to be current."""
        self._is_current = True
        """Whether they were at the last look."""

    @property
    def unreported(self) -> int:
        """Calls in flight that the member's figures may not contain yet: calls begun since the last update but one."""
        return min(self.in_flight, self._begun.calls - self._begun_at_updates[0].calls)

    def candidate(self, fetch_tokens_per_second: float) -> Candidate:
        """Return this worker for the router. If its figures are old, for example because Redis is down, its load is
        what this gateway has in flight on it.

        Args:
            fetch_tokens_per_second: measured rate at which its host fetches blocks from other hosts; 0 if unknown.
        """
        now = self._clock()
        reports = now - self._current_at < FIGURES_SECONDS
        member = self.member if reports else dataclasses.replace(self.member, load=self._own_load())
        return Candidate(
            member,
            self.in_flight,
            unreported=self.unreported if reports else 0,
            unreported_tokens=self._unreported_tokens() if reports else 0,
            recent_tokens=self._recent.value(now),
            prompts=tuple(self._prompts.elements()),
            fetch_tokens_per_second=fetch_tokens_per_second,
            encodings=self.encodings,
        )

    def _own_load(self) -> LoadReport:
        speed = self.member.load.prefill_tokens_per_second
        return LoadReport(running=self.in_flight, queued_tokens=self._tokens_in_flight, prefill_tokens_per_second=speed)

    def _unreported_tokens(self) -> float:
        """Return tokens that this gateway has sent and the member's figures may not contain yet, minus tokens that the
        member has computed since its report. Can be negative."""
        reported = self.member.load.queued_tokens
        ours = min(reported, max(self._in_flight_at_updates))  # the rest came from other gateways
        begun = self._begun.tokens - self._begun_at_updates[0].tokens
        return min(self._tokens_in_flight, ours + begun) - ours

    def update(self, member: Member) -> None:
        """Use new figures, which the member wrote at some time since the last update."""
        if self.member.state == "draining":  # this heartbeat may have been written before the drain began
            member = dataclasses.replace(member, state="draining")
        self.member = member
        self._in_flight_at_updates = (self._in_flight_at_updates[1], self._tokens_in_flight)
        self._begun_at_updates = (self._begun_at_updates[1], self._begun)
        self._on_change()

    def note_current(self) -> None:
        """Note that the member's figures are current."""
        self._current_at = self._clock()
        self.look()

    def look(self) -> None:
        """Notice figures that have become old, or current again. To be called from time to time."""
        is_current = self._clock() - self._current_at < FIGURES_SECONDS
        if is_current != self._is_current:
            self._is_current = is_current
            self._on_change()

    def note_draining(self) -> None:
        """Note that the member drains, before its figures say so."""
        self.member = dataclasses.replace(self.member, state="draining")
        self._on_change()

    def begin_call(self, tokens: int) -> None:
        self.in_flight += 1
        self._prompts[tokens] += 1
        self._tokens_in_flight += tokens
        self._begun = Begun(self._begun.calls + 1, self._begun.tokens + tokens)
        self._recent.add(tokens, self._clock())
        self._on_change()

    def computed(self, tokens: int) -> None:
        """Subtract the prompt tokens of a running call, which are computed."""
        self._prompts[tokens] -= 1
        self._prompts = +self._prompts
        self._tokens_in_flight -= tokens
        self._on_change()

    def end_call(self) -> None:
        self.in_flight -= 1
        self._on_change()

    def begin_encoding(self) -> None:
        self.encodings += 1
        self._on_change()

    def end_encoding(self) -> None:
        self.encodings -= 1
        self._on_change()
