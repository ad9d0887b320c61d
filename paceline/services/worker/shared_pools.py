"""Pools of a host's workers that other workers can read, so that blocks go from pool to pool on one device.

A worker has a file beside the arena. It consists of the worker's blocks if it computes on a CPU, a `PoolDirectory`, and
a page that describes the pool, on a GPU also how to map its memory. The file is locked while the worker lives. Reading
changes no ownership: a reader looks for blocks by name, and each of these blocks is also in the arena. The reader takes
a block from the arena if no pool has it, the pool has dropped it meanwhile, or the pool's worker has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from paceline.core.errors import BusyError
from paceline.core.kv_layout import KVLayout
from paceline.engine.pool_directory import BlockCopy, PoolDirectory
from paceline.kernels.block_copies import BlockCopies
from paceline.kernels.native.library import memory_fence
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.shared_memory import give_back, map_shared, take_huge_pages


def device_name(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in every process however it numbers the GPUs; "cpu" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def export(pool: Tensor) -> pb.CudaMemory:
    """Return the handle that `map_exported` needs in another process. The pool must not be freed while this process
    lives.
    """
    shared = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    _, handle, size, offset, ref_counter, ref_counter_offset, event, waits = shared
    return pb.CudaMemory(
        handle=handle,
        size=size,
        offset=offset,
        ref_counter=ref_counter,
        ref_counter_offset=ref_counter_offset,
        event=event,
        waits_for_event=waits,
    )


def map_exported(memory: pb.CudaMemory, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Map memory that another process exported on this device, as a flat tensor. Raises RuntimeError if this fails."""
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        memory.handle,
        memory.size,
        memory.offset,
        memory.ref_counter,
        memory.ref_counter_offset,
        memory.event,
        memory.waits_for_event,
    )
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


LOOK_SECONDS = 1.0
"""Shortest time between two searches for new pools, in seconds."""

LAUNCHED_MOVES = 128
"""Number of blocks that are copied together, while the next blocks are looked up."""

_PAGE = 4096
_SIZE_BYTES = 2
"""Size in bytes of the number at the start of the last page. The number is the length of the description after it."""

log = logging.getLogger(__name__)


def remove_ended(arena: Path) -> None:
    """Remove the files of pools beside this arena whose workers have ended, because a killed worker could not."""
    for path in arena.parent.glob(f"{arena.stem}-*.pool"):
        with contextlib.suppress(OSError):  # the file is gone, in use, or not ours
            # Others may have put a pipe or a link there: O_NONBLOCK does not wait, O_NOFOLLOW does not follow.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


