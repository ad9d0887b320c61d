"""A cache tier below the arena: a file of block-sized slots, which keeps blocks that the arena evicts. It ends with the
process.

Blocks that become reusable in the arena are written in the background, one after another. If the disk cannot keep up,
the oldest waiting blocks are dropped. Each block is compared with its digest when it is read. A damaged block is a
cache miss.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.block_pool import BlockEvent, BlockPool
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.lru import LRU
from paceline.core.errors import ConfigError
from paceline.core.metrics import Sample
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.transfers.exports import digest_of
from paceline.services.kvtransfer.transports.transport import ArenaMemory

_WAITING = 4096
"""Largest number of blocks that may wait to be written. If more come, the oldest are dropped."""
READERS = 8
"""Number of threads that read blocks at the same time."""
log = logging.getLogger(__name__)

Result = TypeVar("Result")
Find = Callable[[int, bytes], int | None]


@dataclass(frozen=True, slots=True)
class DiskOptions:
    folder: Path
    """Folder of the file, on a disk and not a tmpfs."""
    size: int
    """Size of the file in bytes. All bytes are allocated when the file is made."""

    def check(self) -> None:
        """Raise ConfigError if a file of this size cannot be made now."""
        os.close(_open(self.folder, self.size))


class DiskTier:
    """Blocks in an unnamed file, which exists until `close`. Construct it on a running event loop.

    Args:
        groups: number of KV groups.
        memory: the arena's blocks.
        find: returns the arena's slot with a block, given its group and hash, or None.
        policy: makes the policy that chooses the blocks to evict, given the number of slots.

    Raises:
        ConfigError: the folder does not exist or has no room, or the file would have no room for a block.
    """

    def __init__(
        self,
        options: DiskOptions,
        groups: int,
        memory: ArenaMemory,
        find: Find,
        policy: Callable[[int], CachePolicy] = LRU,
    ) -> None:
        slots = options.size // memory.slot_bytes
        if slots == 0:
            raise ConfigError(
                f"--kv-disk-size {options.size} has no room for a block of {memory.slot_bytes} bytes; raise it"
            )
        self._file = _open(options.folder, slots * memory.slot_bytes)
        self.written_blocks = self.read_blocks = self.damaged_blocks = 0
        self._pool = BlockPool(slots, groups, policy(slots))
        self._digests: dict[int, bytes] = {}
        """Digest of each block, by slot of the file."""
        self._damaged: set[int] = set()
        """Slots whose block could not be read back. `find` ignores them until they are written again."""
        self._memory = memory
        self._find = find
        self._complained = False
        self._times_forgotten = 0
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=_WAITING)
        self._wake = asyncio.Event()
        self._threads = ThreadPoolExecutor(1 + READERS, thread_name_prefix="disk")
        self._buffer = mmap.mmap(-1, memory.slot_bytes)  # direct I/O needs memory of whole pages
        self._writer = asyncio.create_task(self._write_behind(), name="disk tier")

    async def close(self) -> None:
        await end_tasks(self._writer)
        await asyncio.to_thread(self._threads.shutdown)
        os.close(self._file)

    def offer(self, events: Iterable[BlockEvent]) -> None:
        """Queue blocks for writing that became reusable in the arena. Other events are ignored."""
        self._waiting.extend((event.group, event.hash) for event in events if event.op == "stored")
        self._wake.set()

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the file's slot with an undamaged block, or None."""
        slot = self._pool.find(group, digest)
        return None if slot in self._damaged else slot

    def expect(self, group: int, digest: bytes, hint: Hint) -> None:
        """Pass a hint about a block on to the cache policy, if the block is in the file."""
        self._pool.expect(group, digest, hint)

    def forget(self) -> int:
        """Forget all blocks except blocks that are being read. Return the number of forgotten blocks."""
        self._waiting.clear()
        self._times_forgotten += 1
        return len(self._pool.forget())

    @property
    def blocks(self) -> int:
        """Number of blocks that the file has at present."""
        return self._pool.counts().cached

    def samples(self) -> Iterator[Sample]:
        """Yield the numbers of present, written, read and damaged blocks, for metrics."""
        yield Sample("disk_blocks", self.blocks)
        yield Sample("disk_written_blocks", self.written_blocks)
        yield Sample("disk_read_blocks", self.read_blocks)
        yield Sample("disk_damaged_blocks", self.damaged_blocks)

    async def read(self, blocks: Sequence[tuple[int, bytes, int]]) -> list[bool]:
        """Read blocks into slots of the arena. Nothing touches these slots after the call has returned or was
        cancelled.

        Args:
            blocks: (group, hash, slot of the arena) for each block.

        Returns:
            For each block, whether it was found and read undamaged.
        """
        found = [self._pool.find(group, digest) for group, digest, _ in blocks]
        here = [slot for slot in found if slot is not None]
        self._pool.reuse(here)  # held so that no slot of the file is overwritten meanwhile
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
        # Copy before anything is awaited: until then no other task runs that could evict the block from its slot.
        self._buffer[:] = self._memory.slot(slot)
        (place,) = self._pool.take(1)
        times_forgotten = self._times_forgotten
        try:
            self._digests[place] = await self._in_thread(self._store, place)
            self._damaged.discard(place)
            if times_forgotten != self._times_forgotten:
                return
            self._pool.seal(place, group, digest)
            self.written_blocks += 1
            self._complained = False
        except OSError as error:
            if not self._complained:  # log once, not for every block, if all writes fail
                log.warning("blocks cannot be written to the disk tier: %s", error)
            self._complained = True
        finally:
            self._pool.give_back([place])

    def _store(self, place: int) -> bytes:
        if os.pwrite(self._file, self._buffer, place * self._memory.slot_bytes) != len(self._buffer):
            raise OSError("the disk wrote only a part of a block")
        with memoryview(self._buffer) as view:
            return digest_of(view)

    def _read(self, place: int, slot: int) -> bool:
        target = self._memory.slot(slot)
        try:
            count = os.preadv(self._file, [target], place * self._memory.slot_bytes)
        except OSError as error:
            log.warning("a block could not be read from the disk tier: %s", error)
            count = 0
        if count != len(target) or digest_of(target) != self._digests[place]:
            self.damaged_blocks += 1
            self._damaged.add(place)
            return False
        self.read_blocks += 1
        return True

    def _in_thread(self, function: Callable[..., Result], *arguments: int) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


async def _all_done(futures: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until work in threads is done. If the wait is cancelled, even several times, it raises only after that."""
    waiting = asyncio.gather(*futures, return_exceptions=True)
    cancelled = False
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def _open(folder: Path, size: int) -> int:
    """Make an unnamed file of `size` bytes, which ends with the process, and return its descriptor."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        try:
            file = os.open(folder, flags | os.O_DIRECT, 0o600)  # a page cache would only copy the arena
        except OSError:
            file = os.open(folder, flags, 0o600)
            log.warning("%s does not support direct I/O: its blocks may take memory as well; is it on a disk?", folder)
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
