"""A worker's session with kvtransfer: begin it, renew its leases, return to a service that was restarted, end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.core.kv_layout import KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc
from paceline.services.common.auth import HOST_SERVICE
from paceline.services.common.credentials import Credentials
from paceline.services.common.layout import layout_to_pb
from paceline.services.common.rpc import is_serving, open_channel
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.shared_memory import map_arena
from paceline.services.common.tasks import end_tasks, heeding_cancellation
from paceline.services.common.wire import key_from_pb, key_to_pb
from paceline.services.common.wire_version import WireVersions, mismatch
from paceline.services.worker.batch_sender import BatchSender, HostConnection
from paceline.services.worker.leases import Leases

ATTACH_SECONDS = 60.0
"""Longest wait for a service to start, in seconds. A service may start after its workers."""
CALL_SECONDS = 5.0
SLEEP_SECONDS = 60.0
"""Longest wait until kvtransfer has given the arena's memory back, or has allocated it again, in seconds."""
RETURN_SECONDS = 10.0
"""Longest wait until a killed service has been started again, in seconds."""

Stream: TypeAlias = "grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.AttachEvent]"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MappedArena:
    """The host's arena in this worker's address space."""

    path: Path
    slots: int
    blocks: memoryview
    """The memory of all slots."""
    turns: memoryview
    """The page after the slots, through which workers take turns on the cores (`paceline.core.turns`)."""


