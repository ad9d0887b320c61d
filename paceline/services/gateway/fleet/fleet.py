"""The gateway's view of the fleet: read from Redis, and checked by gRPC health checks if Redis is not conclusive.

A new member is found in Redis. A member is dropped only after it fails health checks itself, so a flushed, failing or
restarting Redis removes no worker that still answers. The background work grows with the changes of members, not with
their number, and a request does not look at all members.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Set
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.model_folder import ModelFiles
from paceline.services.common.avoid import Avoided
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import Member, reason
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.fleet.members import Ends, FleetSummary, Members
from paceline.services.gateway.fleet.remote_worker import RECENT_SECONDS, RemoteWorker
from paceline.services.gateway.routing.candidate_table import CandidateTable
from paceline.services.gateway.routing.candidates import Link

REFRESH_SECONDS = 0.5
HURRY_SECONDS = 0.02
"""Shortest interval between two refreshes, in seconds."""
LINK_SECONDS = (10.0, 20.0)
"""Shortest and longest time before a failed link between hosts is used again, in seconds."""

log = logging.getLogger(__name__)


class Fleet:
    """The members of one cluster, kept up to date from `start` to `close`.

    Args:
        model: this gateway's model. Workers with another model are listed, but get no requests.
        credentials: the secret and the certificates for connections to members.
        count_ignored: called for each value and beat in Redis that is ignored, because its signature is not valid.
        on_refresh: called after each refresh of the fleet.
    """

    def __init__(
        self,
        redis: Redis,
        cluster: str,
        model: ModelFiles,
        credentials: Credentials,
        count_ignored: Callable[[], object] = lambda: None,
        on_refresh: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = model.digest
        self.signatures = MemberSignatures(credentials.secret, cluster, count_ignored)
        """Checks the members in Redis."""
        self._failed_links: Avoided[Link] = Avoided(LINK_SECONDS)
        self._members = Members(
            redis,
            cluster,
            model,
            credentials,
            self.signatures,
            on_figures=self._note_change,
            on_standing=self._note_standing,
            on_failure=lambda worker: self.ends.note(worker.member.worker_id),
        )
        self._workers = self._members.workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._table = CandidateTable(RECENT_SECONDS, time.monotonic)
        self._changed: set[RemoteWorker] = set()
        """Workers whose newest figures are not in the table yet."""
        self._summary: FleetSummary | None = None
        """The summary of the members; None if it has to be made again."""
        self.ends = Ends()
        self.redis_answers = True
        """Whether Redis answered the last request."""
        self._on_refresh = on_refresh
        self.has_served = asyncio.Event()
        """Set when a worker is ready for the first time, because the model is then known to load."""
        self._refreshed = asyncio.Event()
        self._hurried = asyncio.Event()
        self._longest = 0
        """Longest context of the workers that were last ready, in tokens, to use while no worker is ready."""

    async def start(self) -> None:
        """Read the fleet, so that requests can be placed at once, and start to refresh it in the background."""
        await self._refresh()
        _spawn(self._run(), self._tasks)

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        await self._members.close()
        await asyncio.gather(*self._closing, *(worker.close() for worker in self._workers.values()))

    def workers(self) -> list[RemoteWorker]:
        """Return all members that are not known to be gone, sorted by name."""
        return [self._workers[name] for name in sorted(self._workers)]

    def worker_ids(self) -> Set[str]:
        """Return the names of all members that are not known to be gone."""
        return self._workers.keys()

    @property
    def gateways(self) -> list[Member]:
        """The gateways of the cluster that have lately sent a heartbeat, including this one."""
        return list(self._members.gateways.values())

    def snapshot(self) -> CandidateTable:
        """Return the members with this gateway's model that may get new work, with their present figures."""
        changed, self._changed = self._changed, set()
        for worker in changed:
            if not worker.gone and worker.available and worker.member.model == self.model:
                self._table.put(worker.candidate(self._members.fetch_speed(worker.member.host_id)))
            elif self._workers.get(worker.member.worker_id) in (worker, None):
                self._table.remove(worker.member.worker_id)
        return self._table

    def hosts(self) -> list[RemoteWorker]:
        """Return the kvtransfer services that speak a protocol version of this gateway, sorted by name."""
        return [host for _, host in sorted(self._members.hosts.items()) if host.is_compatible]

    def host(self, host_id: str) -> RemoteWorker | None:
        """Return the kvtransfer service of a host; None if the host is not known."""
        if not host_id:
            return None
        hosts = (host for host in self._members.hosts.values() if host.member.host_id == host_id)
        return next((host for host in hosts if host.is_compatible), None)

    def layouts_of(self, worker_ids: Iterable[str]) -> dict[str, str]:
        """Return the fingerprint of each worker's KV layout, by the id of its host. Unknown workers are left out."""
        known = (self._workers.get(worker_id) for worker_id in worker_ids)
        return {worker.member.host_id: worker.member.layout for worker in known if worker is not None}

    def find(self, worker_id: str) -> RemoteWorker | None:
        """Return a worker by its id; None if the worker is not known."""
        return self._workers.get(worker_id)

    def worker(self, worker_id: str) -> RemoteWorker:
        return self._workers[worker_id]

    @property
    def summary(self) -> FleetSummary:
        """Facts about the whole fleet, such as the longest context and the roles of ready workers."""
        if self._summary is None:
            self._summary = FleetSummary.of(self._workers.values(), self.model)
        return self._summary

    def max_model_len(self, decodes: bool = True) -> int:
        """Return the longest context in tokens that a ready worker accepts; 0 if no worker was ever ready.

        Workers that are set aside count, too. If no worker is left, the last known length is returned, because workers
        may come back.

        Args:
            decodes: whether the work needs a decode worker. Other work uses one only if no prefill worker is ready.
        """
        found = self.summary.max_model_len if decodes else self.summary.max_computing_len
        return found or self._longest

    def has_worker(self, decodes: bool) -> bool:
        """Return whether a worker is ready for work of some kind.

        Args:
            decodes: whether the work needs a decode worker. Other work uses one only if no other worker is ready.
        """
        return self.summary.has_decode_worker or (not decodes and self.summary.has_computing_worker)

    @property
    def has_decode_worker(self) -> bool:
        """Whether a decode worker is ready."""
        return self.summary.has_decode_worker

    @property
    def has_planner(self) -> bool:
        """Whether a planner is running that scales this fleet, or that only shows how it would."""
        return self.summary.has_planner

    @property
    def sleeps(self) -> bool:
        """Whether a worker sleeps that can decode or compute when it wakes."""
        return self.summary.has_sleeping_worker

    @property
    def may_be_empty(self) -> bool:
        """Whether a planner scales this fleet that may stop all decode workers, and starts some when requests come."""
        return self.summary.may_be_empty

    def hurry(self) -> None:
        """Read the members again soon, because they are known to change."""
        self._hurried.set()

    async def refreshed(self) -> None:
        """Wait until the members have been read again."""
        await self._refreshed.wait()

    def set_aside(self, worker: RemoteWorker) -> None:
        """Give a worker no new work until a health check succeeds. The next check follows within two seconds."""
        self._members.set_aside(worker)

    def avoid_link(self, link: Link) -> None:
        """Send no blocks over a link between hosts for the next LINK_SECONDS."""
        self._failed_links.add(link)
        log.warning("KV blocks cannot be moved from host %s to host %s; routing avoids this link for a while", *link)

    def failed_links(self) -> frozenset[Link]:
        """Return the links between hosts over which a transfer of blocks failed recently."""
        return self._failed_links.now()

    @contextlib.contextmanager
    def call(self, worker: RemoteWorker, tokens: int = 0, adapter: int = 0) -> Iterator[Callable[[], None]]:
        """Count a call, and keep the worker's channel open until the call ends, even if the member is dropped before.

        Yields a function to call when the worker has computed the tokens. The end of the call has the same effect.

        Args:
            tokens: the number of prompt tokens that the worker has to compute.
            adapter: the request's adapter, as `core.adapters.short_digest`; 0 for the model alone.
        """
        worker.begin_call(tokens, adapter)
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
            await asyncio.sleep(HURRY_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS * random.uniform(0.8, 1.2) - HURRY_SECONDS):
                    await self._hurried.wait()
            self._hurried.clear()
            await self._refresh()

    async def _refresh(self) -> None:
        try:
            await self._members.read(self._see)
            if not self.redis_answers:
                log.info("Redis answers again")
            self.redis_answers = True
        except (RedisError, OSError, TimeoutError) as error:
            if self.redis_answers:
                log.warning("Redis does not answer (%s); routing uses the last known state", reason(error))
            self.redis_answers = False
        self._members.look()
        self.snapshot().settle()  # so that the next request need not do it
        self._on_refresh()
        refreshed, self._refreshed = self._refreshed, asyncio.Event()
        refreshed.set()

    def _see(self) -> None:
        """Update snapshot and summary after a part of the news has been read."""
        self.snapshot()
        if longest := self.summary.max_model_len or self.summary.max_computing_len:
            self._longest = longest
            self.has_served.set()

    def _note_change(self, worker: RemoteWorker) -> None:
        self._changed.add(worker)
        if worker.member.state == "draining":  # it may have told this itself
            self._summary = None

    def _note_standing(self, worker: RemoteWorker) -> None:
        """Note that a worker is gone, or that facts about it have changed on which the summary may depend."""
        self._changed.add(worker)
        self._summary = None
        self._close_when_idle(worker)

    def _close_when_idle(self, worker: RemoteWorker) -> None:
        if worker.gone and not worker.is_called:
            _spawn(worker.close(), self._closing)


def _spawn(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
