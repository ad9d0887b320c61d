"""The paths between hosts, tried when the service starts: which of them come before gRPC, the last one."""

from __future__ import annotations

from paceline.services.kvtransfer.grpc_transport import serving_alone
from paceline.services.kvtransfer.host_memory import MakeTransports
from paceline.services.kvtransfer.self_test import self_test
from paceline.services.kvtransfer.transport import ArenaMemory
from paceline.services.kvtransfer.ucx import UcxTransport, open_ucx

_SLOTS, _SLOT_BYTES = 16, 1 << 20


async def fast_transports(wanted: str, only_here: bool) -> MakeTransports:
    """Those that come before gRPC. Each path is tried on a memory of its own, for a second at most, and the log says
    what it moves.

    Args:
        wanted: see `KVTransferConfig.transport`.
        only_here: whether no other host reaches this one.

    Raises:
        ConfigError: what was asked for is not installed.
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
