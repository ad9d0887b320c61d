"""The endpoint that makes all hosts and workers forget cached prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Annotated, Any, TypeVar

import grpc.aio
from fastapi import APIRouter, Query

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common.tasks import is_cancelled
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.operators.bodies import CacheReset
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError

RESET_SECONDS = 10.0
"""Longest time until one member answers, in seconds. A worker answers between two steps of its engine."""

Reply = TypeVar("Reply")


def add_cache_reset(router: APIRouter, gateway: Gateway) -> None:
    """Add the route POST /reset_prefix_cache to a router."""

    @router.post("/reset_prefix_cache", response_model=None, responses=answers(CacheReset))
    async def reset(
        reset_running_requests: Annotated[bool, Query()] = False, model: str | None = None
    ) -> dict[str, Any]:
        """Forget all cached blocks that no running request uses, in arenas, disk tiers and devices.

        Args:
            model: the model whose blocks are forgotten; None for all models.
        """
        if reset_running_requests:
            message = "reset_running_requests is not supported; end the requests with /abort_requests first"
            raise ApiError(400, message, param="reset_running_requests")
        # The arenas come first, because a device loads only blocks that its host's arena has.
        fleets = [each.fleet for each in gateway.named(model)]
        hosts = await _all(_reset_host(host) for fleet in fleets for host in fleet.hosts())
        members = (each for fleet in fleets for each in fleet.workers())
        workers = [each for each in members if each.member.role in ("prefill", "decode")]
        pools = await _all(_reset_pool(worker) for worker in workers if worker.member.state != "starting")
        return {
            "blocks": sum(reply.blocks for reply in hosts),
            "disk_blocks": sum(reply.disk_blocks for reply in hosts),
            "device_blocks": sum(reply.blocks for reply in pools),
        }


async def _reset_host(host: RemoteWorker) -> kvtransfer_pb2.ResetCacheReply:
    stub = kvtransfer_pb2_grpc.KVTransferStub(host.channel)
    call = stub.ResetCache(kvtransfer_pb2.ResetCacheRequest(), timeout=RESET_SECONDS)
    return await _answer(call, host, kvtransfer_pb2.ResetCacheReply())


async def _reset_pool(worker: RemoteWorker) -> worker_pb2.ResetPoolReply:
    stub = worker_pb2_grpc.MaintenanceStub(worker.channel)
    call = stub.ResetPool(worker_pb2.ResetPoolRequest(), timeout=RESET_SECONDS)
    return await _answer(call, worker, worker_pb2.ResetPoolReply())


async def _all(calls: Iterable[Awaitable[Reply]]) -> list[Reply]:
    """Wait until all calls have ended. Then raise the first error, or return the replies."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _answer(call: Awaitable[Reply], member: RemoteWorker, gone: Reply) -> Reply:
    """Return a member's reply, or `gone` if the member leaves. Raises UnavailableError if it does not answer."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(
            f"{member} has not reset its cache ({error.details() or error.code().name}); others may have. Try again"
        ) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return gone  # the gateway closes the channel of a member that leaves, which cancels its calls
