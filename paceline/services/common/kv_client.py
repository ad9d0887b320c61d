"""A worker's side of kvtransfer: a session, and blocks for its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio

from paceline.core.errors import BusyError, PacelineError, StaleError, UnavailableError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.telemetry import trace_headers
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc
from paceline.services.common.batch_sender import BatchSender
from paceline.services.common.rpc import heeding_cancellation, open_channel, unmapped_error
from paceline.services.common.secret import Secret
from paceline.services.common.tasks import end_tasks
from paceline.services.common.touched import TouchedBlocks
from paceline.services.common.wire import key_from_pb, key_to_pb

ATTACH_SECONDS = 60.0
"""kvtransfer may start after its workers."""
CALL_SECONDS = 5.0
RETURN_SECONDS = 10.0
"""For a service that was killed to be back."""

Stream: TypeAlias = "grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.AttachEvent]"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arena:
    """The shared memory to map, and this worker's place in it."""

    host_id: str
    path: Path
    size: int
    slots: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that belong to `key` until they are released or their lease ends."""

    key: Key
    filled_tokens: int
    """Tokens at the front whose KV is in the blocks."""
    tables: list[list[int]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came from another host."""

    key: Key
    """To adopt the hold with, which is filled."""
    bytes: int
    path: str
    """The transport; empty where there was nothing to move."""


