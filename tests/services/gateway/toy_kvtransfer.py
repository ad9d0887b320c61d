"""The kvtransfer service of a toy worker."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from paceline.core.context import Context
from paceline.proto import common_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc
from paceline.services.common.secret import Secret
from paceline.services.gateway.http.access.callers import ANYONE
from paceline.services.gateway.planning.sharing import CacheSalts


def salt_of(wanted: str = "") -> str:
    """Return the salt of requests without a key, in a cluster without a secret."""
    return CacheSalts(Secret()).salt(ANYONE, wanted)


class ToyKVTransfer(kvtransfer_pb2_grpc.KVTransferServicer):
    """A kvtransfer service with a fixed ledger, and with the blocks of one context."""

    host_id: str
    layout: str
    pause_after: int | None
    """If it is 0, a call of Ledger is not answered until `resume` is set."""
    resume: asyncio.Event
    resets: int
    """Calls of ResetCache."""
    expectations: list[kvtransfer_pb2.Expectation]
    """The expectations that gateways sent."""
    pretends_to_cache: list[int]
    """Tokens of the context whose blocks the host reports as cached."""

    async def Reusable(  # type: ignore[override]
        self, request: kvtransfer_pb2.ReusableRequest, context: grpc.aio.ServicerContext
    ) -> None:
        links = Context(self.pretends_to_cache, salt_of()).links(self.layout)
        layout = kvtransfer_pb2.KVLayout(
            fingerprint=self.layout,
            slot_bytes=4096,
            base_tokens=16,
            groups=[kvtransfer_pb2.KVGroup(name="full", block_tokens=16)],
        )
        pool = kvtransfer_pb2.Pool(id="toy", next_event=1, layout=layout)
        await context.write(kvtransfer_pb2.ReusableReply(pool=pool))
        names = kvtransfer_pb2.BlockNames(group=0, hashes=b"".join(links))
        await context.write(kvtransfer_pb2.ReusableReply(names=names))

    async def Expect(  # type: ignore[override]
        self, request: kvtransfer_pb2.ExpectRequest, context: grpc.aio.ServicerContext
    ) -> kvtransfer_pb2.ExpectReply:
        self.expectations += request.expectations
        return kvtransfer_pb2.ExpectReply()

    async def ResetCache(  # type: ignore[override]
        self, request: kvtransfer_pb2.ResetCacheRequest, context: grpc.aio.ServicerContext
    ) -> kvtransfer_pb2.ResetCacheReply:
        self.resets += 1
        if self.pause_after == 0:
            await context.abort(grpc.StatusCode.INTERNAL, "the toy does not forget")
        return kvtransfer_pb2.ResetCacheReply(blocks=5, disk_blocks=2)

    async def Ledger(  # type: ignore[override]
        self, request: kvtransfer_pb2.LedgerRequest, context: grpc.aio.ServicerContext
    ) -> kvtransfer_pb2.LedgerReply:
        if self.pause_after == 0:
            await self.resume.wait()
        key = common_pb2.Key(request_id="r", attempt=1, generation=1)
        leases = [
            kvtransfer_pb2.LeaseInfo(
                key=key, owner="d", age_ms=9 - index, blocks=2, shared_blocks=index, blocks_by_group={"full": 2}
            )
            for index in range(3)
        ]
        shown, left_out = leases[: request.max_leases], leases[request.max_leases :]
        return kvtransfer_pb2.LedgerReply(
            host_id=self.host_id,
            total=10,
            free=4,
            held=2,
            in_flight=3,
            cached=1,
            balanced=True,
            prefix_queries_tokens=100,
            prefix_hits_tokens=25,
            owners=[
                kvtransfer_pb2.OwnedBlocks(owner="p", state="filling", blocks=3),
                kvtransfer_pb2.OwnedBlocks(owner="d", state="active", blocks=2),
            ],
            leases=shown,
            leases_left_out=len(left_out),
            # The first two blocks are of a lease that is never shown.
            blocks_left_out=2 + sum(lease.blocks - lease.shared_blocks for lease in left_out),
        )
