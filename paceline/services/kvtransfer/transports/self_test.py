"""A test of a transport when the service starts: whether it moves the right bytes, and how fast."""

from __future__ import annotations

import asyncio
import logging
import time

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source, Transport

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
