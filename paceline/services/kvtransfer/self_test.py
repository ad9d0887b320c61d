"""What a transport moves here, found out when the service starts: lists of networks lie, bytes do not."""

from __future__ import annotations

import asyncio
import logging
import time

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.transport import ArenaMemory, Source, Transport

SECONDS = 0.9
SLOW_GIGABYTES_PER_SECOND = 0.1
_MOST_BYTES = 8 << 20
_ROUNDS = 3

log = logging.getLogger(__name__)


async def self_test(transport: Transport, memory: ArenaMemory, address: str) -> float:
    """Reads blocks from itself, verifies them, and returns GB/s: the best of some reads, for the first one connects.

    0 where it failed. What is wrong, or slow, is said in the log. It takes about a second at most. The figure is of one
    host, so it shows what is broken or slow at its root, and not what a network between hosts adds.

    Args:
        transport: serves `memory` and writes into it.
        memory: of two slots at least. Some of them are overwritten, so none may be in use.
        address: of the gRPC server here.
    """
    fastest = 0.0
    try:
        async with asyncio.timeout(SECONDS):
            for round_ in range(_ROUNDS):
                fastest = max(fastest, await _read(transport, memory, address, round_))
    except UnavailableError as error:
        log.warning("%s does not work here: %s", transport.name, error)
        return 0.0
    except TimeoutError:
        if not fastest:
            log.warning("%s does not work here: it moved too little within %.1f s", transport.name, SECONDS)
            return 0.0
    if fastest < SLOW_GIGABYTES_PER_SECOND:
        log.warning("%s is slow here: %.3f GB/s from this host to itself", transport.name, fastest)
    else:
        log.info("%s moves %.2f GB/s from this host to itself", transport.name, fastest)
    return fastest


async def _read(transport: Transport, memory: ArenaMemory, address: str, round_: int) -> float:
    """GB/s of one read of the first slots into those behind them, which held other bytes before.

    Raises:
        UnavailableError: it failed, or brought something else.
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
