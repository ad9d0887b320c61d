"""The members of a cluster as one gateway knows them: found in Redis, and checked if Redis is not conclusive."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from redis.asyncio import Redis

from paceline.core.model_folder import ModelFiles
from paceline.proto.fleet_pb2 import HostReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_feed import MemberFeed, News
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import Member
from paceline.services.common.wire_version import mismatch
from paceline.services.gateway.fleet.health_checks import HealthChecks
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

MEASURED_BYTES = 16 << 20
"""Number of bytes that a host must have fetched before its fetch rate counts as measured."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Facts about the whole fleet. Only workers with the gateway's model count."""

    max_model_len: int
    """Longest context in tokens that a ready decode worker accepts, even if it is set aside; 0 if none is ready."""
    max_computing_len: int
    """Longest context in tokens for work that needs no decoding: that of pool or prefill workers, or of decode workers
    if there is none of these."""
    has_computing_worker: bool
    """Whether a pool or prefill worker is ready and not set aside."""
    computing_workers: int
    """Number of workers that are ready and not set aside, of the role that computes work without decoding."""
    has_decode_worker: bool
    """Whether a decode worker is ready and not set aside."""
    has_planner: bool
    """Whether a planner is running that scales this fleet, or that only shows how it would."""
    may_be_empty: bool
    """Whether a planner scales this fleet that may stop all decode or pool workers. It starts some when requests
    come."""
    has_sleeping_worker: bool = False
    """Whether a worker sleeps that can decode or compute when it wakes."""

    @staticmethod
    def of(members: Iterable[RemoteWorker], model: str) -> FleetSummary:
        """Return the facts about these members.

        Args:
            model: the digest of the gateway's model.
        """
        longest = {"prefill": 0, "decode": 0, "pool": 0}
        available: Counter[str] = Counter()
        has_planner = may_be_empty = sleeps = False
        for worker in members:
            member = worker.member
            if serves(worker, model):
                longest[member.role] = max(longest[member.role], member.max_model_len)
                if worker.available:
                    available[member.role] += 1
            elif member.state == "sleeping" and member.role in longest and member.model == model:
                sleeps |= worker.available
            elif member.role == "planner" and worker.available:
                has_planner, plan = True, member.plan
                may_be_empty |= (
                    plan.leads and not plan.advisory and not {"decode", "pool"}.isdisjoint(plan.may_be_empty)
                )
        return FleetSummary(
            max_model_len=longest["decode"],
            max_computing_len=longest["pool"] or longest["prefill"] or longest["decode"],
            has_computing_worker=bool(available["pool"] or available["prefill"]),
            computing_workers=available["pool"] or available["prefill"] or available["decode"],
            has_decode_worker="decode" in available,
            has_planner=has_planner,
            may_be_empty=may_be_empty,
            has_sleeping_worker=sleeps,
        )


def serves(worker: RemoteWorker, model: str) -> bool:
    """Return whether a member is a ready prefill, decode or pool worker of a model, and not shut out.

    Args:
        model: digest of the model.
    """
    member = worker.member
    has_role = member.role == "decode" or member.role == "prefill" or member.role == "pool"
    return has_role and member.model == model and member.state == "ready" and not worker.is_shut_out


def facts_of(member: Member) -> tuple[object, ...]:
    """Return the parts of a member's heartbeat that the summary depends on, to notice changes."""
    return member.state, member.max_model_len, member.plan if member.role == "planner" else None


