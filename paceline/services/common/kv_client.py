"""A worker's side of kvtransfer: blocks for its requests, in order and in batches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc.aio

from paceline.core.errors import BusyError, PacelineError, StaleError, UnavailableError
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.telemetry import trace_headers
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc
from paceline.services.common.rpc import open_channel, unmapped_error
from paceline.services.common.wire import key_from_pb, key_to_pb

ATTACH_SECONDS = 60.0
"""kvtransfer may start after its workers."""
CALL_SECONDS = 5.0
RETRY_SECONDS = 0.1
MAX_OPERATIONS = 512
"""In one batch, so that no message grows without bound."""

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


_Outcome = Hold | PacelineError | None


@dataclass(frozen=True, slots=True)
class _Submitted:
    operation: pb.Operation
    future: asyncio.Future[Hold | None]


class KVClient:
    """One worker's session with its host's kvtransfer service.

    Operations are applied in the order of the calls. Holds are renewed until they are released. Every operation comes
    to an end: an answer, or UnavailableError where none came in time, the session has broken or was closed.

    `lost` is done when the session has broken: every hold is void from then on. `on_hold_lost` is called for a hold
    whose lease ended before it was renewed.
    """

    def __init__(self, address: str, worker_id: str, role: str) -> None:
        self._address = address
        self._worker_id = worker_id
        self._role = role
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = open_channel(address)
        self._stub = kvtransfer_pb2_grpc.KVTransferStub(self._channel)
        self.on_hold_lost: Callable[[Key], None] = lambda key: None
        self._session = 0
        self._lease_seconds = 10.0
        self._open = False
        self._queue: asyncio.Queue[_Submitted] = asyncio.Queue()
        self._unanswered: set[asyncio.Future[Hold | None]] = set()
        self._held: dict[tuple[str, int], Key] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def attach(self, layout: KVLayout) -> Arena:
        """Joins the arena; waits a while for the service to come up. Raises PacelineError."""
        request = pb.AttachRequest(worker_id=self._worker_id, role=self._role, layout=_layout_to_pb(layout))
        call = self._stub.Attach(request, wait_for_ready=True)
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                event = await call.read()
        except TimeoutError:
            call.cancel()
            raise UnavailableError(f"kvtransfer at {self._address} does not answer; is it running?") from None
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {self._address}") from error
        if not isinstance(event, pb.AttachEvent):
            raise UnavailableError(f"kvtransfer at {self._address} ended the session at once")
        self._session = event.session
        self._lease_seconds = event.lease_ms / 1000
        self._open = True
        self._tasks = [
            asyncio.create_task(self._watch(call), name="kv-session"),
            asyncio.create_task(self._send_batches(), name="kv-batches"),
            asyncio.create_task(self._renew(), name="kv-renewal"),
        ]
        return Arena(event.host_id, Path(event.arena_path), event.arena_bytes, event.slots)

    async def close(self) -> None:
        """Ends the session, after what was submitted has been answered; what is not in time fails."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=CALL_SECONDS)
        self._open = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in [future for future in self._unanswered if not future.done()]:
            future.set_exception(_closed())
        await self._channel.close(None)

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
        hold = await self._obtain(pb.Operation(fill=pb.Fill(key=key_to_pb(key), filled_tokens=filled_tokens)), key)
        self._held.pop(key[:2], None)
        return hold

    async def adopt(self, key: Key) -> Hold:
        """Takes over filled blocks."""
        return await self._obtain(pb.Operation(adopt=pb.Adopt(key=key_to_pb(key))), _next(key))

    def extend(self, key: Key, token_count: int, on_answer: Callable[[Hold | PacelineError], None]) -> None:
        """Grows a hold; the answer is BusyError where there are no blocks now."""
        future = self._submit(pb.Operation(extend=pb.Extend(key=key_to_pb(key), token_count=token_count)))

        def answer(done: asyncio.Future[Hold | None]) -> None:
            error = done.exception()
            on_answer(error if isinstance(error, PacelineError) else cast(Hold, done.result()))

        future.add_done_callback(answer)

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        self._tell(pb.Operation(seal=pb.Seal(key=key_to_pb(key), group=group, first_block=first_block, hashes=hashes)))

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        self._tell(pb.Operation(trim=pb.Trim(key=key_to_pb(key), group=group, first_kept_block=first_kept_block)))

    def release(self, key: Key) -> None:
        """Ends a hold; harmless where it has ended already."""
        self._held.pop(key[:2], None)
        self._tell(pb.Operation(release=pb.Release(key=key_to_pb(key))))

    def _submit(self, operation: pb.Operation) -> asyncio.Future[Hold | None]:
        future: asyncio.Future[Hold | None] = asyncio.get_running_loop().create_future()
        if self._open:
            self._unanswered.add(future)
            future.add_done_callback(self._unanswered.discard)
            self._queue.put_nowait(_Submitted(operation, future))
        else:
            future.set_exception(_closed())
        return future

    def _tell(self, operation: pb.Operation) -> None:
        """Submits what needs no answer; a failure is logged."""

        def note(done: asyncio.Future[Hold | None]) -> None:
            if not done.cancelled() and (error := done.exception()):
                # Stale is what a cancelled request becomes for the step that was under way.
                level = logging.DEBUG if isinstance(error, StaleError) else logging.WARNING
                name = operation.WhichOneof("op") or ""
                extra = {} if name == "renew" else {"request_id": getattr(operation, name).key.request_id}
                log.log(level, "%s was not carried out: %s", name, error, extra=extra)

        self._submit(operation).add_done_callback(note)

    async def _obtain(self, operation: pb.Operation, key: Key) -> Hold:
        """Submits what yields a hold under `key`.

        Where the caller is cancelled meanwhile, or no answer comes, nobody here knows of the hold that may have been
        made: it is given back.
        """
        operation.traceparent = dict(trace_headers()).get("traceparent", "")
        future = self._submit(operation)

        def give_back(done: asyncio.Future[Hold | None]) -> None:
            if not done.cancelled() and (done.exception() is None or isinstance(done.exception(), UnavailableError)):
                self.release(key)

        try:
            hold = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(give_back)
            raise
        except UnavailableError:
            self.release(key)
            raise
        assert hold is not None
        self._held[hold.key[:2]] = hold.key
        return hold

    async def _send_batches(self) -> None:
        again: list[_Submitted] = []
        while True:
            # Releases that met no answer keep their place: what comes behind them may need what they free.
            batch = again or [await self._queue.get()]
            while not self._queue.empty() and len(batch) < MAX_OPERATIONS:
                batch.append(self._queue.get_nowait())
            outcomes = await self._send([each.operation for each in batch])
            again = [each for each, outcome in zip(batch, outcomes) if not self._settle(each, outcome)]

    async def _send(self, operations: list[pb.Operation]) -> list[_Outcome]:
        try:
            request = pb.BatchRequest(session=self._session, operations=operations)
            reply = await self._stub.Batch(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            await asyncio.sleep(RETRY_SECONDS)
            return [UnavailableError(f"kvtransfer: {error.details()}")] * len(operations)
        self._note_losses(reply)
        return [_outcome(result) for result in reply.results]

    def _settle(self, submitted: _Submitted, outcome: _Outcome) -> bool:
        """Tells who waits for it. False for a release to send again: what nobody needs must not stay held."""
        unanswered = isinstance(outcome, UnavailableError)
        if unanswered and submitted.operation.HasField("release") and not self.lost.done():
            return False
        if isinstance(outcome, PacelineError):
            submitted.future.set_exception(outcome)
        else:
            submitted.future.set_result(outcome)
        return True

    def _note_losses(self, reply: pb.BatchReply) -> None:
        for key in (key_from_pb(key) for result in reply.results for key in result.lost):
            if self._held.get(key[:2]) == key:
                log.warning("the lease of %s ended", key, extra={"request_id": key.request_id})
                del self._held[key[:2]]
                self.on_hold_lost(key)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            if self._held:
                self._tell(pb.Operation(renew=pb.Renew(keys=[key_to_pb(key) for key in self._held.values()])))

    async def _watch(self, call: grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.AttachEvent]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()  # nothing more is ever said; this ends with the session
        log.info("the session with kvtransfer ended")
        self.lost.set_result(None)


def _closed() -> UnavailableError:
    return UnavailableError("this worker has no session with kvtransfer")


def _outcome(result: pb.Result) -> _Outcome:
    if result.code == pb.CODE_OK:
        return _hold_from_pb(result.hold) if result.HasField("hold") else None
    if result.code == pb.CODE_EXHAUSTED:
        return BusyError(result.message)
    if result.code == pb.CODE_INVALID:
        # Workers check what clients ask for, so this is between the two services.
        return PacelineError(f"kvtransfer refused an operation: {result.message}")
    return StaleError(result.message)


def _next(key: Key) -> Key:
    """What a hold is called after it changed hands."""
    return key._replace(generation=key.generation + 1)


def _hold_from_pb(hold: pb.Hold) -> Hold:
    return Hold(key_from_pb(hold.key), hold.filled_tokens, [list(table.slots) for table in hold.tables])


def _layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    groups = [
        pb.KVGroup(name=group.shape.name, block_tokens=group.block_tokens, window=group.shape.window)
        for group in layout.groups
    ]
    return pb.KVLayout(
        fingerprint=layout.fingerprint, slot_bytes=layout.slot_bytes, base_tokens=BASE_TOKENS, groups=groups
    )
