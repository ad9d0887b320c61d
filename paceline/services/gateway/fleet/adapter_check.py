"""The check of an adapter before it gets a name. A worker does it, because only workers know the model's layers."""

from __future__ import annotations

import grpc.aio

from paceline.core.adapters import Adapter
from paceline.core.errors import UnavailableError
from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import heeding_cancellation, own_cancellation
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.members import serves
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

CHECK_SECONDS = 900.0
"""Longest time until a worker has read an adapter, in seconds. It may have to download the adapter first."""


async def check_adapter(fleet: Fleet, name: str, folder: str) -> Adapter:
    """Return the adapter in a folder, after a worker has read it as it reads the adapters of requests.

    Args:
        name: name of the adapter in the API.
        folder: absolute path of its folder, or its name on the hub.

    Raises:
        InvalidRequestError: the adapter cannot be served with this model; the message says why.
        UnavailableError: no worker could check it now.
    """
    failure = UnavailableError(
        f"no worker is ready that can check whether the adapter {name!r} fits the model; try again when one is ready"
    )
    for worker in fleet.workers():
        if worker.available and serves(worker, fleet.model) and worker.member.role != "pool":
            try:
                return await _ask(worker, name, folder)
            except UnavailableError as error:  # it may have ended; another one can answer
                failure = error
    raise failure


async def _ask(worker: RemoteWorker, name: str, folder: str) -> Adapter:
    call = worker_pb2_grpc.MaintenanceStub(worker.channel).CheckAdapter(
        worker_pb2.CheckAdapterRequest(name=name, folder=folder), timeout=CHECK_SECONDS
    )
    try:
        with own_cancellation(lambda: UnavailableError(f"{worker} has left while it checked the adapter {name!r}")):
            found = await heeding_cancellation(call)
    except grpc.aio.AioRpcError as error:
        raise unmapped_error(error, str(worker)) from error
    return Adapter(name, found.folder, found.digest)
