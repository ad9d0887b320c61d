"""A worker's side of kvtransfer: blocks for its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc.aio

from paceline.core.errors import PacelineError, StaleError, UnavailableError
from paceline.core.kv_layout import KVLayout
from paceline.core.telemetry import trace_headers, traceparent
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.rpc import heeding_cancellation, unmapped_error
from paceline.services.common.secret import Secret
from paceline.services.common.wire import key_to_pb
from paceline.services.worker.kv_answers import Adopted, Fetched, Hold, checked, hold_from_pb
from paceline.services.worker.kv_holds import KVHolds
from paceline.services.worker.kv_session import Arena, KVSession

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        self.on_hold_lost: Callable[[Key], None] = lambda key: None
        self._address = address
        self._holds = KVHolds(lambda key: self.on_hold_lost(key))
        self._session = KVSession(address, worker_id, role, secret, self._holds)
        self.lost = self._session.lost
        # What prefill seals is on its way to another host as soon as it is known.
        self._may_linger = role == "decode"

    async def attach(self, layout: KVLayout, context_tokens: int) -> Arena:
        """See `KVSession.attach`."""
        return await self._session.attach(layout, context_tokens)

    async def close(self) -> None:
        """See `KVSession.close`."""
        await self._session.close()

    @property
    def session(self) -> int:
        return self._session.id

    @property
    def host_id(self) -> str:
        return self._session.host_id

    @property
    def source(self) -> str:
        """Where services of other hosts reach that of this one."""
        return self._session.source

    @property
    def has_disk(self) -> bool:
        """Whether there is a tier below this host's arena."""
        return self._session.has_disk

    def holds(self, key: Key) -> bool:
        """Whether the blocks of `key` are this worker's, as far as it knows."""
        return not self.lost.done() and key in self._holds

    def use(self, key: Key) -> None:
        """The engine gets the blocks of `key`, which must be held, and may touch them until `fill` or `release`."""
        self._holds.blocks.use(key)

    async def reserve(
        self, key: Key, hashes: Sequence[bytes], token_count: int, max_cached_tokens: int, priority: int = 0
    ) -> Hold:
        """Blocks for token_count tokens, the longest cached prefix among them. Raises BusyError if there are none."""
        operation = pb.Reserve(
            key=key_to_pb(key),
            hashes=hashes,
            token_count=token_count,
            max_cached_tokens=max_cached_tokens,
            priority=priority,
        )
        return await self._obtain(pb.Operation(reserve=operation), key)

    async def open(self, key: Key) -> Hold:
        """Becomes the writer of what another worker reserved."""
        return await self._obtain(pb.Operation(open=pb.Open(key=key_to_pb(key))), _next(key))

    def fill(self, key: Key, filled_tokens: int, context_hash: bytes, traceparent: str = "") -> asyncio.Future[None]:
        """Ends writing; the one who reserved the blocks gets them. What is returned is done when it does.

        Args:
            context_hash: names these tokens (`Context.name`).
            traceparent: of the request, where it is traced.
        """
        self._holds.let_go(key)  # before: a renewal behind it would be refused and taken for a loss
        self._holds.blocks.give_back(key)
        fill = pb.Fill(key=key_to_pb(key), filled_tokens=filled_tokens, context_hash=context_hash)
        filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answer(done: asyncio.Future[pb.Result]) -> None:
            try:
                checked(done.result())
                filled.set_result(None)
            except PacelineError as error:
                if isinstance(error, UnavailableError):
                    self.release(key)  # nobody here knows whether it was filled
                filled.set_exception(error)

        self._session.sender.submit(pb.Operation(fill=fill, traceparent=traceparent)).add_done_callback(answer)
        return filled

    async def adopt(self, key: Key) -> Adopted:
        """Takes over blocks that this worker has reserved, as soon as they are filled. `seal_adopted` belongs to it.

        Takes as long as the prompt does. Where it fails or is cancelled, releasing `key` ends the hold in either case.
        """
        adopt = pb.Operation(adopt=pb.Adopt(key=key_to_pb(key)), traceparent=traceparent())
        (result,) = (await self._session.call([adopt])).results
        adoption = checked(result).adoption
        if not self.holds(key):
            raise StaleError(f"the blocks of {key} were lost while they changed hands")
        adopted, tables = self._holds.adopt(key, adoption)
        return Adopted(Hold(adopted, adoption.filled_tokens, tables, adoption.context_hash), adoption.sealed_blocks)

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
        reply = await self._answer(self._session.stub.Fetch(request, metadata=trace_headers()))
        log.info("%d blocks came over %s", reply.blocks, reply.path, extra={"request_id": key.request_id})
        return Fetched(reply.bytes, reply.path)

    async def fetch_prefix(self, key: Key, source: str, hashes: Sequence[bytes]) -> None:
        """Brings into this host's cache what its disk or another host has of a context; `reserve` finds it then.

        Args:
            key: of the request that will be reserved.
            source: address of that host's kvtransfer service; empty where only the disk is to be asked.
            hashes: chain of the context, no more of it than can be reused.

        Raises:
            BusyError: there is no room for it.
            TransferError: it could not be brought over.
        """
        request = pb.FetchPrefixRequest(session=self.session, key=key_to_pb(key), source=source, hashes=hashes)
        reply = await self._answer(self._session.stub.FetchPrefix(request, metadata=trace_headers()))
        if source:
            extra = {"request_id": key.request_id}
            log.info("%d blocks of a prefix came over %s", reply.blocks, reply.path, extra=extra)

    def extend(self, key: Key, token_count: int, on_answer: Callable[[Hold | PacelineError], None]) -> None:
        """Grows a hold; the answer is BusyError where there are no blocks now."""
        operation = pb.Operation(extend=pb.Extend(key=key_to_pb(key), token_count=token_count))

        def answer(done: asyncio.Future[pb.Result]) -> None:
            outcome: Hold | PacelineError
            try:
                outcome = hold_from_pb(checked(done.result()).hold)
                self._holds.blocks.grow(key, outcome.tables)
            except PacelineError as error:
                outcome = error
            on_answer(outcome)

        self._session.sender.submit(operation).add_done_callback(answer)

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        self._holds.blocks.seal(key, group, first_block, hashes)
        seal = pb.Seal(key=key_to_pb(key), group=group, first_block=first_block, hashes=hashes)
        self._tell(pb.Operation(seal=seal), self._may_linger)

    def seal_adopted(self, adopted: Adopted, hashes: Sequence[Sequence[bytes]]) -> None:
        """Publishes full blocks that the prefill worker has left unsealed.

        Args:
            hashes: for each group those of all full blocks.
        """
        for group, (names, sealed) in enumerate(zip(hashes, adopted.sealed_blocks)):
            self._holds.blocks.seal(adopted.hold.key, group, 0, names)
            if left := names[sealed:]:
                seal = pb.Seal(key=key_to_pb(adopted.hold.key), group=group, first_block=sealed, hashes=left)
                self._tell(pb.Operation(seal=seal))

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        self._holds.blocks.trim(key, group, first_kept_block)
        trim = pb.Trim(key=key_to_pb(key), group=group, first_kept_block=first_kept_block)
        self._tell(pb.Operation(trim=trim), self._may_linger)

    def release(self, key: Key) -> None:
        """Ends a hold; harmless where it has ended already."""
        self._holds.give_back(key)
        self._tell(pb.Operation(release=pb.Release(key=key_to_pb(key))))

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Any, T]) -> T:
        """Of a call that takes its time. Ends it where nobody waits for it any more."""
        try:
            return await heeding_cancellation(call)
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {self._address}") from error
        finally:
            call.cancel()

    def _tell(self, operation: pb.Operation, may_linger: bool = False) -> None:
        """Submits what needs no answer; a failure is logged."""

        def note(done: asyncio.Future[pb.Result]) -> None:
            try:
                checked(done.result())
            except PacelineError as error:
                # Stale is what a cancelled request becomes for the step that was under way.
                level = logging.DEBUG if isinstance(error, StaleError) else logging.WARNING
                name = operation.WhichOneof("op") or ""
                request_id = getattr(operation, name).key.request_id
                log.log(level, "%s was not carried out: %s", name, error, extra={"request_id": request_id})

        self._session.sender.submit(operation, may_linger).add_done_callback(note)

    async def _obtain(self, operation: pb.Operation, key: Key) -> Hold:
        """Submits what yields a hold under `key`.

        Where the caller is cancelled meanwhile, or no answer comes, nobody here knows of the hold that may have been
        made: it is given back.
        """
        operation.traceparent = traceparent()
        future = self._session.sender.submit(operation)

        def keep(done: asyncio.Future[pb.Result]) -> None:
            # With the answer, not when the caller gets to see it: a session that breaks in between breaks this hold.
            if done.exception() is None and done.result().code == pb.CODE_OK:
                self._holds.keep(done.result().hold)

        def give_back(done: asyncio.Future[pb.Result]) -> None:
            if done.exception() is not None or done.result().code == pb.CODE_OK:
                self.release(key)

        future.add_done_callback(keep)
        try:
            result = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(give_back)
            raise
        except UnavailableError:
            self.release(key)
            raise
        return hold_from_pb(checked(result).hold)


def _next(key: Key) -> Key:
    """What a hold is called after it changed hands."""
    return key._replace(generation=key.generation + 1)
