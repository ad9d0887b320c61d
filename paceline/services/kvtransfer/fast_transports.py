"""The choice of transports between hosts, by a test at the start. Transports that pass are preferred to gRPC."""

from __future__ import annotations

import asyncio
import logging
import time

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.host_memory import MakeTransports
from paceline.services.kvtransfer.transports.grpc_transport import serving_alone
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source, Transport
from paceline.services.kvtransfer.transports.ucx import UcxTransport, open_ucx

SECONDS = 0.9
"""Seconds after which no further read begins."""
LIMIT_SECONDS = 5.0
"""Longest time until the first read succeeds, in seconds. This read also connects, which takes long on a busy
machine.
"""
SLOW_GIGABYTES_PER_SECOND = 0.1
_MOST_BYTES = 8 << 20
_ROUNDS = 3

log = logging.getLogger(__name__)


async def self_test(
    transport: Transport, memory: ArenaMemory, address: str, limit_seconds: float = LIMIT_SECONDS
) -> float:
    """Read blocks over a transport from this host itself, and verify them. Return the rate in GB/s; 0 if a read failed.

    The rate is the best of several reads, because the first one also connects. Failures and low rates are logged. The
    test takes about a second, and `limit_seconds` at most. It finds faults and slowness of this host, not the limits of
    the network.

    Args:
        transport: a transport that serves `memory` and writes into it.
        memory: memory with two slots or more, none of them in use, because some are overwritten.
        address: address of the gRPC server here.
    """
    fastest = 0.0
    began = time.monotonic()
    try:
        async with asyncio.timeout(limit_seconds):
            for round_ in range(_ROUNDS):
                fastest = max(fastest, await _read(transport, memory, address, round_))
                if time.monotonic() - began > SECONDS:
                    break
    except UnavailableError as error:
        log.warning("%s does not work here: %s", transport.name, error)
        return 0.0
    except TimeoutError:
        if not fastest:
            log.warning("%s does not work here: it moved too little within %.1f s", transport.name, limit_seconds)
            return 0.0
    if fastest < SLOW_GIGABYTES_PER_SECOND:
        log.warning("%s is slow here: %.3f GB/s from this host to itself", transport.name, fastest)
    else:
        log.info("%s moves %.2f GB/s from this host to itself", transport.name, fastest)
    return fastest


async def _read(transport: Transport, memory: ArenaMemory, address: str, round_: int) -> float:
    """Read the first slots into the slots after them, which have other bytes at first. Return the rate in GB/s.

    Raises:
        UnavailableError: the read failed, or brought other bytes.
    """
    count = max(1, min(memory.slots // 2, _MOST_BYTES // memory.slot_bytes))
    for slot in range(count):
        text = b"%d of round %d," % (slot, round_)
        memory.slot(slot)[:] = (text * (memory.slot_bytes // len(text) + 1))[: memory.slot_bytes]
    began = time.perf_counter()
    source = Source("this host", address, transport.offer())
    await transport.read(source, [(slot, count + slot) for slot in range(count)])
    seconds = time.perf_counter() - began
    if any(memory.slot(slot) != memory.slot(count + slot) for slot in range(count)):
        raise UnavailableError("other bytes came than were read")
    return count * memory.slot_bytes / seconds / 1e9


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