class Members:
    """All members that are not known to be gone.

    Args:
        model: the gateway's model, for the log.
        on_figures: called with a worker if its figures for placements may have changed.
        on_standing: called with a worker if it may be used in other ways than before, or is gone.
        on_failure: called before a worker that was in use is set aside or replaced.
    """

    def __init__(
        self,
        redis: Redis,
        cluster: str,
        model: ModelFiles,
        credentials: Credentials,
        signatures: MemberSignatures,
        *,
        on_figures: Callable[[RemoteWorker], object],
        on_standing: Callable[[RemoteWorker], object],
        on_failure: Callable[[RemoteWorker], object],
    ) -> None:
        self.workers: dict[str, RemoteWorker] = {}
        """All members except gateways, by name."""
        self.hosts: dict[str, RemoteWorker] = {}
        """The kvtransfer services among these members, by name."""
        self.gateways: dict[str, Member] = {}
        self._model = model
        self._credentials = credentials
        self._on_figures, self._on_standing, self._on_failure = on_figures, on_standing, on_failure
        self._feed = MemberFeed(redis, cluster, signatures)
        self._checks = HealthChecks(on_failure, on_standing, self._remove)
        self._fetch_speeds: dict[str, float] = {}
        self._with_new_speed: set[str] = set()
        """Ids of hosts whose fetch rate has changed since the last call of `look`."""

    async def close(self) -> None:
        await self._checks.close()

    async def read(self, then: Callable[[], object]) -> None:
        """Read the news of members from Redis. Call `then` after each part of the news.

        Raises RedisError, OSError or TimeoutError if Redis does not answer.
        """

        def take(news: News) -> None:
            self._take(news)
            then()

        await self._feed.read(take)

    def look(self) -> None:
        """Notice changes that come with time alone, such as old figures, and send the health checks that are due."""
        moved, self._with_new_speed = self._with_new_speed, set()
        for worker in self.workers.values():
            worker.look()
            if worker.member.host_id in moved:
                self._on_figures(worker)
            self._checks.look(worker)

    def set_aside(self, worker: RemoteWorker) -> None:
        """Give a worker no new work until a health check succeeds."""
        self._checks.set_aside(worker)

    def fetch_speed(self, host_id: str) -> float:
        """Return the rate at which a host fetches blocks from other hosts, in tokens per second; 0 if not measured."""
        return self._fetch_speeds.get(host_id, 0.0)

    def _take(self, news: News) -> None:
        for member in news.changed:
            if member.role == "gateway":
                self.gateways[member.worker_id] = member
            else:
                self._note(member)
        for name in news.heard:
            if (worker := self.workers.get(name)) is not None:
                worker.note_listed(True)
        for name in news.unlisted:
            if (worker := self.workers.get(name)) is not None:
                worker.note_listed(False)
            elif self.gateways.pop(name, None) is not None:
                self._feed.forget(name)

    def _note(self, member: Member) -> None:
        """Take a member's newest value. The member may be new, or a new process with the name of an earlier one."""
        worker = self.workers.get(member.worker_id)
        if worker is None:
            self._join(member)
        elif (member.epoch, member.address) == (worker.member.epoch, worker.member.address):
            before = facts_of(worker.member)
            worker.update(member)
            if facts_of(worker.member) != before:
                if worker.member.state == "draining":
                    log.info("%s %s drains", member.role, member.worker_id)
                self._on_standing(worker)
        elif member.epoch >= worker.member.epoch:
            if worker.member.state != "draining" and not worker.set_aside:
                self._on_failure(worker)
            self._drop(worker)
            self._join(member)
        else:
            return  # a late heartbeat of a process that has ended
        if member.role == "kvtransfer" and (speed := _fetch_speed(member.host)) != self.fetch_speed(member.host_id):
            self._fetch_speeds[member.host_id] = speed
            self._with_new_speed.add(member.host_id)

    def _join(self, member: Member) -> None:
        self.workers[member.worker_id] = worker = RemoteWorker(member, self._credentials, self._on_figures)
        if member.role == "kvtransfer":
            self.hosts[member.worker_id] = worker
        log.info("%s %s joined at %s", member.role, member.worker_id, member.address)
        if problem := mismatch(str(worker), member.wire):
            log.error("%s gets no calls: %s", worker, problem)
        elif member.role in ("prefill", "decode", "encode", "pool") and member.model != self._model.digest:
            why = f"{self._model.difference(member.files)} of its model differ from this gateway's"
            log.warning("%s %s gets no requests: %s", member.role, member.worker_id, why)
        self._on_standing(worker)
        self._checks.begin(worker)

    def _remove(self, worker: RemoteWorker) -> None:
        """Remove a member that has ended."""
        self._feed.forget(worker.member.worker_id)
        del self.workers[worker.member.worker_id]
        self._drop(worker)

    def _drop(self, worker: RemoteWorker) -> None:
        name, host_id = worker.member.worker_id, worker.member.host_id
        if self.hosts.get(name) is worker:
            del self.hosts[name]
            self._fetch_speeds.pop(host_id, None)
            self._with_new_speed.add(host_id)
        worker.gone = True
        self._on_standing(worker)


def _fetch_speed(report: HostReport) -> float:
    """Return the rate at which a host fetches blocks, in tokens per second; 0 if it has fetched too little."""
    moved, seconds, token = report.fetched_bytes, report.fetch_seconds, report.token_bytes
    return moved / token / seconds if moved >= MEASURED_BYTES and seconds > 0 and token > 0 else 0.0


MEMBERS_KEPT = 1000
"""Largest number of members whose last end is remembered."""


class Ends:
    """The instant at which each member last ended or stopped answering, on time.monotonic()."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        """Instants of the last ends, by the member's id; the oldest comes first."""

    def note(self, worker_id: str) -> None:
        """Record that a member has ended, or does not answer."""
        self._ended.pop(worker_id, None)
        self._ended[worker_id] = time.monotonic()
        if len(self._ended) > MEMBERS_KEPT:
            del self._ended[next(iter(self._ended))]

    def any_since(self, instant: float, others_than: Collection[str]) -> bool:
        """Return whether a member has ended after an instant.

        Args:
            others_than: ids of members that do not count.
        """
        return any(at > instant and worker_id not in others_than for worker_id, at in self._ended.items())
