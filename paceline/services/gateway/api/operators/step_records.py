"""The endpoint that shows the newest steps of all workers, from which `paceline profile` learns."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import grpc.aio
from fastapi import APIRouter, Query

from paceline.core.errors import UnavailableError
from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.registry import Member
from paceline.services.common.tasks import is_cancelled
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.operators.bodies import FleetSteps
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.gateway import Gateway

STEPS_SECONDS = 5.0
"""Longest time until one worker answers, in seconds."""
MOST_STEPS = 4096
"""Largest number of steps of each worker that a client may ask for; workers keep no more."""

FIELDS = tuple(field.name for field in worker_pb2.StepRecord.DESCRIPTOR.fields)
"""Names of the numbers of a step, in their order."""


def add_step_records(router: APIRouter, gateway: Gateway) -> None:
    """Add the route GET /fleet/steps to a router."""

    @router.get("/fleet/steps", response_model=None, responses=answers(FleetSteps))
    async def steps(most: Annotated[int, Query(ge=1, le=MOST_STEPS)] = 512, model: str | None = None) -> dict[str, Any]:
        """Return the newest steps of each worker, with their work and length, and how hosts fetch blocks."""
        fleet, roles = gateway.find(model).fleet, ("prefill", "decode")
        workers = [each for each in fleet.workers() if each.member.role in roles and each.available]
        return {
            "fields": FIELDS,
            "workers": await asyncio.gather(*(_steps_of(each, most) for each in workers)),
            "hosts": [_blocks_of(each.member) for each in fleet.hosts() if each.available],
        }


async def _steps_of(worker: RemoteWorker, most: int) -> dict[str, Any]:
    member = worker.member
    call = worker_pb2_grpc.MaintenanceStub(worker.channel).Steps(
        worker_pb2.StepsRequest(most=most), timeout=STEPS_SECONDS
    )
    try:
        reply = await call
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(f"{worker} does not tell its steps: {error.details() or error.code().name}") from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        reply = worker_pb2.StepsReply()  # the gateway closes the channel of a member that leaves
    return {
        "worker_id": member.worker_id,
        "role": member.role,
        "host_id": member.host_id,
        "epoch": member.epoch,
        "max_batched_tokens": reply.max_batched_tokens,
        "takes_turns": reply.takes_turns,
        "itl_target_seconds": reply.itl_target_seconds,
        "steps": [[getattr(step, name) for name in FIELDS] for step in reply.steps],
    }


def _blocks_of(member: Member) -> dict[str, Any]:
    report = member.host
    return {
        "host_id": member.host_id,
        "token_bytes": report.token_bytes,
        "fetched_bytes": report.fetched_bytes,
        "fetch_seconds": report.fetch_seconds,
    }