class KVClient:
    """One worker's session with its host's kvtransfer service.

    Operations are applied in the order of the calls. Holds are renewed until they are released. Every operation comes
    to an end: an answer, or UnavailableError where none came in time, the session has broken or was closed.

    A session that breaks because the service ended does not end what runs here. A decode worker goes on in the blocks
    that its engine has, which nobody else can get, and claims them from the service that is started again. What else
    was under way is lost, and operations wait; they change nothing where they are carried out a second time.

    `lost` is done when the session is over: every hold is void from then on. `on_hold_lost` is called for a hold whose
    lease ended before it was renewed, or that cannot be claimed.
    """

    def __init__(self, address: str, worker_id: str, role: str, secret: Secret) -> None:
        self._address = address
        self._worker_id = worker_id
        self._role = role
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = open_channel(address, secret)
        self._stub = kvtransfer_pb2_grpc.KVTransferStub(self._channel)
        self.on_hold_lost: Callable[[Key], None] = lambda key: None
        self.session = 0
        self.host_id = ""
        self.source = ""
        """Where services of other hosts reach that of this one."""
        self._lease_seconds = 10.0
        self._sender = BatchSender(self._call)
        # What prefill seals is on its way to another host as soon as it is known.
        self._may_linger = role == "decode"
        self._held: dict[tuple[str, int], Key] = {}
        self._touched = TouchedBlocks()
        self._arena_path = Path()
        self._layout: KVLayout | None = None
        self._context_tokens = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self, layout: KVLayout, context_tokens: int) -> Arena:
        """Joins the arena; waits a while for the service to come up. Raises PacelineError.

        Args:
            context_tokens: of the longest context that this worker would take; an arena of automatic size has room for
                one.
        """
        self._layout, self._context_tokens = layout, context_tokens
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                call, event = await self._try_to_attach(self._attach_request(layout))
        except TimeoutError:
            raise UnavailableError(f"kvtransfer at {self._address} does not answer; is it running?") from None
        if not isinstance(event, pb.AttachEvent):
            raise UnavailableError(f"kvtransfer at {self._address} ended the session at once")
        self._take_in(event)
        self._tasks = [
            asyncio.create_task(self._watch(call), name="kv-session"),
            asyncio.create_task(self._sender.run(), name="kv-batches"),
            asyncio.create_task(self._renew(), name="kv-renewal"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._end_with)
        return Arena(event.host_id, self._arena_path, event.arena_bytes, event.slots)

    def _take_in(self, event: pb.AttachEvent) -> None:
        self.session, self._arena_path = event.session, Path(event.arena_path)
        self.host_id, self.source = event.host_id, event.address
        self._lease_seconds = event.lease_ms / 1000

    async def _try_to_attach(self, request: pb.AttachRequest) -> tuple[Stream, object]:
        """The stream and what it says first. A service that goes away meanwhile is asked again, as long as there is the
        arena that this worker has mapped: one that ends in order removes it."""
        while not request.arena_path or _exists(request.arena_path):
            call = self._stub.Attach(request, wait_for_ready=True)
            try:
                return call, await heeding_cancellation(call.read())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise unmapped_error(error, f"kvtransfer at {self._address}") from error
            except asyncio.CancelledError:
                call.cancel()
                raise
            await asyncio.sleep(random.uniform(0.05, 0.2))
        raise UnavailableError("kvtransfer has ended")

    def _attach_request(self, layout: KVLayout, **again: Any) -> pb.AttachRequest:
        return pb.AttachRequest(
            worker_id=self._worker_id,
            role=self._role,
            layout=layout_to_pb(layout),
            context_tokens=self._context_tokens,
            **again,
        )

    async def close(self) -> None:
        """Ends the session, after what was submitted has been answered; what is not in time fails."""
        await self._sender.answered(CALL_SECONDS)
        self._end()
        await end_tasks(*self._tasks)
        await self._channel.close(None)

    def holds(self, key: Key) -> bool:
        """Whether the blocks of `key` are this worker's, as far as it knows."""
        return not self.lost.done() and self._held.get(key[:2]) == key

    def use(self, key: Key) -> None:
        """The engine gets the blocks of `key`, which must be held, and may touch them until `fill` or `release`."""
        self._touched.use(key)

    async def reserve(self, key: Key, hashes: Sequence[bytes], token_count: int, max_cached_tokens: int) -> Hold:
        """Blocks for token_count tokens, the longest cached prefix among them. Raises BusyError if there are none."""
        operation = pb.Reserve(
            key=key_to_pb(key), hashes=hashes, token_count=token_count, max_cached_tokens=max_cached_tokens
        )
        return await self._obtain(pb.Operation(reserve=operation), key)

    async def open(self, key: Key) -> Hold:
        """Becomes the writer of what another worker reserved."""
        return await self._obtain(pb.Operation(open=pb.Open(key=key_to_pb(key))), _next(key))

    async def fill(self, key: Key, filled_tokens: int) -> Hold:
        """Ends writing; the blocks may be adopted with the returned key."""
        self._let_go(key)  # before: a renewal behind it would be refused and taken for a loss
        self._touched.give_back(key)
        operation = pb.Operation(fill=pb.Fill(key=key_to_pb(key), filled_tokens=filled_tokens))
        return await self._obtain(operation, key, keeps=False)

    async def adopt(self, key: Key) -> Hold:
        """Takes over filled blocks."""
        return await self._obtain(pb.Operation(adopt=pb.Adopt(key=key_to_pb(key))), _next(key))

    async def fetch(self, key: Key, source: str, source_key: Key) -> Fetched:
        """Brings over what another host computes.

        Takes as long as the prompt does. A hold whose transfer failed has ended. Cancelling ends the transfer.

        Args:
            source: address of that host's kvtransfer service.
            source_key: of the hold there.

        Raises:
            TransferError: the blocks could not be brought over.
        """
        request = pb.FetchRequest(
            session=self.session, key=key_to_pb(key), source=source, source_key=key_to_pb(source_key)
        )
        call = self._stub.Fetch(request, metadata=trace_headers())
        try:
            reply = await heeding_cancellation(call)
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {self._address}") from error
        finally:
            call.cancel()
        log.info("%d blocks came over %s", reply.blocks, reply.path, extra={"request_id": key.request_id})
        return Fetched(key_from_pb(reply.key), reply.bytes, reply.path)

    def extend(self, key: Key, token_count: int, on_answer: Callable[[Hold | PacelineError], None]) -> None:
        """Grows a hold; the answer is BusyError where there are no blocks now."""
        operation = pb.Operation(extend=pb.Extend(key=key_to_pb(key), token_count=token_count))

        def answer(done: asyncio.Future[pb.Result]) -> None:
            outcome: Hold | PacelineError
            try:
                outcome = _hold_from_pb(_checked(done.result()).hold)
                self._touched.grow(key, outcome.tables)
            except PacelineError as error:
                outcome = error
            on_answer(outcome)

        self._sender.submit(operation).add_done_callback(answer)

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        self._touched.seal(key, group, first_block, hashes)
        seal = pb.Seal(key=key_to_pb(key), group=group, first_block=first_block, hashes=hashes)
        self._tell(pb.Operation(seal=seal), self._may_linger)

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        self._touched.trim(key, group, first_kept_block)
        trim = pb.Trim(key=key_to_pb(key), group=group, first_kept_block=first_kept_block)
        self._tell(pb.Operation(trim=trim), self._may_linger)

    def release(self, key: Key) -> None:
        """Ends a hold; harmless where it has ended already."""
        self._let_go(key)
        self._touched.give_back(key)
        self._tell(pb.Operation(release=pb.Release(key=key_to_pb(key))))

    def _tell(self, operation: pb.Operation, may_linger: bool = False) -> None:
        """Submits what needs no answer; a failure is logged."""

        def note(done: asyncio.Future[pb.Result]) -> None:
            try:
                _checked(done.result())
            except PacelineError as error:
                # Stale is what a cancelled request becomes for the step that was under way.
                level = logging.DEBUG if isinstance(error, StaleError) else logging.WARNING
                name = operation.WhichOneof("op") or ""
                request_id = getattr(operation, name).key.request_id
                log.log(level, "%s was not carried out: %s", name, error, extra={"request_id": request_id})

        self._sender.submit(operation, may_linger).add_done_callback(note)

    async def _obtain(self, operation: pb.Operation, key: Key, keeps: bool = True) -> Hold:
        """Submits what yields a hold under `key`, which stays ours unless not `keeps`.

        Where the caller is cancelled meanwhile, or no answer comes, nobody here knows of the hold that may have been
        made: it is given back.
        """
        operation.traceparent = dict(trace_headers()).get("traceparent", "")
        future = self._sender.submit(operation)

        def keep(done: asyncio.Future[pb.Result]) -> None:
            # With the answer, not when the caller gets to see it: a session that breaks in between breaks this hold.
            if done.exception() is None and done.result().code == pb.CODE_OK:
                held = key_from_pb(done.result().hold.key)
                self._held[held[:2]] = held
                self._touched.obtain(held, done.result().hold)

        def give_back(done: asyncio.Future[pb.Result]) -> None:
            if done.exception() is not None or done.result().code == pb.CODE_OK:
                self.release(key)

        if keeps:
            future.add_done_callback(keep)
        try:
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(give_back)
            raise
        except UnavailableError:
            self.release(key)
            raise
        return _hold_from_pb(_checked(result).hold)

    # ---- the holds of this worker

    def _let_go(self, key: Key) -> None:
        """An older generation may come late, when the request has new blocks: those stay."""
        held = self._held.get(key[:2])
        if held is not None and held.generation <= key.generation:
            del self._held[key[:2]]

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            if self._held:
                renew = pb.Renew(keys=[key_to_pb(key) for key in self._held.values()])
                # Unanswered ones are not waited for: the next is due before a lease ends.
                self._sender.submit(pb.Operation(renew=renew)).add_done_callback(self._note_losses)

    def _note_losses(self, done: asyncio.Future[pb.Result]) -> None:
        if error := done.exception():
            log.warning("leases were not renewed: %s", error)
            return
        for key in map(key_from_pb, done.result().lost):
            if self.holds(key):
                log.warning("the lease of %s ended", key, extra={"request_id": key.request_id})
                self._let_go(key)
                self.on_hold_lost(key)

    # ---- the session

    def _call(self, operations: Sequence[pb.Operation]) -> Awaitable[pb.BatchReply]:
        return self._stub.Batch(pb.BatchRequest(session=self.session, operations=operations), timeout=CALL_SECONDS)

    async def _watch(self, call: Stream) -> None:
        """Returns when the session is over and there is no other."""
        again: Stream | None = call
        while again is not None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await again.read()  # nothing more is ever said; this ends with the session
            again = await self._come_back()
        log.info("the session with kvtransfer ended")

    async def _come_back(self) -> Stream | None:
        """The stream of a new session in the same arena; None where no service comes back to it in time.

        What is told to others meanwhile waits. So the claims are what this worker held when the session broke, and what
        has become of it since is told behind them.
        """
        self._sender.pause()
        await asyncio.sleep(0)  # until the answers that have come are where they belong
        for key in list(self._held.values()):
            if self._role != "decode" or not self._touched.is_used(key):
                self._let_go(key)
                self.on_hold_lost(key)
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                call, event = await self._try_to_attach(self._claiming_request())
        except (TimeoutError, PacelineError) as error:
            log.info("this worker cannot come back: %s", error or "no kvtransfer is started again")
            return None
        if not isinstance(event, pb.AttachEvent):
            return None
        self._take_in(event)
        self._sender.resume()
        return call

    def _claiming_request(self) -> pb.AttachRequest:
        assert self._layout is not None
        claims = self._touched.claims(self._layout, lambda key: self._held.get(key[:2]) == key)
        return self._attach_request(self._layout, arena_path=str(self._arena_path), claims=claims)

    def _end_with(self, task: asyncio.Task[None]) -> None:
        """Without any of its tasks a session is of no use."""
        if not task.cancelled() and (error := task.exception()):
            log.error("the session with kvtransfer cannot go on", exc_info=error)
        self._end()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._sender.close()
        if not self.lost.done():
            self.lost.set_result(None)


def _exists(path: str) -> bool:
    return Path(path).exists()


def _checked(result: pb.Result) -> pb.Result:
    """The result of what was carried out. Raises BusyError, StaleError, or PacelineError."""
    if result.code == pb.CODE_OK:
        return result
    if result.code == pb.CODE_EXHAUSTED:
        raise BusyError(result.message)
    if result.code == pb.CODE_INVALID:
        # Workers check what clients ask for, so this is between the two services.
        raise PacelineError(f"kvtransfer refused an operation: {result.message}")
    raise StaleError(result.message)


def _next(key: Key) -> Key:
    """What a hold is called after it changed hands."""
    return key._replace(generation=key.generation + 1)


def _hold_from_pb(hold: pb.Hold) -> Hold:
    return Hold(key_from_pb(hold.key), hold.filled_tokens, [list(table.slots) for table in hold.tables])


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    """What kvtransfer has to know of a layout."""
    groups = [
        pb.KVGroup(name=group.shape.name, block_tokens=group.block_tokens, window=group.shape.window)
        for group in layout.groups
    ]
    return pb.KVLayout(
        fingerprint=layout.fingerprint, slot_bytes=layout.slot_bytes, base_tokens=BASE_TOKENS, groups=groups
    )
