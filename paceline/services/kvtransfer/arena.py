"""The arena: one file of shared memory with all KV blocks of a host, and after them one page through which the host's
workers take turns on its cores (`core.turns`)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import threading
from pathlib import Path

from paceline.core.errors import BusyError, ConfigError
from paceline.core.machine import available_memory
from paceline.core.turns import PAGE_BYTES
from paceline.services.common.shared_memory import give_back, is_mapped, take_huge_pages

_SECTOR = 512
"""Unit of the system's count of a file's memory, in bytes."""

log = logging.getLogger(__name__)


class Arena:
    """The file of an arena, which exists from construction until `close`.

    This process keeps a lock on the file until it ends, so that others can tell whether the file is still in use.
    `give_back` and `take_back` may run on other threads, one at a time.

    Args:
        folder: a tmpfs that all workers of the host can access.
        size: bytes for blocks. All of them are allocated now, which takes about 0.2 s per GiB.
        owner: a name by which a successor of this service finds the file (`left_by`).

    Raises:
        ConfigError: the folder cannot be used, or there is too little memory.
    """

    def __init__(self, folder: Path, size: int, owner: str = "") -> None:
        self.size = size
        self._changing = threading.Lock()
        check_room(folder, size)
        self.path, self._descriptor = _create_locked(folder, _prefix(owner))
        try:
            self._allocate()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot make an arena of {_mib(size)} in {folder} ({error.strerror}); lower it with --kv-memory"
            ) from error

    def _allocate(self) -> None:
        """Allocate all pages. Raises OSError if there is too little memory."""
        if not take_huge_pages(self._descriptor, self.size):
            log.info("at least a part of the arena has small pages; attention is faster with huge pages")
        # If a page could not be allocated at a worker's first write, SIGBUS would kill the worker.
        os.posix_fallocate(self._descriptor, 0, self.size + PAGE_BYTES)

    @property
    def has_memory(self) -> bool:
        """Whether all pages are allocated, as they are until `give_back`."""
        return os.fstat(self._descriptor).st_blocks * _SECTOR >= self.size

    def give_back(self) -> None:
        """Give the memory of all blocks back to the system. Their content is lost. No worker may touch a block before
        `take_back`.
        """
        with self._changing:
            self._give_back()

    def _give_back(self) -> None:
        try:
            give_back(self._descriptor, self.size)
        except OSError as error:
            log.warning("the memory of %s stays allocated while all workers sleep (%s)", self.path, error.strerror)

    def take_back(self) -> None:
        """Allocate the memory of all blocks again. Raises BusyError if the system has too little memory now."""
        with self._changing:
            try:
                check_room(self.path.parent, self.size)
                self._allocate()
            except (ConfigError, OSError) as error:
                self._give_back()  # a part may have been allocated
                raise BusyError(f"the KV memory of this host cannot wake now: {error}") from error

    @classmethod
    def left_by(cls, folder: Path, owner: str) -> Arena | None:
        """Return an arena whose owner ended without removing it; any of them if there are several, and None if there is
        none.
        """
        for path in folder.glob(f"{_prefix(owner)}*.arena"):
            if (descriptor := _lock_stale(path)) is not None:
                arena = cls.__new__(cls)
                arena.path, arena._descriptor, arena._changing = path, descriptor, threading.Lock()
                arena.size = os.fstat(descriptor).st_size - PAGE_BYTES
                if arena.size > 0:
                    return arena
                arena.close()  # its owner ended before allocating any memory
        return None

    def close(self) -> None:
        """Remove the file. Its memory is freed when no worker maps it any more. Closing twice is no error."""
        with self._changing:  # a thread must not write to the file that gets this descriptor next
            if self._descriptor >= 0:
                self.path.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = -1


def remove_stale_arenas(folder: Path) -> int:
    """Remove this user's arenas and worker pools whose processes were killed, unless other processes map them.

    Returns the number of removed files.
    """
    removed = 0
    for path in [*folder.glob(f"{_prefix()}*.arena"), *folder.glob(f"{_prefix()}*.pool")]:
        if (descriptor := _lock_stale(path)) is not None:
            if not is_mapped(descriptor):
                path.unlink(missing_ok=True)
                removed += 1
            os.close(descriptor)
    if removed:
        log.warning("removed %d stale arena(s) and pool(s) from %s", removed, folder)
    return removed


def _prefix(owner: str = "") -> str:
    """Return the prefix of the names of this user's arena files, or of one owner's."""
    tag = f"{hashlib.blake2b(owner.encode(), digest_size=6).hexdigest()}-" if owner else ""
    return f"paceline-{os.getuid()}-{tag}"


def _lock_stale(path: Path) -> int | None:
    """Lock a file and return its descriptor. Return None if it is another user's, locked, or gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    os.close(descriptor)
    return None


def _create_locked(folder: Path, prefix: str) -> tuple[Path, int]:
    # Before the new file is locked, another service that is starting may take it for a stale file and remove it. If so,
    # try again.
    for _ in range(10):
        path = folder / f"{prefix}{secrets.token_hex(8)}.arena"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot create the arena {path} ({error.strerror}); choose another --arena-dir"
            ) from error
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return path, descriptor
        os.close(descriptor)
    raise ConfigError(f"cannot create an arena in {folder}: something keeps removing it; choose another --arena-dir")


def check_room(folder: Path, size: int) -> None:
    """Raise ConfigError if the folder or the machine has no room for an arena of `size` bytes now."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"cannot use {folder} ({error.strerror}); choose another --arena-dir") from error
    rooms = ((f"{folder} has", space.f_bavail * space.f_frsize), ("this machine has", available_memory()))
    for subject, room in rooms:
        if room is not None and room < size:
            raise ConfigError(
                f"the KV memory needs {_mib(size)} and {subject} only {_mib(room)} free; lower it with --kv-memory"
            )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
