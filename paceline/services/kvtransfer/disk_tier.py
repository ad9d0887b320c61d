"""A tier below the arena: a file of block-sized slots, which outlives what the arena evicts, but not this service.

What becomes reusable in the arena is written behind, one block after the other; what the disk cannot keep up with is
not written. What is read is compared with its digest, so that a disk that lies costs a miss.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.block_pool import BlockEvent, BlockPool
from paceline.core.errors import ConfigError
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.exports import digest_of
from paceline.services.kvtransfer.transport import ArenaMemory

_WAITING = 4096
"""Blocks that may wait to be written; the oldest are left out."""
_READERS = 4

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Find = Callable[[int, bytes], int | None]


class DiskTier:
    """Blocks in a file without a name, from `start` to `close`.

    Args:
        folder: where the file lies; a disk, not a tmpfs.
        size: bytes, taken at once.
        find: the slot of the arena with a block, by group and hash.

    Raises:
        ConfigError: there is no such folder, or no room in it.
    """

    def __init__(self, folder: Path, size: int, groups: int, memory: ArenaMemory, find: Find) -> None:
        slots = size // memory.slot_bytes
        if slots == 0:
            raise ConfigError(f"--kv-disk-size {size} has no room for a block of {memory.slot_bytes} bytes; raise it")
        self._file = _open(folder, slots * memory.slot_bytes)
        self.written_blocks = self.read_blocks = self.damaged_blocks = 0
        self._pool = BlockPool(slots, groups)
        self._digests: dict[int, bytes] = {}
        """By slot of the file."""
        self._memory = memory
        self._find = find
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=_WAITING)
        self._wake = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(1 + _READERS, thread_name_prefix="disk")
        self._buffer = mmap.mmap(-1, memory.slot_bytes)  # whole pages, as direct I/O asks for

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write_behind(), name="disk tier")

    async def close(self) -> None:
        if self._writer is not None:
            await end_tasks(self._writer)
        await asyncio.to_thread(self._threads.shutdown)
        os.close(self._file)

    def offer(self, events: Iterable[BlockEvent]) -> None:
        """These blocks became reusable in the arena, or ceased to be."""
        self._waiting.extend((event.group, event.hash) for event in events if event.op == "stored")
        self._wake.set()

    def find(self, group: int, digest: bytes) -> int | None:
        """The slot of the file with a block."""
        return self._pool.find(group, digest)

    @property
    def blocks(self) -> int:
        """How many are in the file."""
        return self._pool.counts().cached

    async def read(self, blocks: Sequence[tuple[int, bytes, int]]) -> list[bool]:
        """Reads blocks into slots of the arena. When it returns or is cancelled nothing touches these any more.

        Args:
            blocks: group, hash and slot of the arena of each.

        Returns:
            Which have come, undamaged.
        """
        found = [self._pool.find(group, digest) for group, digest, _ in blocks]
        here = [slot for slot in found if slot is not None]
        self._pool.reuse(here)  # so that none is overwritten meanwhile
        readings = {
            index: self._in_thread(self._read, slot, blocks[index][2])
            for index, slot in enumerate(found)
            if slot is not None
        }
        try:
            await _all_done(readings.values())
        finally:
            self._pool.give_back(here)
        return [index in readings and readings[index].result() for index in range(len(blocks))]

    async def _write_behind(self) -> None:
        while True:
            self._wake.clear()
            while self._waiting:
                await self._write(*self._waiting.popleft())
            await self._wake.wait()

    async def _write(self, group: int, digest: bytes) -> None:
        slot = self._find(group, digest)
        if slot is None or self._pool.find(group, digest) is not None or not self._pool.available():
            return
        # At once: as long as nobody else runs, a reusable block is what its name says.
        self._buffer[:] = self._memory.slot(slot)
        (place,) = self._pool.take(1)
        try:
            self._digests[place] = await self._in_thread(self._store, place)
            self._pool.seal(place, group, digest)
            self.written_blocks += 1
        except OSError as error:
            log.warning("a block could not be written to the disk tier: %s", error)
        finally:
            self._pool.give_back([place])

    def _store(self, place: int) -> bytes:
        os.pwrite(self._file, self._buffer, place * self._memory.slot_bytes)
        with memoryview(self._buffer) as view:
            return digest_of(view)

    def _read(self, place: int, slot: int) -> bool:
        target = self._memory.slot(slot)
        try:
            count = os.preadv(self._file, [target], place * self._memory.slot_bytes)
        except OSError as error:
            log.warning("a block could not be read from the disk tier: %s", error)
            return False
        if count != len(target) or digest_of(target) != self._digests[place]:
            self.damaged_blocks += 1
            return False
        self.read_blocks += 1
        return True

    def _in_thread(self, function: Callable[..., Result], *arguments: int) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


async def _all_done(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Waits for threads, also where it is cancelled, which it is only when they are done."""
    waiting = asyncio.gather(*futures, return_exceptions=True)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise


def _open(folder: Path, size: int) -> int:
    """A file of `size` bytes that nobody else can open, and that is gone with the process."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        try:
            file = os.open(folder, flags | os.O_DIRECT, 0o600)  # the arena is what keeps blocks in memory
        except OSError:
            file = os.open(folder, flags, 0o600)  # such as a tmpfs of a test
    except OSError as error:
        raise ConfigError(f"cannot make a file in {folder} ({error.strerror}); choose another --kv-disk-dir") from error
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise ConfigError(
            f"{folder} has no room for {size >> 20:,} MiB ({error.strerror}); lower --kv-disk-size"
        ) from error
    return file
