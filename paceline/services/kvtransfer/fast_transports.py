"""The transports that come before gRPC: those that are installed and work here."""

from __future__ import annotations

from paceline.services.kvtransfer.host_memory import MakeTransports
from paceline.services.kvtransfer.self_test import self_test
from paceline.services.kvtransfer.transport import ArenaMemory
from paceline.services.kvtransfer.ucx import UcxTransport, open_ucx

_SLOTS, _SLOT_BYTES = 16, 1 << 20


async def fast_transports(wanted: str, only_here: bool) -> MakeTransports:
    """Tries them on a memory of its own, for about a second.

    Args:
        wanted: see `KVTransferConfig.transport`.
        only_here: whether no other host reaches this one.

    Raises:
        ConfigError: what was asked for is not installed.
    """
    if wanted == "grpc" or (wanted == "auto" and only_here):
        return lambda memory: ()
    scratch = ArenaMemory(memoryview(bytearray(_SLOTS * _SLOT_BYTES)), _SLOT_BYTES, _SLOTS)
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
