"""The kvtransfer service: the wire in front of one arena and its ledger."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from paceline.core.errors import (
    BusyError,
    ConfigError,
    InvalidRequestError,
    PacelineError,
    StaleError,
    UnavailableError,
)
from paceline.core.kv_layout import KVLayout
from paceline.core.telemetry import carrier_of, request_span
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.rpc import mapped_errors
from paceline.services.common.secret import Secret
from paceline.services.kvtransfer.arena import Arena, check_room, remove_stale_arenas
from paceline.services.kvtransfer.awake_clock import AwakeClock
from paceline.services.kvtransfer.hold import TRANSFER
from paceline.services.kvtransfer.host_memory import HostMemory, MakeTransports
from paceline.services.kvtransfer.layout import difference, layout_from_pb
from paceline.services.kvtransfer.operations import apply, claim_from_pb, key_of
from paceline.services.kvtransfer.owners import describe_holds
from paceline.services.kvtransfer.pool import BlockEvent, Counts
from paceline.services.kvtransfer.reconciliation import Claimant, Reconciliation

_TICK_SECONDS = 0.25
_CHECK_SECONDS = 5.0
"""The ledger is proved when no call came for a tick, and at least this often."""
_MAX_OPERATIONS = 4096
"""In one batch: it is applied in one go, and nobody else is served meanwhile."""
_MAX_SLOTS = 1 << 22
_MAX_SESSIONS = 1024
_MAX_NAME = 256

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a host's KV memory, for load reports and metrics."""

    healthy: bool
    """False from the moment on that the ledger did not prove."""
    counts: Counts = Counts(0, 0, 0, 0, 0)
    """In blocks. None exist before the first worker came."""
    slot_bytes: int = 0
    fingerprint: str = ""
    """Of the layout."""
    workers: int = 0
    holds: int = 0
    expired_holds: int = 0
    evicted_blocks: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    transfers: dict[str, float] = dataclasses.field(default_factory=dict)
    """Blocks that came from other hosts, see `fetches.Totals`."""


