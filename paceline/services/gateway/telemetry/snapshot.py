"""The state of the fleet as the console shows it, with the ledgers of its hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from paceline.core.errors import UnavailableError
from paceline.proto.kvtransfer_pb2 import LedgerReply, LedgerRequest
from paceline.proto.kvtransfer_pb2_grpc import KVTransferStub
from paceline.services.common.tasks import is_cancelled
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.telemetry.history import Counters, Levels, Service
from paceline.services.gateway.telemetry.metrics import figures

LEDGER_SECONDS = 1.0
"""Deadline of one host's answer, in seconds."""

Json = dict[str, Any]

_SHOWN_FIGURES = (
    "sampled_tokens",
    "busy_seconds",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "queued_tokens",
    "pooled_tokens",
    "pool_waiting_tokens",
    "encodings_computed",
    "encodings_waiting",
)
"""Figures of workers that the console shows, if the worker reports them."""


async def read_ledger(host: RemoteWorker, request: LedgerRequest) -> LedgerReply:
    """Ask a host for its ledger, the owners of its KV blocks. Raises UnavailableError if the host does not answer."""
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


def levels_of(members: Sequence[RemoteWorker], running: int, waiting: int) -> Levels:
    """Return the present state of the fleet.

    Args:
        running: number of sequences of this gateway that run.
        waiting: number of sequences of this gateway that wait.
    """
    hosts = [figures(each.member.metrics) for each in members if each.member.role == "kvtransfer"]

    def blocks(*states: str) -> int:
        return int(sum(host.get(f"blocks_{state}", 0) for host in hosts for state in states))

    return Levels(running, waiting, blocks("total"), blocks("held", "in_flight"), blocks("cached"))


def counters_of(members: Sequence[RemoteWorker]) -> dict[Service, Counters]:
    """Return the counters in each member's last heartbeat."""
    counters = {}
    for each in members:
        stats = figures(each.member.metrics)
        counters[each.member.worker_id, each.member.epoch] = Counters(
            generated_tokens=stats.get("sampled_tokens", 0),
            prompt_tokens=stats.get("prefix_queries_tokens", 0),
            found_tokens=stats.get("prefix_hits_tokens", 0),
            draft_tokens=stats.get("draft_tokens", 0),
            accepted_tokens=stats.get("accepted_tokens", 0),
        )
    return counters


async def describe_fleet(members: Sequence[RemoteWorker]) -> Json:
    """Return the JSON of all workers, and of all hosts with the owners of their KV blocks. Asks each host for them."""
    hosts = [each for each in members if each.member.role == "kvtransfer"]
    return {
        "workers": [_worker(each) for each in members if each.member.role != "kvtransfer"],
        "hosts": await asyncio.gather(*(_host(host) for host in hosts)),
    }


def _worker(worker: RemoteWorker) -> Json:
    member = worker.member
    stats = figures(member.metrics)
    return {
        "id": member.worker_id,
        "role": member.role,
        "epoch": member.epoch,
        "host": member.host_id,
        "state": worker.state,
        "max_seqs": member.max_seqs,
        "running": member.load.running,
        "waiting": member.load.waiting,
        "numerics": member.numerics and str(member.numerics),
        "stats": {name: round(stats[name], 3) for name in _SHOWN_FIGURES if name in stats},
    }


async def _host(host: RemoteWorker) -> Json:
    try:
        ledger = await read_ledger(host, LedgerRequest(brief=True))
    except UnavailableError as error:
        return {"id": host.member.host_id, "error": str(error)}
    return _ledger(ledger)


def _ledger(ledger: LedgerReply) -> Json:
    return {
        "id": ledger.host_id,
        "balanced": ledger.balanced,
        "block_bytes": ledger.slot_bytes,
        "blocks": {
            "held": ledger.held,
            "in_flight": ledger.in_flight,
            "cached": ledger.cached,
            "free": ledger.free,
        },
        "owners": [{"owner": each.owner, "state": each.state, "blocks": each.blocks} for each in ledger.owners],
        "found_tokens": ledger.prefix_hits_tokens,
        "prompt_tokens": ledger.prefix_queries_tokens,
    }
