"""What each transport moves here, found out when the service starts: lists of networks lie, bytes do not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.transport import ArenaMemory, Source, Transport

SECONDS = 0.9
"""For all transports together."""
_MOST_BYTES = 8 << 20
_ROUNDS = 3
SLOW_GIGABYTES_PER_SECOND = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Path:
    """One transport, as it turned out."""

    name: str
    gigabytes_per_second: float
    """0 where it failed."""
    warning: str
    """A sentence for the log; empty where all is well."""


async def self_test(transports: Sequence[Transport], memory: ArenaMemory, address: str) -> list[Path]:
    """Reads blocks from itself through each transport, verifies them, and says how fast that was.

    It takes about a second at most. Its figures are of one host, so they show what is broken or slow at its root, and
    not what a network between hosts adds.

    Args:
        transports: each serves `memory` and writes into it.
        memory: of two slots at least. Some of them are overwritten, so none may be in use.
        address: of the gRPC server here.

    Returns:
        The transports in the order in which to use them: the faster first, those that failed last.
    """
    paths = [await _measure(transport, memory, address, SECONDS / len(transports)) for transport in transports]
    paths.sort(key=lambda path: -path.gigabytes_per_second)
    for path in paths:
        log.info("%s moves %.2f GB/s from this host to itself", path.name, path.gigabytes_per_second)
        if path.warning:
            log.warning("%s", path.warning)
    return paths


async def _measure(transport: Transport, memory: ArenaMemory, address: str, seconds: float) -> Path:
    """The best of some reads, as far as time allows: the first one connects."""
    name = transport.name
    fastest = 0.0
    try:
        async with asyncio.timeout(seconds):
            for round_ in range(_ROUNDS):
                fastest = max(fastest, await _read(transport, memory, address, round_))
    except UnavailableError as error:
        return Path(name, 0.0, f"{name} does not work here: {error}")
    except TimeoutError:
        if not fastest:
            return Path(name, 0.0, f"{name} does not work here: it moved too little within {seconds:.1f} s")
    if fastest < SLOW_GIGABYTES_PER_SECOND:
        return Path(name, fastest, f"{name} is slow here: {fastest:.3f} GB/s from this host to itself")
    return Path(name, fastest, "")


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
