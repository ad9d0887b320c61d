"""The kvtransfer service: its RPC methods and its socket for workers, on top of the host's sessions and KV memory."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.telemetry import carrier_of, request_span
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.layout import layout_to_pb
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.streams import BlockBatch
from paceline.services.common.wire_version import OURS
from paceline.services.kvtransfer.departure import Departure, FindHosts, no_hosts
from paceline.services.kvtransfer.host_memory import HostMemory, HostOptions
from paceline.services.kvtransfer.host_socket import HostSocket, Reply
from paceline.services.kvtransfer.keeper import Keeper
from paceline.services.kvtransfer.ledger.adoptions import Waiter
from paceline.services.kvtransfer.ledger.hints import expectation_from_pb
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease
from paceline.services.kvtransfer.ledger.owners import count_groups, count_owners, describe_leases
from paceline.services.kvtransfer.operations import adopted, apply, changed_leases, key_of
from paceline.services.kvtransfer.sessions import Sessions
from paceline.services.kvtransfer.snapshot import MemorySnapshot, snapshot_of

_MAX_OPERATIONS = 4096
"""Largest number of operations in one batch. The service does nothing else while it applies a batch."""

_MAX_EXPECTATIONS = 4096
"""Largest number of expectations in one message."""

_MAX_NAMES = 1 << 15
"""Largest number of block names in one message."""

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class KVTransferService(pb_grpc.KVTransferServicer):
    """Serves the workers of one host, services of other hosts, and gateways, from `start` to `close`."""

    def __init__(self, options: HostOptions) -> None:
        self.sessions = Sessions(options)
        self._keeper = Keeper(self.sessions, options.clock)
        self.socket = HostSocket(options.arena_dir, self.serve)
        self._options = options
        self._address = ""
        self.departure = Departure(self.sessions, no_hosts, "")

    async def start(self, address: str = "", find_hosts: FindHosts = no_hosts) -> None:
        """Start the service, before workers can attach.

        Args:
            address: address at which services of other hosts reach this one.
            find_hosts: finds the hosts that get the hot prefixes of this host before it leaves.

        Raises:
            ConfigError: the arena, the disk tier's file or the socket cannot be made.
        """
        self._address = address
        self.departure = Departure(self.sessions, find_hosts, address)
        self.sessions.start()
        await self.socket.start()
        self._keeper.start()

    async def close(self) -> None:
        """End all sessions and remove the arena. Later calls are refused."""
        await self._keeper.stop()
        await self.departure.close()
        await self.socket.close()
        await self.sessions.close()

    @property
    def healthy(self) -> bool:
        """False after the ledger was found inconsistent. Then only a restart helps."""
        return self._keeper.healthy

    def snapshot(self) -> MemorySnapshot:
        memory = self.sessions.memory
        return MemorySnapshot() if memory is None else snapshot_of(memory, len(self.sessions.workers))

    def take_events(self) -> BlockBatch | None:
        """Return the block events since the last call, or None. Also offer the blocks to the disk tier."""
        memory = self.sessions.memory
        if memory is None or not (events := memory.ledger.take_events()):
            return None
        if memory.disk is not None:
            memory.disk.offer(events)
        first = memory.ledger.event_count - len(events)
        return BlockBatch(self._options.host_id, memory.pool_id, first, tuple(events))

    # ---- RPC methods, and the socket

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.AttachEvent]:
        async with mapped_errors(context):
            # Random, so that a session of an earlier service on this host is not mistaken for one of this service.
            session = secrets.randbits(63) | 1
            try:
                memory = await self.sessions.enter(session, request)
                yield pb.AttachEvent(
                    session=session,
                    host_id=self._options.host_id,
                    arena_path=str(memory.arena.path),
                    arena_bytes=memory.arena.size,
                    slots=memory.ledger.counts().total,
                    lease_ms=round(self._options.lease_seconds * 1000),
                    address=self._address,
                    has_disk=memory.disk is not None,
                    socket_path=str(self.socket.path),
                    wire=OURS.to_pb(),
                )
                await self.sessions.leaving.wait()
                if not self.sessions.closing.is_set():
                    yield pb.AttachEvent(leaving=True)
                    await self.sessions.closing.wait()
                raise UnavailableError("the kvtransfer service is stopping")
            finally:
                self.sessions.leave(session)
                self._keeper.note_change()

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        async with mapped_errors(context):
            return pb.LeaveReply(blocks=await self.departure.leave(request.session))
        raise AssertionError("mapped_errors ended the call")

    async def SetAsleep(self, request: pb.SetAsleepRequest, context: Context) -> pb.SetAsleepReply:
        async with mapped_errors(context):
            self._keeper.note_change()
            await self.sessions.set_asleep(request.session, request.asleep)
        return pb.SetAsleepReply()

    async def CopyPrefixes(self, request: pb.CopyPrefixesRequest, context: Context) -> pb.CopyPrefixesReply:
        async with mapped_errors(context):
            memory = self._exporting(request.fingerprint)
            chains = [list(chain.hashes) for chain in request.prefixes]
            return pb.CopyPrefixesReply(blocks=await memory.prefixes.copy(request.source, chains))
        raise AssertionError("mapped_errors ended the call")

    def serve(self, request: pb.BatchRequest, reply: Reply) -> None:
        """Apply a batch and reply at once, or reply to an adoption when its lease is filled.

        Raises PacelineError if the session has ended, InvalidRequestError if the batch is invalid.
        """
        memory = self.sessions.check(request.session)
        if len(request.operations) > _MAX_OPERATIONS:
            raise InvalidRequestError(f"a batch may have {_MAX_OPERATIONS} operations, not {len(request.operations)}")
        if any(each.HasField("adopt") for each in request.operations):
            if len(request.operations) > 1:
                raise InvalidRequestError("an adoption must be the only operation of its request")
            self._adopt(memory, request.session, request.operations[0], reply)
            return
        self._keeper.note_change()
        now = self._options.clock()
        results = [apply(memory.ledger, request.session, each, now) for each in request.operations]
        for key in changed_leases(request.operations):
            memory.adoptions.note(key)
            memory.exports.note(key)
        reply(pb.BatchReply(results=results))

    def _adopt(self, memory: HostMemory, session: int, operation: pb.Operation, reply: Reply) -> None:
        began = time.time_ns()

        def tell(outcome: Lease | PacelineError) -> None:
            self._keeper.note_change()
            reply(pb.BatchReply(results=[adopted(memory.ledger, operation, outcome, began)]))

        try:
            key = key_of(operation.adopt.key)
        except InvalidRequestError as error:
            tell(error)
        else:
            memory.adoptions.wait(Waiter(session, key, tell, reply.can_be_sent))

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchReply:
        async with mapped_errors(context):
            memory = self.sessions.check(request.session)
            key, source_key = key_of(request.key), key_of(request.source_key)
            with request_span("fetch", key.request_id, carrier_of(context.invocation_metadata())) as span:
                reply = await memory.fetches.run(request.session, key, request.source, source_key)
                span.set_attributes({"paceline.path": reply.path, "paceline.bytes": reply.bytes})
                log.info("%d blocks came from %s over %s", reply.blocks, request.source, reply.path)
                return reply
        raise AssertionError("mapped_errors ended the call")

    async def FetchPrefix(self, request: pb.FetchPrefixRequest, context: Context) -> pb.FetchReply:
        async with mapped_errors(context):
            memory = self.sessions.check(request.session)
            key = key_of(request.key)
            with request_span("fetch prefix", key.request_id, carrier_of(context.invocation_metadata())) as span:
                reply = await memory.prefixes.bring(key, request.source, request.hashes, request.encoding)
                span.set_attributes({"paceline.path": reply.path, "paceline.bytes": reply.bytes})
                if reply.blocks:
                    log.info("%d blocks of a prefix came from %s over %s", reply.blocks, request.source, reply.path)
                return reply
        raise AssertionError("mapped_errors ended the call")

    async def ExportPrefix(self, request: pb.ExportPrefixRequest, context: Context) -> None:  # type: ignore[override]
        async with mapped_errors(context):
            memory, key = self._exporting(request.fingerprint), key_of(request.key)
            with request_span("export prefix", key.request_id, carrier_of(context.invocation_metadata())):
                cached_tokens, encoding = request.cached_tokens, request.encoding
                with self.departure.readers.running():
                    await memory.exports.run_prefix(key, request.hashes, cached_tokens, context.write, encoding)

    async def Export(self, request: pb.ExportRequest, context: Context) -> None:  # type: ignore[override]
        # It writes to the context rather than yield, so that a cancellation arrives wherever this waits.
        async with mapped_errors(context):
            memory, key = self._exporting(request.fingerprint), key_of(request.key)
            carrier = carrier_of(context.invocation_metadata())
            with request_span("export", key.request_id, carrier), self.departure.readers.running():
                await memory.exports.run(key, request.cached_tokens, context.write)

    def _exporting(self, fingerprint: str) -> HostMemory:
        """Return the memory to export from. Raises PacelineError if there is none or its layout is not the reader's."""
        memory = self.sessions.need_memory()
        if fingerprint != memory.layout.fingerprint:
            raise PacelineError(
                "the KV blocks of these hosts differ; all workers of a cluster must serve the same model with the same "
                "dtype and version"
            )
        return memory

    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # type: ignore[override]
        async with mapped_errors(context):
            await self.sessions.need_memory().grpc.send(request, context.write)

    async def Reusable(self, request: pb.ReusableRequest, context: Context) -> AsyncIterator[pb.ReusableReply]:
        # Everything is collected before anything is awaited, so that the reply shows the state of one moment.
        pool, names = pb.Pool(), list[list[bytes]]()
        if (memory := self.sessions.memory) is not None:
            layout, ledger = layout_to_pb(memory.layout), memory.ledger
            pool = pb.Pool(id=memory.pool_id, next_event=ledger.event_count, layout=layout)
            names = ledger.reusable()
        yield pb.ReusableReply(pool=pool)
        for group, hashes in enumerate(names):
            for start in range(0, len(hashes), _MAX_NAMES):
                part = b"".join(hashes[start : start + _MAX_NAMES])
                yield pb.ReusableReply(names=pb.BlockNames(group=group, hashes=part))

    async def Expect(self, request: pb.ExpectRequest, context: Context) -> pb.ExpectReply:
        async with mapped_errors(context):
            if len(request.expectations) > _MAX_EXPECTATIONS:
                raise InvalidRequestError(f"a message may have {_MAX_EXPECTATIONS} expectations")
            for message in request.expectations:
                links, hints = expectation_from_pb(message)
                if (memory := self.sessions.memory) is not None:
                    await memory.expect(links, hints)
        return pb.ExpectReply()

    async def ResetCache(self, request: pb.ResetCacheRequest, context: Context) -> pb.ResetCacheReply:
        if (memory := self.sessions.memory) is None:
            return pb.ResetCacheReply()
        self._keeper.note_change()
        blocks = memory.ledger.forget()
        disk_blocks = 0 if memory.disk is None else memory.disk.forget()
        log.info("forgot %d cached blocks of the arena and %d of the disk tier", blocks, disk_blocks)
        return pb.ResetCacheReply(blocks=blocks, disk_blocks=disk_blocks)

    async def Ledger(self, request: pb.LedgerRequest, context: Context) -> pb.LedgerReply:
        snapshot = self.snapshot()
        reply = pb.LedgerReply(
            host_id=self._options.host_id,
            **snapshot.counts._asdict(),
            balanced=self._keeper.healthy if request.brief else self._keeper.check_balance(),
            expired_leases=snapshot.expired_leases,
            evicted_blocks=snapshot.evicted_blocks,
            prefix_queries_tokens=snapshot.prefixes.queried_tokens,
            prefix_hits_tokens=snapshot.prefixes.cached_tokens,
            encoding_queries_rows=snapshot.encodings.queried_tokens,
            encoding_hits_rows=snapshot.encodings.cached_tokens,
            slot_bytes=snapshot.slot_bytes,
            hinted_blocks=snapshot.hints.hinted,
            hinted_kept_blocks=snapshot.hints.kept,
            hinted_wasted_blocks=snapshot.hints.wasted,
        )
        if (memory := self.sessions.memory) is not None:
            leases, names = memory.ledger.leases(), {TRANSFER: "kvtransfer", **self.sessions.workers}
            reply.MergeFrom(count_owners(leases, names))
            if not request.brief:
                reply.MergeFrom(count_groups(leases, memory.ledger.cached(), memory.layout))
            if request.with_leases and not request.brief:
                reply.MergeFrom(describe_leases(leases, names, request.max_leases, self._options.clock()))
        return reply
