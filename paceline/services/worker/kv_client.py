"""The client with which a worker asks the kvtransfer service of its host for operations on blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc.aio

from paceline.core.context import Tail
from paceline.core.errors import PacelineError, StaleError, UnavailableError
from paceline.core.telemetry import trace_headers, traceparent
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import heeding_cancellation
from paceline.services.common.wire import key_to_pb
from paceline.services.worker.kv_session import KVSession
from paceline.services.worker.leases import (
    Adopted,
    Fetched,
    Leases,
    Reservation,
    checked,
    reservation_from_pb,
    spare_key,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class KVClient:
    """One worker's way to get, fill, share and release the blocks of its requests.

    Operations are applied in the order of the calls. Leases are renewed until they are released. Every operation ends:
    with an answer, or with UnavailableError if none came in time or the session has ended.
    """

    def __init__(self, address: str, worker_id: str, role: str, credentials: Credentials) -> None:
        self._lost_listeners: list[Callable[[Key], None]] = []
        self._leases = Leases(self._tell_lost)
        self.session = KVSession(address, worker_id, role, credentials, self._leases)
        self.take_role(role)

    def take_role(self, role: str) -> None:
        """Use the session in a role from now on. The worker must have no leases."""
        self.session.role = role
        # A prefill worker's seals do not linger, because kvtransfer sends sealed blocks to other hosts at once.
        self._may_linger = role == "decode"

    def listen(self, on_lost: Callable[[Key], None]) -> None:
        """Call `on_lost` from now on for each lease that ends before it is renewed, or that cannot be claimed from a
        service that was started again."""
        self._lost_listeners.append(on_lost)

    def _tell_lost(self, key: Key) -> None:
        for on_lost in self._lost_listeners:
            on_lost(key)

    def has(self, key: Key) -> bool:
        """Return whether this worker has a lease under `key`, as far as it knows."""
        return not self.session.lost.done() and key in self._leases

    def use(self, key: Key) -> None:
        """Give the blocks of a lease to the engine, which may touch them until `fill` or `release`."""
        self._leases.use(key)

    async def reserve(
        self,
        key: Key,
        hashes: Sequence[bytes],
        token_count: int,
        max_cached_tokens: int,
        priority: int = 0,
        encoding: bool = False,
        tails: Sequence[Tail] = (),
    ) -> Reservation:
        """Reserve blocks for `token_count` tokens, with the longest cached prefix among them.

        Args:
            hashes: links of the context.
            max_cached_tokens: the largest number of tokens that may come from the cache.
            priority: the request's priority; lower is more urgent.
            encoding: whether the context is an encoding.
            tails: tails of the context that may be cached.

        Raises:
            BusyError: there are not enough free blocks.
        """
        operation = pb.Reserve(
            key=key_to_pb(key),
            hashes=hashes,
            token_count=token_count,
            max_cached_tokens=max_cached_tokens,
            priority=priority,
            encoding=encoding,
            tails=[pb.Tail(length=tail.length, name=tail.name) for tail in tails],
        )
        return await self._obtain(pb.Operation(reserve=operation), key)

    async def pin(self, key: Key, hashes: Sequence[bytes], encoding: bool = False) -> Reservation:
        """Reserve only the cached blocks of a context's longest cached prefix, so that this worker can read them."""
        operation = pb.Reserve(key=key_to_pb(key), hashes=hashes, encoding=encoding, only_cached=True)
        return await self._obtain(pb.Operation(reserve=operation), key)

    async def open(self, key: Key) -> Reservation:
        """Become the writer of blocks that another worker has reserved under `key`."""
        opened = key._replace(generation=key.generation + 1)
        return await self._obtain(pb.Operation(open=pb.Open(key=key_to_pb(key))), opened)

    def fill(self, key: Key, filled_tokens: int, context_hash: bytes, traceparent: str = "") -> asyncio.Future[None]:
        """End writing, so that the worker which reserved the blocks gets them.

        Args:
            context_hash: name of the filled tokens (`Context.name`).
            traceparent: trace context of the request, if it is traced.

        Returns:
            A future that is done when the other worker can have the blocks.
        """
        self._leases.release(key)  # before the fill: a later renewal would be refused and look like a loss
        self.release_spare(key)
        fill = pb.Fill(key=key_to_pb(key), filled_tokens=filled_tokens, context_hash=context_hash)
        filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answer(done: asyncio.Future[pb.Result]) -> None:
            try:
                checked(done.result())
                filled.set_result(None)
            except PacelineError as error:
                if isinstance(error, UnavailableError):
                    self.release(key)  # this worker does not know whether the lease was filled
                filled.set_exception(error)

        self.session.sender.submit(pb.Operation(fill=fill, traceparent=traceparent)).add_done_callback(answer)
        return filled

    async def adopt(self, key: Key) -> Adopted:
        """Wait until blocks that this worker has reserved are filled, and take them over. Call `seal_adopted` next.

        This takes as long as computing the prompt. If it fails or is cancelled, release `key`: this ends the lease,
        adopted or not.
        """
        adopt = pb.Operation(adopt=pb.Adopt(key=key_to_pb(key)), traceparent=traceparent())
        (result,) = (await self.session.call([adopt])).results
        adoption = checked(result).adoption
        if not self.has(key):
            raise StaleError(f"the blocks of {key} were lost while they changed hands")
        return Adopted(self._leases.adopt(key, adoption), adoption.sealed_blocks)

    async def fetch(self, key: Key, source: str, source_key: Key) -> Fetched:
        """Fetch the blocks of a prompt while another host computes it.

        This takes as long as computing the prompt. If it fails, the lease has ended. Cancelling ends the transfer.

        Args:
            source: address of the other host's kvtransfer service.
            source_key: key of the lease on the other host.

        Raises:
            TransferError: the blocks could not be fetched.
        """
        request = pb.FetchRequest(
            session=self.session.id, key=key_to_pb(key), source=source, source_key=key_to_pb(source_key)
        )
        reply = await self._answer(self.session.stub.Fetch(request, metadata=trace_headers()))
        log.info("%d blocks came over %s", reply.blocks, reply.path, extra={"request_id": key.request_id})
        return Fetched(reply.bytes, reply.path)

    async def fetch_prefix(self, key: Key, source: str, hashes: Sequence[bytes], encoding: bool = False) -> None:
        """Bring blocks of a context from the disk tier or from another host into this host's cache, for `reserve`.

        Args:
            key: key under which the blocks will be reserved.
            source: address of the other host's kvtransfer service; empty to ask only the disk.
            hashes: links of the context, as many as can be reused.
            encoding: whether the context is an encoding.

        Raises:
            BusyError: there are not enough free blocks.
            TransferError: the blocks could not be fetched.
        """
        request = pb.FetchPrefixRequest(
            session=self.session.id, key=key_to_pb(key), source=source, hashes=hashes, encoding=encoding
        )
        reply = await self._answer(self.session.stub.FetchPrefix(request, metadata=trace_headers()))
        if source:
            extra = {"request_id": key.request_id}
            log.info("%d blocks of a prefix came over %s", reply.blocks, reply.path, extra=extra)

    def extend(self, key: Key, token_count: int, on_answer: Callable[[Reservation | PacelineError], None]) -> None:
        """Request blocks for `token_count` tokens in all. `on_answer` gets BusyError if too few are free."""
        operation = pb.Operation(extend=pb.Extend(key=key_to_pb(key), token_count=token_count))

        def answer(done: asyncio.Future[pb.Result]) -> None:
            outcome: Reservation | PacelineError
            try:
                outcome = reservation_from_pb(checked(done.result()).lease)
                self._leases.grow(key, outcome.tables)
            except PacelineError as error:
                outcome = error
            on_answer(outcome)

        self.session.sender.submit(operation).add_done_callback(answer)

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        """Publish full blocks of one group under their names."""
        self._leases.seal(key, group, first_block, hashes)
        seal = pb.Seal(key=key_to_pb(key), group=group, first_block=first_block, hashes=hashes)
        self._submit(pb.Operation(seal=seal), self._may_linger)

    async def publish(self, key: Key, hashes: Sequence[bytes]) -> None:
        """Publish all blocks of an encoding under their names. Other workers find them when this returns.

        Raises StaleError if kvtransfer does not know the lease, UnavailableError if it does not answer.
        """
        self._leases.seal(key, 0, 0, hashes)
        seal = pb.Operation(seal=pb.Seal(key=key_to_pb(key), hashes=hashes), traceparent=traceparent())
        checked(await asyncio.shield(self.session.sender.submit(seal)))

    def seal_adopted(self, adopted: Adopted, hashes: Sequence[Sequence[bytes]]) -> None:
        """Publish full blocks that the prefill worker has left unsealed.

        Args:
            hashes: for each group, the names of all full blocks.
        """
        key = adopted.reservation.key
        for group, (names, sealed) in enumerate(zip(hashes, adopted.sealed_blocks)):
            self._leases.seal(key, group, 0, names)
            if left := names[sealed:]:
                seal = pb.Seal(key=key_to_pb(key), group=group, first_block=sealed, hashes=left)
                self._submit(pb.Operation(seal=seal))

    async def reserve_spare(self, key: Key) -> list[int]:
        """Reserve one block for each group, for copies of the blocks at a tail of a request; see `keep`.

        They are given back with the request's own blocks. Returns their slots. Returns an empty list if they are not
        available.
        """
        spare = spare_key(key)
        try:
            reservation = await self.reserve(spare, [], token_count=1, max_cached_tokens=0)
        except PacelineError as error:
            log.debug("the end of the prompt is not kept: %s", error, extra={"request_id": key.request_id})
            return []
        if not self.has(spare):
            return []
        self.use(spare)
        return [slot for (slot,) in reservation.tables]

    def keep(self, key: Key, tail: Tail, copied: bool = False) -> None:
        """Publish the blocks at a tail of a context that are not full, and give them up.

        Args:
            copied: whether the tail is a copy in the spare blocks. If not, call `release` next.
        """
        keep = pb.Keep(key=key_to_pb(key), tail=pb.Tail(length=tail.length, name=tail.name))
        if copied:
            if (spare := self._leases.spare_of(key)) is None:
                return
            keep.copies.CopyFrom(key_to_pb(spare))
        self._submit(pb.Operation(keep=keep))
        if copied:
            self.release_spare(key)

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        """Release the blocks of a windowed group that come before `first_kept_block`."""
        self._leases.trim(key, group, first_kept_block)
        trim = pb.Trim(key=key_to_pb(key), group=group, first_kept_block=first_kept_block)
        self._submit(pb.Operation(trim=trim), self._may_linger)

    def release(self, key: Key) -> None:
        """End a lease, and the lease of its spare blocks. Releasing a lease that has ended is no error."""
        self._leases.release(key)
        self._submit(pb.Operation(release=pb.Release(key=key_to_pb(key))))
        self.release_spare(key)

    def release_spare(self, key: Key) -> None:
        """Give up the spare blocks of a request, if it has any."""
        if (spare := self._leases.spare_of(key)) is not None:
            self.release(spare)

    async def leave(self, seconds: float) -> None:
        """Announce that this worker is about to leave. If it is the last one of its host, wait up to `seconds` until
        other hosts have copied the hot prefixes. A failure costs the other hosts only time, so it is logged.
        """
        call = self.session.stub.Leave(pb.LeaveRequest(session=self.session.id), timeout=max(seconds, 0.1))
        try:
            await self._answer(call)
        except PacelineError as error:
            log.info("the hot prefixes of this host were not all copied: %s", error)

    async def _answer(self, call: grpc.aio.UnaryUnaryCall[Any, T]) -> T:
        """Return the reply of a long call. The call ends if the caller is cancelled."""
        try:
            return await heeding_cancellation(call)
        except grpc.aio.AioRpcError as error:
            raise unmapped_error(error, f"kvtransfer at {self.session.address}") from error
        finally:
            call.cancel()

    def _submit(self, operation: pb.Operation, may_linger: bool = False) -> None:
        """Send an operation whose answer nobody waits for. A failure is logged."""

        def note(done: asyncio.Future[pb.Result]) -> None:
            try:
                checked(done.result())
            except PacelineError as error:
                # The operation may come from a step that was under way when its request was cancelled.
                level = logging.DEBUG if isinstance(error, StaleError) else logging.WARNING
                name = operation.WhichOneof("op") or ""
                request_id = getattr(operation, name).key.request_id
                log.log(level, "%s was not carried out: %s", name, error, extra={"request_id": request_id})

        self.session.sender.submit(operation, may_linger).add_done_callback(note)

    async def _obtain(self, operation: pb.Operation, key: Key) -> Reservation:
        """Send an operation that gives a lease under `key`.

        If the caller is cancelled or no answer comes, the worker does not know whether it has a lease, and releases it.
        """
        operation.traceparent = traceparent()
        future = self.session.sender.submit(operation)

        def keep(done: asyncio.Future[pb.Result]) -> None:
            # Added with the answer, before the caller sees it: if the session breaks in between, this lease ends, too.
            if done.exception() is None and done.result().code == pb.CODE_OK:
                self._leases.add(done.result().lease)

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
        return reservation_from_pb(checked(result).lease)
