"""One member of the fleet as this gateway knows it: its reported load, and the calls that this gateway has sent it."""

from __future__ import annotations

import asyncio

import grpc.aio

from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member
from paceline.services.common.rpc import open_channel
from paceline.services.common.wire_version import OURS
from paceline.services.gateway.event_feed import EventFeed
from paceline.services.gateway.worker_calls import WorkerCalls


class RemoteWorker(WorkerCalls):
    """A member, the channel to it, and this gateway's own counts of its calls and failures."""

    def __init__(self, member: Member, credentials: Credentials) -> None:
        super().__init__(member)
        self.channel: grpc.aio.Channel = open_channel(member.address, credentials)
        self.feed = EventFeed(self.channel, str(self), member.events)
        self.feed.on_draining = self.note_draining
        self.listed = True
        """Whether Redis lists the member now."""
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

    def update(self, member: Member) -> None:
        super().update(member)
        self.feed.socket = member.events  # a worker that was starting did not have it yet

    def note_listed(self, listed: bool) -> None:
        """Record whether Redis lists the member now."""
        self.listed = listed
        if listed:
            self.note_current()

    async def close(self) -> None:
        """Close the feed of events and the channel."""
        await self.feed.close()
        await self.channel.close(None)
