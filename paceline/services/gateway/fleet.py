"""The gateway's view of the fleet: read from Redis, and checked by gRPC health checks if Redis leaves doubt.

A new member is found in Redis. A member is dropped only after it fails health checks itself, so a flushed, failing or
restarting Redis removes no worker that still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.errors import RefusedError, UntrustedError
from paceline.proto.fleet_pb2 import HostReport
from paceline.services.common.avoid import Avoided
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member, read_members
from paceline.services.common.rpc import is_serving
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire_version import mismatch
from paceline.services.gateway.candidate_table import CandidateTable
from paceline.services.gateway.ends import Ends
from paceline.services.gateway.remote_worker import RemoteWorker
from paceline.services.gateway.router import Link
from paceline.services.gateway.worker_calls import RECENT_SECONDS

REFRESH_SECONDS = 0.5
FAILED_PROBES = 2
"""Failed health checks in a row after which a member that Redis does not list is dropped."""
PROBE_SECONDS = (0.25, 0.75)
"""The shortest and longest time before a failed worker gets a health check, in seconds."""
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
        self._redis = redis
        self._cluster = cluster
        self.model = model
        self._failed_links: Avoided[Link] = Avoided(LINK_SECONDS)
        self._failed_workers: Avoided[str] = Avoided(PROBE_SECONDS)
        """Ids of failed workers for which it is too early for a health check."""
        self._credentials = credentials
        self._workers: dict[str, RemoteWorker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._table = CandidateTable(RECENT_SECONDS, time.monotonic)
        self._changed: set[RemoteWorker] = set()
        """Workers of which the table does not know the newest figures."""
        self._fetch_speeds: dict[str, float] = {}
        self.ends = Ends()
        self.redis_answers = True
        """Whether Redis has answered the last time."""
        self.gateways: list[Member] = []
        """The gateways of the cluster, as Redis listed them last."""
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
        await asyncio.gather(*self._closing, *(worker.close() for worker in self._workers.values()))

    def workers(self) -> list[RemoteWorker]:
        """Return all members that are not known to be gone, sorted by name."""
        return [self._workers[name] for name in sorted(self._workers)]

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
        """Return the kvtransfer services that this gateway understands."""
        return [worker for worker in self.workers() if worker.member.role == "kvtransfer" and worker.is_compatible]

    def host(self, host_id: str) -> RemoteWorker | None:
        """Return the kvtransfer service of a host; None if it is not known."""
        return next((host for host in self.hosts() if host.member.host_id == host_id), None)

    def layouts_of(self, worker_ids: Iterable[str]) -> dict[str, str]:
        """Return the fingerprints of workers' KV layouts by the ids of their hosts. Unknown workers are left out."""
        known = (self._workers.get(worker_id) for worker_id in worker_ids)
        return {worker.member.host_id: worker.member.layout for worker in known if worker is not None}

    def find(self, worker_id: str) -> RemoteWorker | None:
        """Return a worker; None if it is not known."""
        return self._workers.get(worker_id)

    def worker(self, worker_id: str) -> RemoteWorker:
        return self._workers[worker_id]

    def max_model_len(self, decodes: bool = True) -> int:
        """Return the longest context that a worker takes; 0 if no worker is ready and none is expected to be soon.

        Workers set aside count, too. If none is left, the last known length is returned while workers may come back.

        Args:
            decodes: whether the work needs a decode worker. If no prefill worker is ready, all work does.
        """
        ready = [member for member in self._members() if member.state == "ready"]
        computing = [] if decodes else [member for member in ready if member.role == "prefill"]
        workers = computing or [member for member in ready if member.role == "decode"]
        found = max((member.max_model_len for member in workers), default=0)
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
        return any(self._is_ready(worker) for worker in self._workers.values())

    @property
    def has_planner(self) -> bool:
        """Whether a planner scales this fleet, or shows how it would."""
        return any(worker.member.role == "planner" and worker.available for worker in self._workers.values())

    @property
    def may_be_empty(self) -> bool:
        """Whether a planner scales this fleet that starts decode workers when requests come, and may leave none."""
        plans = (worker.member.plan for worker in self._workers.values() if worker.available)
        return any(plan.leads and not plan.advisory and "decode" in plan.may_be_empty for plan in plans)

    @property
    def _may_return(self) -> bool:
        """Whether a decode worker that failed lately may come back. One that drained does not."""
        return time.monotonic() < self._failed_at + self._return_seconds

    def _is_ready(self, worker: RemoteWorker) -> bool:
        member = worker.member
        is_ours = member.role == "decode" and member.model == self.model
        return is_ours and member.state == "ready" and worker.available

    async def refreshed(self) -> None:
        """Wait until the members have been read again."""
        await self._refreshed.wait()

    @property
    def is_starting(self) -> bool:
        """Whether a worker is loading the model."""
        return any(member.state == "starting" for member in self._members())

    def _members(self) -> list[Member]:
        """Return the prefill and decode workers of this gateway's model that are not shut out."""
        return [
            worker.member
            for worker in self._workers.values()
            if worker.member.role in ("prefill", "decode")
            and worker.member.model == self.model
            and not worker.is_shut_out
        ]

    def set_aside(self, worker: RemoteWorker) -> None:
        """Give a worker no new work until a health check succeeds; the next one follows within two seconds."""
        if not worker.set_aside:
            self._note_failure(worker)
        worker.set_aside = True
        self._changed.add(worker)
        self._failed_workers.add(worker.member.worker_id)

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
            async with asyncio.timeout(1.0):
                self._merge(await read_members(self._redis, self._cluster))
            if not self.redis_answers:
                log.info("Redis answers again")
            self.redis_answers = True
        except (RedisError, OSError, TimeoutError) as error:
            if self.redis_answers:
                log.warning("Redis does not answer (%s); routing uses the last known state", error)
            self.redis_answers = False
        self._changed.update(self._workers.values())  # figures that are not renewed become old
        too_early = self._failed_workers.now()
        for worker in self.workers():
            in_place = worker.available or worker.is_shut_out
            doubtful = not worker.listed if in_place else worker.member.worker_id not in too_early
            if doubtful and worker.probe is None:
                worker.probe = _spawn(self._probe(worker), self._tasks)
        self.on_refresh()
        refreshed, self._refreshed = self._refreshed, asyncio.Event()
        refreshed.set()

    def _merge(self, members: list[Member]) -> None:
        self.gateways = [member for member in members if member.role == "gateway"]
        listed = {member.worker_id: member for member in members if member.role != "gateway"}
        for name, member in listed.items():
            worker = self._workers.get(name)
            if worker is not None and (member.epoch, member.address) == (worker.member.epoch, worker.member.address):
                if member != worker.member:
                    worker.update(member)
            elif worker is None or member.epoch >= worker.member.epoch:
                if worker is not None:
                    if worker.member.state != "draining" and not worker.set_aside:
                        self._note_failure(worker)
                    self._drop(worker)
                self._workers[name] = worker = RemoteWorker(member, self._credentials)
                worker.on_change = partial(self._note_change, worker)
                _spawn(self._first_check(self._workers[name]), self._tasks)
                log.info("%s %s joined at %s", member.role, name, member.address)
                if problem := mismatch(str(self._workers[name]), member.wire):
                    log.error("%s gets no calls: %s", self._workers[name], problem)
                elif member.role in ("prefill", "decode", "encode") and member.model != self.model:
                    why = "config.json or tokenizer.json of its model differ from this gateway's"
                    log.warning("%s %s gets no requests: %s", member.role, name, why)
        for name, worker in self._workers.items():
            worker.note_listed(name in listed)
        self._fetch_speeds = {host.member.host_id: _fetch_speed(host.member.host) for host in self.hosts()}
        if any(member.state == "ready" for member in self._members()):
            self.has_served.set()

    async def _first_check(self, worker: RemoteWorker) -> None:
        """Find out before the first request whether a new worker trusts us and we trust it. Ignore its health."""
        await self._is_serving(worker)

    async def _probe(self, worker: RemoteWorker) -> None:
        """Send one health check, and then use a doubtful worker again, set it aside, or drop it."""
        try:
            if await self._is_serving(worker):
                worker.is_untrusted = False
                worker.set_aside, worker.failed_probes = False, 0
                self._changed.add(worker)
                return
        finally:
            worker.probe = None
        worker.failed_probes += 1
        self.set_aside(worker)
        if worker.failed_probes >= FAILED_PROBES and not worker.listed and not worker.gone:
            log.info("%s %s is gone", worker.member.role, worker.member.worker_id)
            del self._workers[worker.member.worker_id]
            self._drop(worker)

    async def _is_serving(self, worker: RemoteWorker) -> bool:
        if not worker.is_compatible:
            return False
        try:
            return await is_serving(worker.channel, worker.member.worker_id)
        except RefusedError as error:
            if not worker.refuses_us:
                log.error("%s gets no requests: %s", worker, error)
            worker.refuses_us = True
            self._changed.add(worker)
            return False
        except UntrustedError as error:
            if not worker.is_untrusted:
                log.error("%s gets no requests for now: %s", worker, error)
            worker.is_untrusted = True
            self.set_aside(worker)
            return False

    def _note_failure(self, worker: RemoteWorker) -> None:
        """Record that a worker has failed, before it is set aside or replaced."""
        self.ends.note(worker.member.worker_id)
        # A worker that ends in order takes itself off the list first.
        if worker.listed and self._is_ready(worker):
            self._failed_at = time.monotonic()

    def _note_change(self, worker: RemoteWorker) -> None:
        self._changed.add(worker)

    def _drop(self, worker: RemoteWorker) -> None:
        worker.gone = True
        self._changed.add(worker)
        self._close_when_idle(worker)

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
