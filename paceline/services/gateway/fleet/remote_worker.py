"""One member of the fleet as this gateway knows it: its reported load, and the calls that this gateway has sent it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import grpc.aio

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import HEARTBEAT_SECONDS, Member
from paceline.services.common.rpc import open_channel
from paceline.services.common.wire_version import OURS
from paceline.services.gateway.fleet.event_feed import EventFeed
from paceline.services.gateway.fleet.known_adapters import KnownAdapters
from paceline.services.gateway.routing.candidates import Candidate

FIGURES_SECONDS = 3 * HEARTBEAT_SECONDS
"""Reported figures older than this are ignored, in seconds."""
RECENT_SECONDS = 10.0
"""Half-life of the recently sent tokens, in seconds."""

PROBE_SECONDS = (0.25, 0.75)
"""Shortest and longest delay before a failed worker gets its next health check, in seconds."""
MOST_PROBE_SECONDS = 5.0
"""Longest interval between two health checks of a member that Redis does not list, in seconds. The interval grows while
the member answers."""


class Begun(NamedTuple):
    """Totals of the work that this gateway has sent to a worker."""

    calls: int
    tokens: int
    """Number of prompt tokens that the worker had to compute for these calls."""


class DecayingSum:
    """A sum that decays by half every `half_life` seconds. All instants are of one clock, in seconds."""

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
        clock: function that returns the time in seconds.
        on_change: called when the last candidate that `candidate` returned is out of date.
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
        """Number of calls for encodings. `in_flight` does not include them, because they take no places of requests."""
        self._clock = clock
        self._prompts: Counter[int] = Counter()
        """Number of prompts in flight that the worker has not computed yet, by their length in tokens."""
        self._tokens_in_flight = 0
        """Number of prompt tokens of calls in flight that the worker has not computed yet."""
        self._begun = Begun(0, 0)
        """Totals of calls and tokens since this gateway first saw the member."""
        self._begun_at_updates = (self._begun, self._begun)
        """The totals at the last two updates of the member's figures, the older one first."""
        self._in_flight_at_updates = (0, 0)
        """Values of `_tokens_in_flight` at the same two updates."""
        self._recent = DecayingSum(RECENT_SECONDS)
        self._adapters = KnownAdapters(member.lora.digests)
        self._current_at = clock()
        """Instant at which the member's figures were last known to be current."""
        self._is_current = True
        """Whether the member's figures were current at the last call of `look`."""

    @property
    def unreported(self) -> int:
        """Number of calls in flight that the member's figures may lack: calls begun since its last update but one."""
        return min(self.in_flight, self._begun.calls - self._begun_at_updates[0].calls)

    def candidate(self, fetch_tokens_per_second: float) -> Candidate:
        """Return this worker with its figures, for the router. If the reported figures are old, for example because
        Redis is down, the load is that of this gateway's own calls.

        Args:
            fetch_tokens_per_second: measured rate at which the worker's host fetches from other hosts; 0 if unknown.
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
            adapters=self._adapters.now,
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
        """Replace the member's figures with newer ones, which it wrote since the last update."""
        if self.member.state == "draining":  # this heartbeat may have been written before the drain began
            member = dataclasses.replace(member, state="draining")
        self.member = member
        self._in_flight_at_updates = (self._in_flight_at_updates[1], self._tokens_in_flight)
        self._begun_at_updates = (self._begun_at_updates[1], self._begun)
        self._adapters.update(member.lora.digests)
        self._on_change()

    def note_current(self) -> None:
        """Note that the member's figures are still current, because it has sent a heartbeat without new figures."""
        self._current_at = self._clock()
        self.look()

    def look(self) -> None:
        """Notice that the figures have become old, or are current again. Call this from time to time."""
        is_current = self._clock() - self._current_at < FIGURES_SECONDS
        if is_current != self._is_current:
            self._is_current = is_current
            self._on_change()

    def note_draining(self) -> None:
        """Note that the member drains, before its heartbeat says so."""
        self.member = dataclasses.replace(self.member, state="draining")
        self._on_change()

    def begin_call(self, tokens: int, adapter: int = 0) -> None:
        """Count a call.

        Args:
            tokens: number of prompt tokens that the worker has to compute.
            adapter: the request's adapter, as `core.adapters.short_digest`; 0 for the model alone.
        """
        self.in_flight += 1
        self._adapters.send(adapter)
        self._prompts[tokens] += 1
        self._tokens_in_flight += tokens
        self._begun = Begun(self._begun.calls + 1, self._begun.tokens + tokens)
        self._recent.add(tokens, self._clock())
        self._on_change()

    def computed(self, tokens: int) -> None:
        """Subtract prompt tokens of a running call, because the worker has computed them."""
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


