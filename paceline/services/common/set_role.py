"""The call that gives a running worker another role."""

from __future__ import annotations

import grpc.aio

from paceline.core.errors import InvalidRequestError
from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import heeding_cancellation

ANSWER_SECONDS = 10.0
"""Deadline of the worker's answer, in seconds. The worker answers after it has begun to drain for the change."""


async def set_role(channel: grpc.aio.Channel, worker_id: str, role: str, epoch: int = 0) -> int:
    """Tell a worker to take a role. Return the epoch that its member will have in this role.

    Args:
        role: prefill, decode or standby.
        epoch: the member's present epoch as the caller knows it, which is checked; 0 for any epoch.

    Raises:
        InvalidRequestError: the worker cannot take this role.
        StaleError: the worker has another epoch.
        BusyError: the worker is about to take another role.
        UnavailableError: the worker drains, does not answer, or is of a release without this call.
    """
    stub = worker_pb2_grpc.MaintenanceStub(channel)
    call = stub.SetRole(worker_pb2.SetRoleRequest(role=role, epoch=epoch), timeout=ANSWER_SECONDS)
    try:
        reply: worker_pb2.SetRoleReply = await heeding_cancellation(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise InvalidRequestError(f"{worker_id} cannot change its role: start a new worker instead") from error
        raise unmapped_error(error, worker_id) from error
    return reply.epoch
