"""The gateway's view of the fleet: read from Redis, and checked by gRPC health checks if Redis leaves doubt.

A new member is found in Redis. A member is dropped only after it fails health checks itself, so a flushed, failing or
restarting Redis removes no worker that still answers. Work in the background is as much as there is news of members;
requests do not look at all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Set
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.proto.fleet_pb2 import HostReport
from paceline.services.common.avoid import Avoided
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_feed import MemberFeed, News
from paceline.services.common.registry import Member
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire_version import mismatch
from paceline.services.gateway.candidate_table import CandidateTable
from paceline.services.gateway.ends import Ends
from paceline.services.gateway.fleet_summary import FleetSummary, facts_of, serves
from paceline.services.gateway.health_checks import HealthChecks
from paceline.services.gateway.remote_worker import RemoteWorker
from paceline.services.gateway.router import Link
from paceline.services.gateway.worker_calls import RECENT_SECONDS

REFRESH_SECONDS = 0.5
LINK_SECONDS = (10.0, 20.0)
"""The shortest and longest time before a failed link between hosts is used again, in seconds."""
MEASURED_BYTES = 16 << 20
"""Bytes that a host must have fetched before its rate counts as measured."""

log = logging.getLogger(__name__)


class Fleet:
    """The members of one cluster, kept up to date from `start` to `close`.

    Args:
        model: the digest of this gateway's model. Workers with another model are shown, but get no requests.
        credentials: what this gateway shows to the members, and wants to see of them.
        return_seconds: time in which a decode worker that failed may come back.
    """

    def __init__(
        self, redis: Redis, cluster: str, model: str, credentials: Credentials, return_seconds: float = 0.0
    ) -> None:
        self._feed = MemberFeed(redis, cluster)
        self.model = model
        self._failed_links: Avoided[Link] = Avoided(LINK_SECONDS)
        self._credentials = credentials
        self._workers: dict[str, RemoteWorker] = {}
        self._hosts: dict[str, RemoteWorker] = {}
        """The kvtransfer services, by host id."""
        self._gateways: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._checks = HealthChecks(self._note_failure, self._note_standing, self._remove)
        self._table = CandidateTable(RECENT_SECONDS, time.monotonic)
        self._changed: set[RemoteWorker] = set()
        """Workers of which the table does not know the newest figures."""
        self._fetch_speeds: dict[str, float] = {}
        self._with_new_speed: set[str] = set()
        """Ids of hosts with a speed that the table does not know."""
        self._summary: FleetSummary | None = None
        """None if it has to be made again."""
        self.ends = Ends()
        self.redis_answers = True
        """Whether Redis has answered the last time."""
        self.on_refresh: Callable[[], object] = lambda: None
        """A function that is called after each refresh."""
        self.has_served = asyncio.Event()
        """Set when a worker is ready for the first time, because the model is then known to load."""
        self._refreshed = asyncio.Event()
        self._longest = 0
        """The longest context of workers that were ready, for a time when none is."""
        self._return_seconds = return_seconds
        self._failed_at = float("-inf")
        """When a ready decode worker failed last, on time.monotonic()."""

    async def start(self) -> None:
        """Read the fleet, so that requests can be placed at once, and go on to refresh it in the background."""
        await self._refresh()
        _spawn(self._run(), self._tasks)

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        await self._checks.close()
        await asyncio.gather(*self._closing, *(worker.close() for worker in self._workers.values()))

    def workers(self) -> list[RemoteWorker]:
        """Return all members that are not known to be gone, sorted by name."""
        return [self._workers[name] for name in sorted(self._workers)]

    def worker_ids(self) -> Set[str]:
        """Return the names of all members that are not known to be gone."""
        return self._workers.keys()

    @property
    def gateways(self) -> list[Member]:
        """The gateways of the cluster that were heard lately, this one included."""
        return list(self._gateways.values())

    def snapshot(self) -> CandidateTable:
        """Return the members of this gateway's model that may get new work, as they are now."""
        changed, self._changed = self._changed, set()
        for worker in changed:
            if not worker.gone and worker.available and worker.member.model == self.model:
                self._table.put(worker.candidate(self._fetch_speeds.get(worker.member.host_id, 0.0)))
            elif self._workers.get(worker.member.worker_id) in (worker, None):
                self._table.remove(worker.member.worker_id)
        return self._table

    def hosts(self) -> list[RemoteWorker]:
        """Return the kvtransfer services that this gateway understands, sorted by name."""
        hosts = (host for host in self._hosts.values() if host.is_compatible)
        return sorted(hosts, key=lambda host: host.member.worker_id)

    def host(self, host_id: str) -> RemoteWorker | None:
        """Return the kvtransfer service of a host; None if it is not known."""
        host = self._hosts.get(host_id)
        return host if host is not None and host.is_compatible else None

    def hosts_of(self, worker_ids: Iterable[str]) -> set[str]:
        """Return the ids of the hosts of workers. Unknown workers are left out."""
        known = (self._workers.get(worker_id) for worker_id in worker_ids)
        return {worker.member.host_id for worker in known if worker is not None}

    def find(self, worker_id: str) -> RemoteWorker | None:
        """Return a worker; None if it is not known."""
        return self._workers.get(worker_id)

    def worker(self, worker_id: str) -> RemoteWorker:
        return self._workers[worker_id]

    @property
    def summary(self) -> FleetSummary:
        """Facts about the whole fleet."""
        if self._summary is None:
            self._summary = FleetSummary.of(self._workers.values(), self.model)
        return self._summary

    def max_model_len(self, decodes: bool = True) -> int:
        """Return the longest context that a worker takes; 0 if no worker is ready and none is expected to be soon.

        Workers set aside count, too. If none is left, the last known length is returned while workers may come back.

        Args:
            decodes: whether the work needs a decode worker. If no prefill worker is ready, all work does.
        """
        found = self.summary.max_model_len if decodes else self.summary.max_computing_len
        if found:
            self._longest = found
        return found or (self._longest if self.may_be_empty or self._may_return else 0)

    @property
    def awaits_first_worker(self) -> bool:
        """Whether no decode worker is ready and a planner starts one for the requests that wait."""
        return self.may_be_empty and not self.has_decode_worker

    @property
    def has_decode_worker(self) -> bool:
        """Whether a decode worker is ready."""
        return self.summary.has_decode_worker

    @property
    def has_planner(self) -> bool:
        """Whether a planner scales this fleet, or shows how it would."""
        return self.summary.has_planner

    @property
    def may_be_empty(self) -> bool:
        """Whether a planner scales this fleet that starts decode workers when requests come, and may leave none."""
        return self.summary.may_be_empty

    @property
    def is_starting(self) -> bool:
        """Whether a worker is loading the model."""
        return self.summary.is_starting

    @property
    def _may_return(self) -> bool:
        """Whether a decode worker that failed lately may come back. One that drained does not."""
        return time.monotonic() < self._failed_at + self._return_seconds

    async def refreshed(self) -> None:
        """Wait until the members have been read again."""
        await self._refreshed.wait()

    def set_aside(self, worker: RemoteWorker) -> None:
        """Give a worker no new work until a health check succeeds; the next one follows within two seconds."""
        self._checks.set_aside(worker)

    def avoid_link(self, link: Link) -> None:
        """Send no blocks over a link between hosts for a while."""
        self._failed_links.add(link)
        log.warning("KV blocks cannot be moved from host %s to host %s; routing avoids this link for a while", *link)

    def failed_links(self) -> frozenset[Link]:
        """Return the links between hosts over which a transfer of blocks failed recently."""
        return self._failed_links.now()

    @contextlib.contextmanager
    def call(self, worker: RemoteWorker, tokens: int = 0) -> Iterator[Callable[[], None]]:
        """Count a call, and keep the worker's channel open until the call ends, even if the member goes meanwhile.

        Yields a function to call when the worker has computed the tokens; the end of the call does so in any case.

        Args:
            tokens: the number of prompt tokens that the worker has to compute.
        """
        worker.begin_call(tokens)
        with contextlib.ExitStack() as ending:
            ending.callback(self._close_when_idle, worker)
            ending.callback(worker.end_call)
            computing = ending.enter_context(contextlib.ExitStack())
            computing.callback(worker.computed, tokens)
            yield computing.close

    @contextlib.contextmanager
    def encode_call(self, worker: RemoteWorker) -> Iterator[None]:
        """Count a call for an encoding, and keep the worker's channel open until the call ends."""
        worker.begin_encoding()
        try:
            yield
        finally:
            worker.end_encoding()
            self._close_when_idle(worker)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS * random.uniform(0.8, 1.2))
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self._feed.read(self._take)
            if not self.redis_answers:
                log.info("Redis answers again")
            self.redis_answers = True
        except (RedisError, OSError, TimeoutError) as error:
            if self.redis_answers:
                log.warning("Redis does not answer (%s); routing uses the last known state", error)
            self.redis_answers = False
        self._look_at_members()
        self.snapshot().settle()  # so that requests find it up to date
        self.on_refresh()
        refreshed, self._refreshed = self._refreshed, asyncio.Event()
        refreshed.set()

    def _look_at_members(self) -> None:
        """Notice what changes with time alone, and send health checks to members that are in doubt."""
        moved, self._with_new_speed = self._with_new_speed, set()
        for worker in self._workers.values():
            worker.look()
            if worker.member.host_id in moved:
                self._changed.add(worker)
            self._checks.look(worker)

    # ---- news of members

    def _take(self, news: News) -> None:
        for member in news.changed:
            if member.role == "gateway":
                self._gateways[member.worker_id] = member
            else:
                self._note(member)
        for name in news.heard:
            if (worker := self._workers.get(name)) is not None:
                worker.note_listed(True)
        for name in news.unlisted:
            if (worker := self._workers.get(name)) is not None:
                worker.note_listed(False)
            elif self._gateways.pop(name, None) is not None:
                self._feed.forget(name)
        self.snapshot()

    def _note(self, member: Member) -> None:
        """Take what a member says of itself. It may be new, or a new process with the name of an earlier one."""
        worker = self._workers.get(member.worker_id)
        if worker is None:
            worker = self._join(member)
        elif (member.epoch, member.address) == (worker.member.epoch, worker.member.address):
            before = facts_of(worker.member)
            worker.update(member)
            if facts_of(worker.member) != before:
                if worker.member.state == "draining":
                    log.info("%s %s drains", member.role, member.worker_id)
                self._note_standing(worker)
        elif member.epoch >= worker.member.epoch:
            if worker.member.state != "draining" and not worker.set_aside:
                self._note_failure(worker)
            self._drop(worker)
            worker = self._join(member)
        else:
            return  # a late heartbeat of a process that has ended
        if member.role == "kvtransfer":
            self._note_speed(member.host_id, _fetch_speed(member.host))
        elif serves(worker, self.model):
            self.has_served.set()

    def _join(self, member: Member) -> RemoteWorker:
        self._workers[member.worker_id] = worker = RemoteWorker(member, self._credentials)
        worker.on_change = partial(self._note_change, worker)
        if member.role == "kvtransfer":
            self._hosts[member.host_id] = worker
        self._note_standing(worker)
        self._checks.begin(worker)
        log.info("%s %s joined at %s", member.role, member.worker_id, member.address)
        if problem := mismatch(str(worker), member.wire):
            log.error("%s gets no calls: %s", worker, problem)
        elif member.role in ("prefill", "decode", "encode") and member.model != self.model:
            why = "config.json or tokenizer.json of its model differ from this gateway's"
            log.warning("%s %s gets no requests: %s", member.role, member.worker_id, why)
        return worker

    def _drop(self, worker: RemoteWorker) -> None:
        host_id = worker.member.host_id
        if self._hosts.get(host_id) is worker:
            del self._hosts[host_id]
            self._fetch_speeds.pop(host_id, None)
            self._with_new_speed.add(host_id)
        worker.gone = True
        self._note_standing(worker)
        self._close_when_idle(worker)

    def _note_speed(self, host_id: str, tokens_per_second: float) -> None:
        if self._fetch_speeds.get(host_id, 0.0) != tokens_per_second:
            self._fetch_speeds[host_id] = tokens_per_second
            self._with_new_speed.add(host_id)

    # ---- the standing of members

    def _remove(self, worker: RemoteWorker) -> None:
        """Remove a member that has ended."""
        self._feed.forget(worker.member.worker_id)
        del self._workers[worker.member.worker_id]
        self._drop(worker)

    def _note_failure(self, worker: RemoteWorker) -> None:
        """Record that a worker has failed, before it is set aside or replaced."""
        self.ends.note(worker.member.worker_id)
        # A worker that ends in order takes itself off the list first.
        is_decoding = worker.member.role == "decode" and worker.available and serves(worker, self.model)
        if worker.listed and is_decoding:
            self._failed_at = time.monotonic()

    def _note_change(self, worker: RemoteWorker) -> None:
        self._changed.add(worker)
        if worker.member.state == "draining":  # it may have told this itself
            self._summary = None

    def _note_standing(self, worker: RemoteWorker) -> None:
        """Note that what the whole fleet can do may have changed with a worker."""
        self._changed.add(worker)
        self._summary = None

    def _close_when_idle(self, worker: RemoteWorker) -> None:
        if worker.gone and not worker.is_called:
            _spawn(worker.close(), self._closing)


def _fetch_speed(report: HostReport) -> float:
    """Return the tokens per second that a host fetches from other hosts; 0 if it has fetched too little to measure."""
    moved, seconds, token = report.fetched_bytes, report.fetch_seconds, report.token_bytes
    return moved / token / seconds if moved >= MEASURED_BYTES and seconds > 0 and token > 0 else 0.0


def _spawn(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
