"""One member of the fleet as this gateway knows it: its reported load, and the calls that this gateway has sent it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import NamedTuple

import grpc.aio

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import HEARTBEAT_SECONDS, Member
from paceline.services.common.rpc import open_channel
from paceline.services.common.wire_version import OURS
from paceline.services.gateway.event_feed import EventFeed
from paceline.services.gateway.router import Candidate

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


class RemoteWorker:
    """A member, the channel to it, and this gateway's own counts of its calls and failures."""

    def __init__(self, member: Member, credentials: Credentials) -> None:
        self.member = member
        self.channel: grpc.aio.Channel = open_channel(member.address, credentials)
        self.feed = EventFeed(self.channel, str(self), member.events)
        self.feed.on_draining = self._note_draining
        self.in_flight = 0
        self.encodings = 0
        """Calls for encodings. They take none of the places for requests, so they are not in `in_flight`."""
        self._tokens_in_flight = 0
        """Prompt tokens of calls in flight that the worker has not computed yet."""
        self._begun = Begun(0, 0)
        """Totals since this gateway first saw the member."""
        self._begun_at_updates = (self._begun, self._begun)
        """The totals at the last two updates of the member's figures, the older one first."""
        self._in_flight_at_updates = (0, 0)
        """Tokens in flight at the same two updates."""
        self._recent = DecayingSum(RECENT_SECONDS)
        self.listed = True
        """Whether Redis lists the member now."""
        self._listed_at = time.monotonic()
        """When Redis last listed the member, on time.monotonic()."""
        self.set_aside = False
        """Whether it gets no new work because it failed and no health check has succeeded since."""
        self.failed_probes = 0
        self.probe: asyncio.Task[None] | None = None
        self.gone = False
        self.refuses_us = False
        """Whether the member refuses our secret. It gets no more calls, because only a restart can change this."""
        self.is_untrusted = False
        """Whether the last health checks failed because a certificate is not valid. This is logged once."""

    def __str__(self) -> str:
        return f"{self.member.role} worker {self.member.worker_id}"

    @property
    def is_called(self) -> bool:
        """Whether a call of this gateway runs there."""
        return self.in_flight > 0 or self.encodings > 0

    @property
    def is_compatible(self) -> bool:
        """Whether the member and this gateway speak a common version of the protocol."""
        return OURS.overlaps(self.member.wire)

    @property
    def is_shut_out(self) -> bool:
        """Whether only a restart of the member or of this gateway can make it useful."""
        return self.refuses_us or not self.is_compatible

    @property
    def available(self) -> bool:
        return not self.set_aside and not self.is_shut_out

    @property
    def state(self) -> str:
        """The member's own state, or why this gateway gives it no work, for operators."""
        if not self.is_compatible:
            return "incompatible"
        return "refuses us" if self.refuses_us else self.member.state if self.available else "unreachable"

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
        now = time.monotonic()
        reports = now - self._listed_at < FIGURES_SECONDS
        speed = self.member.load.prefill_tokens_per_second
        load = LoadReport(running=self.in_flight, queued_tokens=self._tokens_in_flight, prefill_tokens_per_second=speed)
        unreporting = dataclasses.replace(self.member, load=load)
        return Candidate(
            self.member if reports else unreporting,
            self.in_flight,
            unreported=self.unreported if reports else 0,
            unreported_tokens=self._unreported_tokens() if reports else 0,
            recent_tokens=self._recent.value(now),
            fetch_tokens_per_second=fetch_tokens_per_second,
            encodings=self.encodings,
        )

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
        self.feed.socket = member.events  # a worker that was starting did not have it yet
        self._in_flight_at_updates = (self._in_flight_at_updates[1], self._tokens_in_flight)
        self._begun_at_updates = (self._begun_at_updates[1], self._begun)

    def _note_draining(self) -> None:
        self.member = dataclasses.replace(self.member, state="draining")

    def note_listed(self, listed: bool) -> None:
        """Record whether Redis lists the member now."""
        self.listed = listed
        if listed:
            self._listed_at = time.monotonic()

    def begin_call(self, tokens: int) -> None:
        self.in_flight += 1
        self._tokens_in_flight += tokens
        self._begun = Begun(self._begun.calls + 1, self._begun.tokens + tokens)
        self._recent.add(tokens, time.monotonic())

    def computed(self, tokens: int) -> None:
        """Subtract prompt tokens that a running call has computed."""
        self._tokens_in_flight -= tokens

    def end_call(self) -> None:
        self.in_flight -= 1

    async def close(self) -> None:
        """Close the feed of events and the channel."""
        await self.feed.close()
        await self.channel.close(None)