class KVSession:
    """One worker's session, from `attach` to `close` or until `lost` is done. It renews the leases meanwhile.

    If the session breaks because the service has ended, the worker does not end. A decode worker continues in the
    blocks that its engine has, which no other worker can get, and claims them from the restarted service. All other
    leases are lost. Operations wait and are sent again. Carrying an operation out twice does no harm.

    Args:
        address: address of the kvtransfer service of this worker's host.
        leases: the leases that are renewed, and claimed from a service that is started again.
    """

    def __init__(self, address: str, worker_id: str, role: str, credentials: Credentials, leases: Leases) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the session is over. All leases have ended then."""
        self.leaving = asyncio.Event()
        """Set when the service is about to end. The service waits until its workers have drained and ended."""
        self.sender = BatchSender(self._send)
        self.address = address
        self.id = 0
        self.host_id = ""
        self.source = ""
        """Address at which services of other hosts reach the kvtransfer service of this host."""
        self.has_disk = False
        """Whether the host's arena has a disk tier."""
        self._worker_id = worker_id
        self.role = role
        """The worker's role, which may change while it has no leases."""
        self._leases = leases
        self._channel = open_channel(address, credentials, meant=HOST_SERVICE)
        self.stub = kvtransfer_pb2_grpc.KVTransferStub(self._channel)
        self._lease_seconds = 10.0
        self.arena_path = Path()
        """Path of the arena's file; only valid after `attach`."""
        self._layout: KVLayout | None = None
        self._context_tokens = 0
        self._socket_path = ""
        self._connection: HostConnection | None = None
        self._connecting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._asleep = False
        """Whether this worker sleeps and needs no blocks."""

    async def attach(self, layout: KVLayout, context_tokens: int) -> MappedArena:
        """Join the host's arena and map it. Wait up to ATTACH_SECONDS for the service. Raises PacelineError.

        Args:
            context_tokens: tokens of the longest context that this worker may take. An arena of automatic size has
                room for one such context.
        """
        self._layout, self._context_tokens = layout, context_tokens
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                call, event = await self._try_to_attach(self._attach_request(layout))
        except TimeoutError:
            await is_serving(self._channel, timeout=CALL_SECONDS)  # raises if certificates are the reason
            raise UnavailableError(f"kvtransfer at {self.address} does not answer; is it running?") from None
        if not isinstance(event, pb.AttachEvent):
            raise UnavailableError(f"kvtransfer at {self.address} ended the session at once")
        if problem := mismatch(f"kvtransfer at {self.address}", WireVersions.from_pb(event.wire)):
            raise ConfigError(problem)
        self._take_in(event)
        self._tasks = [
            asyncio.create_task(self._watch(call), name="kv-session"),
            asyncio.create_task(self.sender.run(), name="kv-batches"),
            asyncio.create_task(self._renew(), name="kv-renewal"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._end_with)
        mapped = map_arena(self.arena_path, event.arena_bytes)
        return MappedArena(self.arena_path, event.slots, mapped[: event.arena_bytes], turns=mapped[event.arena_bytes :])

    async def close(self) -> None:
        """Wait up to CALL_SECONDS for operations, then end the session. Operations without an answer fail."""
        await self.sender.answered(CALL_SECONDS)
        self._end()
        await end_tasks(*self._tasks)
        await self._channel.close(None)

    async def call(self, operations: Sequence[pb.Operation]) -> pb.BatchReply:
        """Send one request, independent of the order of `sender`. Raises UnavailableError."""
        if self.lost.done():
            raise UnavailableError("this worker has no session with kvtransfer")
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                try:
                    self._connection = await HostConnection.connect(self._socket_path)
                except OSError as error:
                    raise UnavailableError("the kvtransfer of this host has ended or cannot be reached") from error
        return await self._connection.call(pb.BatchRequest(session=self.id, operations=operations))

    async def _send(self, operations: Sequence[pb.Operation]) -> pb.BatchReply:
        """Send a batch. Raises UnavailableError if no answer comes within CALL_SECONDS."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self.call(operations)
        except TimeoutError:
            raise UnavailableError(f"kvtransfer does not answer within {CALL_SECONDS:g} s") from None

    async def set_asleep(self, asleep: bool) -> None:
        """Tell kvtransfer whether this worker needs blocks. The worker may use blocks again when this returns.

        Raises BusyError if blocks of the host stay in use, or if there is too little memory now, and UnavailableError
        if kvtransfer does not answer.
        """
        before, self._asleep = self._asleep, asleep  # at once, for a service that is restarted meanwhile
        request = pb.SetAsleepRequest(session=self.id, asleep=asleep)
        call = self.stub.SetAsleep(request, timeout=SLEEP_SECONDS, wait_for_ready=True)
        try:
            await heeding_cancellation(call)
        except grpc.aio.AioRpcError as error:
            self._asleep = before
            raise unmapped_error(error, f"kvtransfer at {self.address}") from error

    # ---- begin

    def _take_in(self, event: pb.AttachEvent) -> None:
        self.id, self.arena_path = event.session, Path(event.arena_path)
        self.host_id, self.source, self.has_disk = event.host_id, event.address, event.has_disk
        self._lease_seconds = event.lease_ms / 1000
        self._socket_path = event.socket_path

    async def _try_to_attach(self, request: pb.AttachRequest) -> tuple[Stream, object]:
        """Return the stream of a new session and its first message.

        If the service goes away meanwhile, ask again. A returning worker gives up when the file of its arena is gone,
        because a service that ends normally removes it.
        """
        while not request.arena_path or _exists(request.arena_path):
            call = self.stub.Attach(request, wait_for_ready=True)
            try:
                return call, await heeding_cancellation(call.read())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise unmapped_error(error, f"kvtransfer at {self.address}") from error
            except asyncio.CancelledError:
                call.cancel()
                raise
            await asyncio.sleep(random.uniform(0.05, 0.2))
        raise UnavailableError("kvtransfer has ended")

    def _attach_request(self, layout: KVLayout, **again: Any) -> pb.AttachRequest:
        return pb.AttachRequest(
            worker_id=self._worker_id,
            role=self.role,
            layout=layout_to_pb(layout),
            context_tokens=self._context_tokens,
            asleep=self._asleep,
            **again,
        )

    # ---- leases

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            if keys := self._leases.keys():
                renew = pb.Renew(keys=[key_to_pb(key) for key in keys])
                # The answer is not awaited, because the next renewal is due before a lease ends.
                self.sender.submit(pb.Operation(renew=renew)).add_done_callback(self._note_losses)

    def _note_losses(self, done: asyncio.Future[pb.Result]) -> None:
        if error := done.exception():
            log.warning("leases were not renewed: %s", error)
            return
        for key in map(key_from_pb, done.result().lost):
            if key in self._leases and not self.lost.done():
                log.warning("the lease of %s ended", key, extra={"request_id": key.request_id})
                self._leases.lose(key)

    # ---- return to a service that was restarted

    async def _watch(self, call: Stream) -> None:
        """Wait until the session is over and the worker cannot return to its arena."""
        again: Stream | None = call
        while again is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                while isinstance(event := await again.read(), pb.AttachEvent):  # else the session has ended
                    if event.leaving:
                        self.leaving.set()
            again = await self._return()
        log.info("the session with kvtransfer ended")

    async def _return(self) -> Stream | None:
        """Begin a new session in the same arena. Return its stream, or None if no service is started again in time.

        Operations wait meanwhile. So the claims state the leases as they were when the session broke, and later changes
        are sent after the claims.
        """
        assert self._layout is not None
        self.sender.pause()
        self._disconnect()
        await asyncio.sleep(0)  # so that answers that have arrived are handled first
        self._leases.lose_all(keep_used=self.role == "decode")
        claims = self._leases.claims(self._layout)
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                call, event = await self._try_to_attach(
                    self._attach_request(self._layout, arena_path=str(self.arena_path), claims=claims)
                )
        except (TimeoutError, PacelineError) as error:
            log.info("this worker cannot return to its arena: %s", error or "no kvtransfer is started again")
            return None
        if not isinstance(event, pb.AttachEvent):
            return None
        self._take_in(event)
        self.sender.resume()
        return call

    # ---- end

    def _end_with(self, task: asyncio.Task[None]) -> None:
        """End the session because one of its tasks has ended."""
        if not task.cancelled() and (error := task.exception()):
            log.error("the session with kvtransfer cannot go on", exc_info=error)
        self._end()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.sender.close()
        self._disconnect()
        if not self.lost.done():
            self.lost.set_result(None)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _exists(path: str) -> bool:
    return Path(path).exists()
