"""The choice of transports between hosts, by a test at the start. Transports that pass are preferred to gRPC."""

from __future__ import annotations

from paceline.services.kvtransfer.host_memory import MakeTransports
from paceline.services.kvtransfer.transports.grpc_transport import serving_alone
from paceline.services.kvtransfer.transports.self_test import self_test
from paceline.services.kvtransfer.transports.transport import ArenaMemory
from paceline.services.kvtransfer.transports.ucx import UcxTransport, open_ucx

_SLOTS, _SLOT_BYTES = 16, 1 << 20


async def fast_transports(wanted: str, only_here: bool) -> MakeTransports:
    """Return a function that makes the transports that are preferred to gRPC.

    Each transport is tested on a memory of its own, for about a second, and its rate is logged.

    Args:
        wanted: the transport that the user wants: "ucx"; "grpc" for gRPC only; "auto" for UCX if it works.
        only_here: whether the service listens on a loopback address, so that no other host can reach it.

    Raises:
        ConfigError: the wanted transport is not installed or does not start.
    """
    scratch = ArenaMemory(memoryview(bytearray(_SLOTS * _SLOT_BYTES)), _SLOT_BYTES, _SLOTS)
    if not only_here:
        async with serving_alone(scratch) as (grpc, address):
            await self_test(grpc, scratch, address)
    if wanted == "grpc" or (wanted == "auto" and only_here):
        return lambda memory: ()
    ucx = UcxTransport(scratch) if wanted == "ucx" else open_ucx(scratch)
    if ucx is None:
        return lambda memory: ()
    try:
        works = await self_test(ucx, scratch, "127.0.0.1:1") > 0
    finally:
        await ucx.close()
    return _ucx if works else lambda memory: ()


def _ucx(memory: ArenaMemory) -> list[UcxTransport]:
    ucx = open_ucx(memory)
    return [] if ucx is None else [ucx]