class RemoteWorker(WorkerCalls):
    """A member, the channel to it, and this gateway's own counts of its calls and failures.

    Args:
        on_figures: called if the worker's figures for placements may have changed.
    """

    def __init__(
        self,
        member: Member,
        credentials: Credentials,
        on_figures: Callable[[RemoteWorker], object] = lambda worker: None,
    ) -> None:
        super().__init__(member, on_change=lambda: on_figures(self))
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._feed: EventFeed | None = None
        self.listed = True
        """Whether Redis lists the member now."""
        self.set_aside = False
        """Whether the member gets no new work because it failed and no health check has succeeded since."""
        self.failed_probes = 0
        self.probe: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        """Instant before which the member gets no health check, on time.monotonic()."""
        self.probe_pause = 0.0
        """Time between the last health check and the next one, in seconds; 0 if the last check failed."""
        self.gone = False
        self.refuses_us = False
        """Whether the member refuses our secret. It gets no more calls, because only a restart can change this."""
        self.is_untrusted = False
        """Whether health checks fail because a certificate is not valid, to log this only once."""

    def __str__(self) -> str:
        return f"{self.member.role} worker {self.member.worker_id}"

    @property
    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel to the member. It is opened when first needed, because a large fleet has many members."""
        if self._channel is None:
            self._channel = open_channel(self.member.address, self._credentials)
        return self._channel

    @property
    def feed(self) -> EventFeed:
        """The stream of events from the member to this gateway."""
        if self._feed is None:
            self._feed = EventFeed(self.channel, str(self), self.member.events, self.note_draining)
        return self._feed

    @property
    def is_called(self) -> bool:
        """Whether a call of this gateway runs at the member."""
        return self.in_flight > 0 or self.encodings > 0

    @property
    def is_compatible(self) -> bool:
        """Whether the member and this gateway speak a common version of the protocol."""
        return OURS.overlaps(self.member.wire)

    @property
    def is_shut_out(self) -> bool:
        """Whether the member can get no work before the member or this gateway restarts."""
        return self.refuses_us or not self.is_compatible

    @property
    def available(self) -> bool:
        return not self.set_aside and not self.is_shut_out

    @property
    def state(self) -> str:
        """The member's own state, or the reason why this gateway gives it no work, for operators."""
        if not self.is_compatible:
            return "incompatible"
        return "refuses us" if self.refuses_us else self.member.state if self.available else "unreachable"

    @property
    def is_doubtful(self) -> bool:
        """Whether a health check of the member is due."""
        in_doubt = not self.listed or (self.set_aside and not self.is_shut_out)
        return in_doubt and self.probe is None and time.monotonic() >= self._probe_at

    def update(self, member: Member) -> None:
        super().update(member)
        if self._feed is not None:
            self._feed.socket = member.events  # a worker that was starting did not have it yet

    def note_listed(self, listed: bool) -> None:
        """Record whether Redis lists the member now."""
        if listed:
            self.note_current()
        elif self.listed:
            self._probe_at = self.probe_pause = 0.0
        self.listed = listed

    def note_health(self, serves: bool) -> None:
        """Record the result of a health check, or another failure, which counts like a failed check."""
        if serves:
            # A member that Redis does not list and that answers goes on to do so, as when it has lost Redis.
            self.probe_pause = min(2 * self.probe_pause or PROBE_SECONDS[0], MOST_PROBE_SECONDS)
            self._probe_at = time.monotonic() + self.probe_pause * random.uniform(0.8, 1.2)
        else:
            self.probe_pause = 0.0
            self._probe_at = time.monotonic() + random.uniform(*PROBE_SECONDS)

    async def close(self) -> None:
        """Close the feed of events and the channel."""
        if self._feed is not None:
            await self._feed.close()
        if self._channel is not None:
            await self._channel.close(None)
