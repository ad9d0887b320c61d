"""The sessions of a host's workers, and the KV memory that is made for them."""

from __future__ import annotations

import asyncio
import logging

from paceline.core.errors import (
    BusyError,
    ConfigError,
    InvalidRequestError,
    PacelineError,
    StaleError,
    UnavailableError,
)
from paceline.core.kv_layout import KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.layout import difference, layout_from_pb
from paceline.services.kvtransfer.arena import Arena, check_room, remove_stale_arenas
from paceline.services.kvtransfer.host_memory import HostMemory, HostOptions
from paceline.services.kvtransfer.operations import claim_from_pb
from paceline.services.kvtransfer.reconciliation import Claimant, Reconciliation

_MAX_SLOTS = 1 << 22
_MAX_SESSIONS = 1024
_MAX_NAME = 256
_SETTLE_SECONDS = 5.0
"""Longest wait until no block is in use, when the last worker has fallen asleep, in seconds."""
_SETTLE_PAUSE = 0.05

log = logging.getLogger(__name__)


class Sessions:
    """The attached workers of a host and the KV memory that they share, from `start` to `close`.

    The memory is made for the layout of the first worker. When no worker is left, a worker with another layout gets a
    new memory.
    """

    def __init__(self, options: HostOptions) -> None:
        self.memory: HostMemory | None = None
        self.workers: dict[int, str] = {}
        """Ids of the attached workers, by the number of their session."""
        self.reconciliation: Reconciliation | None = None
        self.leaving = asyncio.Event()
        """Set when the service is about to end, so that its workers drain."""
        self.closing = asyncio.Event()
        self._asleep: set[int] = set()
        """Sessions whose workers sleep and need no blocks."""
        self._drained: set[int] = set()
        """Sessions whose workers have announced that they leave."""
        self._left = asyncio.Event()
        self._options = options
        self._leaving: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Take over the arena of this host's previous service if that was killed, and remove stale arenas of other
        services.

        Raises ConfigError if an arena, or the disk tier's file, of the configured size cannot be made.
        """
        if self._options.disk is not None:
            self._options.disk.check()
        folder = self._options.arena_dir
        left = Arena.left_by(folder, self._options.host_id)
        remove_stale_arenas(folder)
        if left is None:
            check_room(folder, self._options.kv_memory_bytes)
        else:
            log.warning("the service before this one was killed; its workers have some seconds to come back")
            self.reconciliation = Reconciliation(left, self._options.clock())

    async def close(self) -> None:
        """End all sessions and remove the arena. Workers that come later are refused."""
        self.closing.set()
        self.leaving.set()
        self.workers.clear()
        self._let_go()
        if self.reconciliation is not None:
            self.reconciliation.arena.close()
            self.reconciliation.over.set()
            self.reconciliation = None
        await asyncio.gather(*self._leaving)

    def need_memory(self) -> HostMemory:
        """Return the memory. Raises PacelineError if there is none yet."""
        if self.memory is None:
            raise PacelineError("this host has no KV blocks: no worker has come yet")
        if self.memory.asleep:
            raise UnavailableError("all workers of this host sleep, so it has no KV blocks")
        return self.memory

    def check(self, session: int) -> HostMemory:
        """Return the memory of a session. Raises PacelineError if the session has ended."""
        if session not in self.workers or self.memory is None:
            raise PacelineError(f"session {session} is over; attach again")
        return self.memory

    async def enter(self, session: int, request: pb.AttachRequest) -> HostMemory:
        """Begin the session of a worker, which may come back with leases from the previous service.

        Returns the memory, which the worker shares from now on.

        Raises:
            BusyError, ConfigError, InvalidRequestError, UnavailableError: the worker is refused.
            StaleError: the worker cannot come back.
        """
        await self._come_back(session, request)
        _check(request)
        layout = layout_from_pb(request.layout)
        if self.memory is not None and self.memory.layout != layout and not self.workers:
            # Draining leases are of ended sessions. If such a worker still writes, it writes to the removed arena.
            self._let_go()
            await asyncio.gather(*self._leaving)
        if self.closing.is_set():
            raise UnavailableError("the kvtransfer service is stopping")
        if len(self.workers) >= _MAX_SESSIONS:
            raise BusyError(f"{_MAX_SESSIONS} workers have a session; no host runs so many")
        if self.memory is None:
            self.memory = self._make(layout, request.context_tokens)
        elif self.memory.layout != layout:
            raise ConfigError(
                f"worker {request.worker_id} cannot share this host's KV blocks: "
                f"{difference(self.memory.layout, layout)}; all workers of a host must serve the same model with the "
                "same dtype and version"
            )
        memory = self.memory
        if request.asleep:
            self._asleep.add(session)
        # The worker counts before the memory is awake, so that it does not sleep again at once.
        self.workers[session] = request.worker_id
        if not request.asleep:
            await memory.wake()
        log.info("%s worker %s attached", request.role, request.worker_id)
        return memory

    async def set_asleep(self, session: int, asleep: bool) -> None:
        """Note that a worker sleeps, or is awake and needs blocks. While all workers sleep, the memory does, too.

        Returns when the memory sleeps or other workers need it, or when it is awake. Raises BusyError if blocks stay in
        use, so that the worker counts as awake, or if the system has too little memory now, and PacelineError if the
        session has ended.
        """
        memory = self.check(session)
        if not asleep:
            # At first, so that the memory does not sleep again at once.
            self._asleep.discard(session)
            try:
                await memory.wake()
            except BaseException:
                if session in self.workers:
                    self._asleep.add(session)  # the worker does not know that it has blocks
                raise
            return
        self._asleep.add(session)
        for _ in range(round(_SETTLE_SECONDS / _SETTLE_PAUSE)):
            if await self.settle() or session not in self._asleep:
                return
            await asyncio.sleep(_SETTLE_PAUSE)
        # The worker goes on with its blocks after this error, so the memory must not be given back later.
        self._asleep.discard(session)
        raise BusyError("KV blocks of this host are still in use, so its memory cannot sleep now")

    async def settle(self) -> bool:
        """Let the memory sleep if all workers do. Return False if blocks in use prevent this now."""
        memory = self.memory
        if memory is None or not self.workers or not self.workers.keys() <= self._asleep:
            return True
        try:
            await memory.sleep()
        except BusyError:
            return False
        return True

    def leave(self, session: int) -> None:
        """End a session and its leases, whose blocks drain first. Does nothing if the session never began."""
        if self.reconciliation is not None:
            self.reconciliation.remove(session)
        self._drained.discard(session)
        self._asleep.discard(session)
        worker_id = self.workers.pop(session, None)
        self._left.set()
        if worker_id is not None and self.memory is not None:
            self.memory.ledger.lose_session(session, self._options.clock())
            log.info("worker %s left", worker_id)

    def is_last_to_leave(self, session: int) -> bool:
        """Note that a worker leaves soon. Return whether no other worker stays."""
        self._drained.add(session)
        return self.workers.keys() <= self._drained

    async def wait_until_left(self) -> None:
        """Wait until no worker is attached."""
        while self.workers:
            self._left.clear()
            await self._left.wait()

    # ---- coming back

    async def _come_back(self, session: int, request: pb.AttachRequest) -> None:
        """Wait until the reconciliation is over. Raises StaleError if this worker wanted to come back and could not."""
        if (reconciliation := self.reconciliation) is not None:
            if request.arena_path == str(reconciliation.arena.path):
                claims = [claim_from_pb(claim, session) for claim in request.claims]
                reconciliation.add(session, Claimant(request.worker_id, layout_from_pb(request.layout), claims))
            await reconciliation.over.wait()
        if request.arena_path and session not in self.workers:
            raise StaleError(f"worker {request.worker_id} comes back too late, or its arena could not be kept")

    def end_reconciliation(self, now: float) -> None:
        """End the reconciliation if its time is over.

        If workers came back, go on with the old arena and their leases. If none came, or their claims contradict each
        other, remove the old arena; the next worker gets a new one.
        """
        reconciliation = self.reconciliation
        if reconciliation is None or now < reconciliation.ends:
            return
        try:
            self.memory = self._take_over(reconciliation)
        except PacelineError as error:
            log.error(
                "the arena of the service before this one cannot be kept; its workers have to start again: %s", error
            )
        if self.memory is None:
            reconciliation.arena.close()
        else:
            self.workers |= reconciliation.workers()
            counts = self.memory.ledger.counts()
            log.warning(
                "%d workers came back; %d of %d blocks are theirs", len(self.workers), counts.held, counts.total
            )
        self.reconciliation = None
        reconciliation.over.set()

    def _take_over(self, reconciliation: Reconciliation) -> HostMemory | None:
        """Return the memory in the old arena, or None if no worker came back. Raises PacelineError if this fails."""
        layout, arena = reconciliation.layout(), reconciliation.arena
        if layout is None:
            return None
        slots, rest = divmod(arena.size, layout.slot_bytes)
        if rest or (not self._options.enough_tokens and slots != self._most_slots(layout)):
            raise ConfigError(f"it has {arena.size} bytes and should have {self._options.kv_memory_bytes}")
        memory = HostMemory(self._options, layout, arena)
        try:
            memory.ledger.restore(list(reconciliation.claims()), self._options.clock())
        except PacelineError:
            self._leave_behind(memory)
            raise
        return memory

    # ---- the memory

    def _make(self, layout: KVLayout, context_tokens: int) -> HostMemory:
        options = self._options
        slots = self._most_slots(layout)
        if options.enough_tokens:
            slots = min(slots, layout.arena_slots_for(max(options.enough_tokens, context_tokens)))
        if slots == 0:
            raise ConfigError(
                f"one KV block of this model takes {layout.slot_bytes} bytes and the arena has "
                f"{options.kv_memory_bytes}; raise --kv-memory"
            )
        # Such files were left by a service with another name, or by one whose workers had not ended when this service
        # started.
        remove_stale_arenas(options.arena_dir)
        arena = Arena(options.arena_dir, slots * layout.slot_bytes, options.host_id)
        try:
            memory = HostMemory(options, layout, arena)
        except BaseException:
            arena.close()
            raise
        log.info("arena %s: %d blocks of %d bytes", arena.path, slots, layout.slot_bytes)
        return memory

    def _most_slots(self, layout: KVLayout) -> int:
        return min(_MAX_SLOTS, self._options.kv_memory_bytes // layout.slot_bytes)

    def _let_go(self) -> None:
        if self.memory is not None:
            self._leave_behind(self.memory)
            self.memory = None

    def _leave_behind(self, memory: HostMemory) -> None:
        leaving = asyncio.create_task(memory.close())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)


def _check(request: pb.AttachRequest) -> None:
    if not 0 < len(request.worker_id) <= _MAX_NAME:
        raise InvalidRequestError(f"worker_id must have 1 to {_MAX_NAME} characters")
    if len(request.role) > _MAX_NAME:
        raise InvalidRequestError(f"role may have {_MAX_NAME} characters")
