"""The arena: one file of shared memory that leases every KV block of a host, and the page on which its workers agree
whose turn it is."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.machine import available_memory
from paceline.core.turns import PAGE_BYTES
from paceline.services.common.shared_memory import is_mapped, take_huge_pages

log = logging.getLogger(__name__)


class Arena:
    """Owns the file from construction to `close`.

    A lock on it lives as long as this process, so that whoever finds the file can tell whether it is still in use.

    Args:
        folder: a tmpfs that all workers of the host see.
        size: bytes for blocks. All of them are taken now, about a fifth of a second for each GiB.
        owner: a name under which a successor of this service finds it again.

    Raises:
        ConfigError: the folder cannot be used, or there is too little memory.
    """

    def __init__(self, folder: Path, size: int, owner: str = "") -> None:
        self.size = size
        check_room(folder, size)
        self.path, self._descriptor = _create_locked(folder, _prefix(owner))
        try:
            if not take_huge_pages(self._descriptor, size):
                log.info("the arena has small pages, at least in part; attention is faster with huge ones")
            # A page that is missing when a worker first writes to it would be SIGBUS, and a death without a word.
            os.posix_fallocate(self._descriptor, 0, size + PAGE_BYTES)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot make an arena of {_mib(size)} in {folder} ({error.strerror}); lower it with --kv-memory"
            ) from error

    @classmethod
    def left_by(cls, folder: Path, owner: str) -> Arena | None:
        """The arena of an owner that ended before it could remove it; where there are several, one of them."""
        for path in folder.glob(f"{_prefix(owner)}*.arena"):
            if (descriptor := _lock_stale(path)) is not None:
                arena = cls.__new__(cls)
                arena.path, arena._descriptor = path, descriptor
                arena.size = os.fstat(descriptor).st_size - PAGE_BYTES
                if arena.size > 0:
                    return arena
                arena.close()  # its owner ended before it had any memory
        return None

    def close(self) -> None:
        """Removes the file. Its memory is free once no worker maps it. Closing twice is no error."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_stale_arenas(folder: Path) -> int:
    """Removes this user's arenas, and workers' pools beside them, that those left behind who were killed, unless others
    map them. Returns how many."""
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
    """How the names of this user's arenas begin, or those of one owner."""
    tag = f"{hashlib.blake2b(owner.encode(), digest_size=6).hexdigest()}-" if owner else ""
    return f"paceline-{os.getuid()}-{tag}"


def _lock_stale(path: Path) -> int | None:
    """A descriptor that leases the lock; None for somebody else's file, one that is locked, or gone by now."""
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
    # Between creating and locking, a service that starts at the same time may take the file for a stale one and remove
    # it; then there is another try.
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
    """Raises ConfigError where an arena of `size` bytes has no room now."""
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