class KVTransferService(pb_grpc.KVTransferServicer):
    """Owns the arena of a host. Register it on a gRPC server between `start` and `close`.

    Args:
        host_id: unique name of the host; workers with the same one share blocks.
        kv_memory_bytes: size of the arena.
        enough_tokens: of these, or of one of the longest contexts, the arena need not hold more; 0 makes it as large as
            it may be.
        arena_dir: a tmpfs that all workers of the host see.
        lease_seconds: a hold that is not renewed for this long ends.
        clock: monotonic seconds, by default those in which this process ran.
        secret: by which services of other hosts know this one.
    """

    def __init__(
        self,
        host_id: str,
        kv_memory_bytes: int,
        arena_dir: Path,
        lease_seconds: float,
        clock: Callable[[], float] | None = None,
        enough_tokens: int = 0,
        make_transports: MakeTransports = lambda memory: (),
        secret: Secret | None = None,
    ) -> None:
        self._host_id = host_id
        self._kv_memory_bytes = kv_memory_bytes
        self._enough_tokens = enough_tokens
        self._arena_dir = arena_dir
        self._lease_seconds = lease_seconds
        self._clock = clock or AwakeClock()
        self._make_transports = make_transports
        self._secret = secret or Secret()
        self._leaving: set[asyncio.Task[None]] = set()
        self._address = ""
        self._memory: HostMemory | None = None
        self._reconciliation: Reconciliation | None = None
        self._sessions: dict[int, str] = {}  # worker ids
        self._closing = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._calls_in_tick = 0
        self._unproved = False
        self._proved_at = self._clock()
        self._healthy = True

    async def start(self, address: str = "") -> None:
        """Takes over the arena of this host's service before, if it was killed, and removes those of others. Call it
        before workers can come. Raises ConfigError where an arena of this size cannot be made.

        Args:
            address: where services of other hosts reach this one.
        """
        self._address = address
        left = Arena.left_by(self._arena_dir, self._host_id)
        remove_stale_arenas(self._arena_dir)
        if left is None:
            check_room(self._arena_dir, self._kv_memory_bytes)
        else:
            log.warning("the service before this one was killed; its workers have some seconds to come back")
            self._reconciliation = Reconciliation(left, self._clock())
        self._keeper = asyncio.create_task(self._keep(), name="ledger keeper")

    async def close(self) -> None:
        """Ends all sessions and removes the arena. Calls that come later are refused."""
        self._closing.set()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._sessions.clear()
        self._unshape()
        if self._reconciliation is not None:
            self._reconciliation.arena.close()
            self._reconciliation.over.set()
            self._reconciliation = None
        await asyncio.gather(*self._leaving)

    @property
    def healthy(self) -> bool:
        """False once the ledger did not prove; only a restart helps then."""
        return self._healthy

    def snapshot(self) -> Snapshot:
        memory = self._memory
        if memory is None:
            return Snapshot(healthy=self._healthy)
        return Snapshot(
            counts=memory.ledger.counts(),
            slot_bytes=memory.layout.slot_bytes,
            fingerprint=memory.layout.fingerprint,
            workers=len(self._sessions),
            holds=len(memory.ledger.holds()),
            expired_holds=memory.ledger.expired_holds,
            evicted_blocks=memory.ledger.evicted_blocks,
            prefix_queries_tokens=memory.ledger.queried_tokens,
            prefix_hits_tokens=memory.ledger.cached_tokens,
            transfers=memory.fetches.totals.stats(),
            healthy=self._healthy,
        )

    def take_events(self) -> list[BlockEvent]:
        """Blocks that became or ceased to be reusable since the last call."""
        return [] if self._memory is None else self._memory.ledger.take_events()

    # ---- the wire

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.AttachEvent]:
        async with mapped_errors(context):
            # Random, so that a session of this service's predecessor is not taken for one of ours.
            session = secrets.randbits(63) | 1
            try:
                await self._reconciled(session, request)
                memory = await self._join(session, request)
                yield pb.AttachEvent(
                    session=session,
                    host_id=self._host_id,
                    arena_path=str(memory.arena.path),
                    arena_bytes=memory.arena.size,
                    slots=memory.ledger.counts().total,
                    lease_ms=round(self._lease_seconds * 1000),
                    address=self._address,
                )
                await self._closing.wait()
                raise UnavailableError("the kvtransfer service is stopping")
            finally:
                self._leave(session)

    async def Batch(self, request: pb.BatchRequest, context: Context) -> pb.BatchReply:
        async with mapped_errors(context):
            if request.session not in self._sessions or self._memory is None:
                raise PacelineError(f"session {request.session} is over; attach again")
            if len(request.operations) > _MAX_OPERATIONS:
                raise InvalidRequestError(
                    f"a batch may have {_MAX_OPERATIONS} operations, not {len(request.operations)}"
                )
            self._calls_in_tick += 1
            now = self._clock()
            memory = self._memory
            results = [apply(memory.ledger, request.session, each, now) for each in request.operations]
            memory.exports.note(request.operations)
            return pb.BatchReply(results=results)
        raise AssertionError("mapped_errors ended the call")

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchReply:
        async with mapped_errors(context):
            if request.session not in self._sessions:
                raise PacelineError(f"session {request.session} is over; attach again")
            key, source_key = key_of(request.key), key_of(request.source_key)
            with request_span("fetch", key.request_id, carrier_of(context.invocation_metadata())) as span:
                reply = await self._need().fetches.run(request.session, key, request.source, source_key)
                span.set_attributes({"paceline.path": reply.path, "paceline.bytes": reply.bytes})
                log.info("%d blocks came from %s over %s", reply.blocks, request.source, reply.path)
                return reply
        raise AssertionError("mapped_errors ended the call")

    async def Export(self, request: pb.ExportRequest, context: Context) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        async with mapped_errors(context):
            memory = self._need()
            if request.fingerprint != memory.layout.fingerprint:
                raise PacelineError(
                    "the KV blocks of these hosts differ; all workers of a cluster must serve the same model with the "
                    "same dtype and version"
                )
            key = key_of(request.key)
            with request_span("export", key.request_id, carrier_of(context.invocation_metadata())):
                await memory.exports.run(key, request.cached_tokens, context.write)

    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # type: ignore[override]
        async with mapped_errors(context):
            await self._need().grpc.send(request, context.write)

    def _need(self) -> HostMemory:
        if self._memory is None:
            raise PacelineError("this host has no KV blocks: no worker has come yet")
        return self._memory

    async def Ledger(self, request: pb.LedgerRequest, context: Context) -> pb.LedgerReply:
        snapshot = self.snapshot()
        reply = pb.LedgerReply(
            host_id=self._host_id,
            **snapshot.counts._asdict(),
            balanced=self._prove(),
            expired_holds=snapshot.expired_holds,
            evicted_blocks=snapshot.evicted_blocks,
            prefix_queries_tokens=snapshot.prefix_queries_tokens,
            prefix_hits_tokens=snapshot.prefix_hits_tokens,
            slot_bytes=snapshot.slot_bytes,
        )
        if (memory := self._memory) is not None and request.with_holds:
            holds, names = memory.ledger.holds(), {TRANSFER: "kvtransfer", **self._sessions}
            reply.MergeFrom(describe_holds(holds, memory.layout, names, request.max_holds, self._clock()))
        return reply

    # ---- workers come and go

    async def _reconciled(self, session: int, request: pb.AttachRequest) -> None:
        """Returns when nobody can come back any more. Raises StaleError where this worker tries to, in vain."""
        if (reconciliation := self._reconciliation) is not None:
            if request.arena_path == str(reconciliation.arena.path):
                claims = [claim_from_pb(claim, session) for claim in request.claims]
                reconciliation.add(session, Claimant(request.worker_id, layout_from_pb(request.layout), claims))
            await reconciliation.over.wait()
        if request.arena_path and session not in self._sessions:
            raise StaleError(f"worker {request.worker_id} comes back too late, or its arena could not be kept")

    async def _join(self, session: int, request: pb.AttachRequest) -> HostMemory:
        if self._closing.is_set():
            raise UnavailableError("the kvtransfer service is stopping")
        if not 0 < len(request.worker_id) <= _MAX_NAME:
            raise InvalidRequestError(f"worker_id must have 1 to {_MAX_NAME} characters")
        if len(request.role) > _MAX_NAME:
            raise InvalidRequestError(f"role may have {_MAX_NAME} characters")
        if len(self._sessions) >= _MAX_SESSIONS:
            raise BusyError(f"{_MAX_SESSIONS} workers have a session; no host runs so many")
        layout = layout_from_pb(request.layout)
        if self._memory is not None and self._memory.layout != layout and not self._sessions:
            # What still drains is of sessions that are gone: such a worker writes to a file that is nobody's any more.
            self._unshape()
            await asyncio.gather(*self._leaving)
        memory = self._memory
        if memory is None:
            memory = self._shape(layout, request.context_tokens)
        elif memory.layout != layout:
            raise ConfigError(
                f"worker {request.worker_id} cannot share this host's KV blocks: {difference(memory.layout, layout)}; "
                "all workers of a host must serve the same model with the same dtype and version"
            )
        self._sessions[session] = request.worker_id
        log.info("%s worker %s attached", request.role, request.worker_id)
        return memory

    def _leave(self, session: int) -> None:
        if self._reconciliation is not None:
            self._reconciliation.remove(session)
        worker_id = self._sessions.pop(session, None)
        if worker_id is not None and self._memory is not None:
            self._memory.ledger.lose_session(session, self._clock())
            self._unproved = True
            log.info("worker %s left", worker_id)

    def _reconcile(self, reconciliation: Reconciliation) -> None:
        """Goes on in the predecessor's arena with what workers hold there; without any, or where they contradict each
        other, begins anew."""
        try:
            self._memory = self._rebuild(reconciliation)
        except PacelineError as error:
            log.error(
                "the arena of the service before this one cannot be kept, its workers have to start again: %s", error
            )
        if self._memory is None:
            reconciliation.arena.close()
        else:
            self._sessions |= reconciliation.workers()
            counts = self._memory.ledger.counts()
            log.warning(
                "%d workers came back; %d of %d blocks are theirs", len(self._sessions), counts.held, counts.total
            )
        self._reconciliation = None
        reconciliation.over.set()

    def _rebuild(self, reconciliation: Reconciliation) -> HostMemory | None:
        """None where nobody came back. Raises PacelineError where the arena cannot be kept."""
        layout, arena = reconciliation.layout(), reconciliation.arena
        if layout is None:
            return None
        slots, rest = divmod(arena.size, layout.slot_bytes)
        if rest or (not self._enough_tokens and slots != self._most_slots(layout)):
            raise ConfigError(f"it has {arena.size} bytes, and is to have {self._kv_memory_bytes}")
        memory = self._make_memory(layout, arena)
        try:
            memory.ledger.restore(list(reconciliation.claims()), self._clock())
        except PacelineError:
            self._leave_behind(memory)
            raise
        return memory

    def _most_slots(self, layout: KVLayout) -> int:
        return min(_MAX_SLOTS, self._kv_memory_bytes // layout.slot_bytes)

    def _shape(self, layout: KVLayout, context_tokens: int) -> HostMemory:
        slots = self._most_slots(layout)
        if self._enough_tokens:
            slots = min(slots, layout.slots_for(max(self._enough_tokens, context_tokens)))
        if slots == 0:
            raise ConfigError(
                f"one KV block of this model takes {layout.slot_bytes} bytes and the arena has "
                f"{self._kv_memory_bytes}; raise --kv-memory"
            )
        # A predecessor under another name, or one whose workers had not gone yet when this service started.
        remove_stale_arenas(self._arena_dir)
        arena = Arena(self._arena_dir, slots * layout.slot_bytes, self._host_id)
        try:
            self._memory = self._make_memory(layout, arena)
        except BaseException:
            arena.close()
            raise
        log.info("arena %s: %d blocks of %d bytes", arena.path, slots, layout.slot_bytes)
        return self._memory

    def _make_memory(self, layout: KVLayout, arena: Arena) -> HostMemory:
        return HostMemory(
            self._host_id, layout, arena, self._lease_seconds, self._clock, self._make_transports, self._secret
        )

    def _unshape(self) -> None:
        if self._memory is not None:
            self._leave_behind(self._memory)
            self._memory = None

    def _leave_behind(self, memory: HostMemory) -> None:
        leaving = asyncio.create_task(memory.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    # ---- keeping the ledger

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self._tick()
                if self._memory is not None:
                    await self._memory.sweep()
            except Exception:
                log.exception("the ledger cannot be kept")
                self._healthy = False

    def _tick(self) -> None:
        now = self._clock()
        if self._reconciliation is not None and self._reconciliation.ends <= now:
            self._reconcile(self._reconciliation)
        if self._memory is None:
            return
        self._memory.ledger.expire(now)
        overdue = self._memory.ledger.take_overdue()
        for key in overdue:
            log.warning("hold %s ended: its lease or its worker is gone", key, extra={"request_id": key.request_id})
        busy = self._calls_in_tick > 0
        self._calls_in_tick = 0
        self._unproved = self._unproved or busy or bool(overdue)
        if self._unproved and (not busy or now - self._proved_at >= _CHECK_SECONDS):
            self._prove()

    def _prove(self) -> bool:
        self._unproved = False
        self._proved_at = self._clock()
        wrong = self._memory.ledger.check() if self._memory is not None else []
        if wrong:
            self._healthy = False
            log.error("THE KV LEDGER IS OUT OF BALANCE, restart this host's services: %s", "; ".join(wrong[:10]))
        return not wrong
