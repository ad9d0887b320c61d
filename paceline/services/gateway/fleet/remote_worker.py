"""One member of the fleet as this gateway knows it: its reported load, and the calls that this gateway has sent it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import grpc.aio

from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member
from paceline.services.common.rpc import open_channel
from paceline.services.common.wire_version import OURS
from paceline.services.gateway.fleet.event_feed import EventFeed
from paceline.services.gateway.fleet.worker_calls import WorkerCalls

PROBE_SECONDS = (0.25, 0.75)
"""The shortest and longest time before a failed worker gets a health check, in seconds."""
MOST_PROBE_SECONDS = 5.0
"""Time between two health checks of a member that Redis does not list and that has answered for a while, in seconds."""


class RemoteWorker(WorkerCalls):
    """A member, the channel to it, and this gateway's own counts of its calls and failures.

    Args:
        on_figures: called if the figures of the worker for placements may have changed.
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
        """Whether it gets no new work because it failed and no health check has succeeded since."""
        self.failed_probes = 0
        self.probe: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        """Before this instant, it gets no health check; on time.monotonic()."""
        self.probe_pause = 0.0
        """Time from its last health check to the next one, in seconds; 0 if the last one failed."""
        self.gone = False
        self.refuses_us = False
        """Whether the member refuses our secret. It gets no more calls, because only a restart can change this."""
        self.is_untrusted = False
        """Whether the last health checks failed because a certificate is not valid. This is logged once."""

    def __str__(self) -> str:
        return f"{self.member.role} worker {self.member.worker_id}"

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the member, which is made when it is needed first: a large fleet has many members."""
        if self._channel is None:
            self._channel = open_channel(self.member.address, self._credentials)
        return self._channel

    @property
    def feed(self) -> EventFeed:
        """The stream of the member's events."""
        if self._feed is None:
            self._feed = EventFeed(self.channel, str(self), self.member.events, self.note_draining)
        return self._feed

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
    def is_doubtful(self) -> bool:
        """Whether a health check is due."""
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
        """Record the result of a health check, or a failure that is as good as one."""
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
