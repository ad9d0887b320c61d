"""Calls to kvtransfer services for their ledgers of KV blocks."""

from __future__ import annotations

import asyncio

import grpc.aio

from paceline.core.errors import UnavailableError
from paceline.proto.kvtransfer_pb2 import LedgerReply, LedgerRequest
from paceline.proto.kvtransfer_pb2_grpc import KVTransferStub
from paceline.services.common.cancellation import is_cancelled
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

LEDGER_SECONDS = 1.0
"""Deadline of one host's answer."""


async def read_ledger(host: RemoteWorker, request: LedgerRequest) -> LedgerReply:
    """Return a host's ledger. Raises UnavailableError with a few words if the host does not answer."""
    try:
        reply: LedgerReply = await KVTransferStub(host.channel).Ledger(request, timeout=LEDGER_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(error.details() or error.code().name) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # The gateway closes the channel of a member that leaves, which cancels its calls.
        raise UnavailableError("it has left") from None
    return reply


def rate(hits: int, queries: int) -> float | None:
    """Return the share of hits; None if there were no queries."""
    return hits / queries if queries else None