class SharedPool:
    """A worker's own pool, which other workers can read from construction to `close`.

    Args:
        arena: file of the arena whose blocks are copied into the pool.
        arena_slots: number of slots of the arena.
        slots: number of slots of the pool.

    Raises:
        ConfigError: the native library, which orders memory on this processor, is not there.
        OSError: the arena's folder has no room, or cannot have such a file.
        RuntimeError: the device has no room, or its memory cannot be shared.
    """

    def __init__(
        self, arena: Path, arena_slots: int, layout: KVLayout, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.path = arena.with_name(f"{arena.stem}-{secrets.token_hex(8)}.pool")
        self.about = pb.SharedPool(
            fingerprint=layout.fingerprint,
            device=device_name(device),
            slots=slots,
            slot_bytes=layout.slot_bytes,
            arena_slots=arena_slots,
        )
        size = slots * layout.slot_bytes
        self._descriptor = os.open(arena.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if device.type == "cpu":
                take_huge_pages(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, _file_bytes(self.about))
            file = map_shared(self._descriptor, _file_bytes(self.about))
            if device.type == "cpu":
                self.pool = torch.frombuffer(file[:size], dtype=dtype)
            else:
                self.pool = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
                self.about.cuda.CopyFrom(export(self.pool))
            self.directory = _directory(file, self.about)
            told = self.about.SerializeToString()
            page = len(told).to_bytes(_SIZE_BYTES, "little") + told
            file[-_PAGE:] = page.ljust(_PAGE, b"\0")
            # The file gets its name last, so that nobody finds it before it is complete and locked. Python follows the
            # link in /proc only if a folder is given, and any folder works.
            os.link(f"/proc/self/fd/{self._descriptor}", self.path, src_dir_fd=self._descriptor)
        except BaseException:
            self.close()
            raise

    def give_back(self) -> None:
        """Give the memory of all blocks back to the system. The pool must be empty. On a GPU, do nothing."""
        if not self.pool.is_cuda:
            give_back(self._descriptor, self.pool.nbytes)

    def take_back(self) -> None:
        """Allocate the memory of all blocks again. Raises BusyError if the system has too little memory now."""
        try:
            os.posix_fallocate(self._descriptor, 0, _file_bytes(self.about))
        except OSError as error:
            self.give_back()  # a part may have been allocated
            raise BusyError(f"the worker's KV pool cannot wake now ({error.strerror})") from error

    def close(self) -> None:
        """Prevent new reads from now on. Closing twice is no error."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock
            os.close(self._descriptor)
            self._descriptor = -1


class SharedPools:
    """Copies blocks into this worker's pool from the pools of other workers on the same device.

    Args:
        own: this worker's pool.
        copies: copies into this worker's pool.
    """

    def __init__(self, own: SharedPool, copies: BlockCopies) -> None:
        self._own = own
        self._copies = copies
        self._known: dict[Path, _Pool | None] = {}
        """Pools by file; None if a pool cannot be read."""
        self._looked = 0.0
        self.drop_ended()

    def load(self, moves: Sequence[BlockCopy]) -> list[BlockCopy]:
        """Copy blocks that other pools have into this worker's pool, and wait. Return the moves that were not done."""
        self.drop_ended()
        left = list(moves)
        for pool in self._known.values():
            if pool is not None and left:
                left = self._load_from(pool, left)
        return left

    def close(self) -> None:
        for path in list(self._known):
            self._drop(path)

    def _load_from(self, pool: _Pool, moves: list[BlockCopy]) -> list[BlockCopy]:
        if pool.ended():
            return moves
        launched = []
        for first in range(0, len(moves), LAUNCHED_MOVES):
            part = moves[first : first + LAUNCHED_MOVES]
            found = pool.directory.find(part)
            own_slots = [part[index].pool_slot for index in found.indices]
            launched.append((part, found, self._copies.load_from(pool.blocks, found.pool_slots.tolist(), own_slots)))
        left: list[BlockCopy] = []
        for part, found, copy in launched:
            copy.wait()
            done = set(pool.directory.unchanged(found))
            left += [move for index, move in enumerate(part) if index not in done]
        # On some devices, the memory of a process that ended meanwhile may contain anything.
        return moves if pool.ended() else left

    def drop_ended(self) -> None:
        """Find new pools, and unmap ended pools, whose memory stays allocated until then. Do nothing if the last search
        was less than LOOK_SECONDS ago.
        """
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        own_path = self._own.path
        for path, pool in self._known.items():
            if pool is not None and pool.ended():
                path.unlink(missing_ok=True)  # a killed process could not remove its file
        there = set(own_path.parent.glob(f"{own_path.stem.rpartition('-')[0]}-*.pool")) - {own_path}
        for path in there - self._known.keys():
            with contextlib.suppress(FileNotFoundError):  # the file was removed meanwhile
                self._known[path] = self._open(path)
        for path in self._known.keys() - there:
            self._drop(path)

    def _open(self, path: Path) -> _Pool | None:
        try:
            pool = _Pool(path, self._own)
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError, ValueError, DecodeError) as error:
            log.warning("blocks of %s come through the arena: %s", path.name, error)
            return None
        log.info("blocks may come from %s directly", path.name)
        return pool

    def _drop(self, path: Path) -> None:
        if pool := self._known.pop(path):
            pool.close()


class _Pool:
    """The pool of another worker, with blocks of the same arena in memory of the same device.

    Raises:
        FileNotFoundError: its worker has ended; its file has been removed.
        OSError, RuntimeError, ValueError, DecodeError: the pool cannot be read here; the message says why.
    """

    def __init__(self, path: Path, own: SharedPool) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ValueError("it is not a file that only this user can open")
            if self.ended():
                path.unlink(missing_ok=True)
                raise FileNotFoundError
            page = os.pread(self._descriptor, _PAGE, max(0, status.st_size - _PAGE))
            size = int.from_bytes(page[:_SIZE_BYTES], "little")
            about = pb.SharedPool.FromString(page[_SIZE_BYTES:][:size])
            for field in ("fingerprint", "slot_bytes", "arena_slots", "device"):
                if getattr(about, field) != getattr(own.about, field):
                    raise ValueError(f"its {field} is {getattr(about, field)}, ours is {getattr(own.about, field)}")
            if status.st_size != _file_bytes(about):
                raise ValueError(f"it has {status.st_size} bytes in place of {_file_bytes(about)}")
            file = map_shared(self._descriptor, status.st_size)
            if own.pool.is_cuda:
                flat = map_exported(about.cuda, own.pool.device, own.pool.dtype)
            else:
                flat = torch.frombuffer(file[: about.slots * about.slot_bytes], dtype=own.pool.dtype)
            self.blocks = flat.view(about.slots, -1)
            self.directory = _directory(file, about)
        except BaseException:
            self.close()
            raise

    def ended(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


def _directory_at(about: pb.SharedPool) -> int:
    return -(-about.slots * about.slot_bytes // _PAGE) * _PAGE if about.device == "cpu" else 0


def _file_bytes(about: pb.SharedPool) -> int:
    whole = _directory_at(about) + PoolDirectory.bytes_for(about.arena_slots)
    return -(-whole // _PAGE) * _PAGE + _PAGE


def _directory(file: memoryview, about: pb.SharedPool) -> PoolDirectory:
    return PoolDirectory(file[_directory_at(about) :], about.arena_slots, about.slots, memory_fence())
