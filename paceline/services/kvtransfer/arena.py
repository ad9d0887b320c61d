"""The arena: one file of shared memory that holds every KV block of a host, and the page on which its workers agree
whose turn it is."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import stat
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.machine import available_memory
from paceline.core.turns import PAGE_BYTES

log = logging.getLogger(__name__)


class Arena:
    """Owns the file from construction to `close`.

    A lock on it lives as long as this process, so that whoever finds the file can tell whether it is still in use.

    Args:
        folder: a tmpfs that all workers of the host see.
        size: bytes for blocks. All of them are taken now, about a fifth of a second for each GiB.

    Raises:
        ConfigError: the folder cannot be used, or there is too little memory.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        check_room(folder, size)
        self.path, self._descriptor = _create_locked(folder)
        try:
            # A page that is missing when a worker first writes to it would be SIGBUS, and a death without a word.
            os.posix_fallocate(self._descriptor, 0, size + PAGE_BYTES)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot make an arena of {_mib(size)} in {folder} ({error.strerror}); lower it with --kv-memory"
            ) from error
        self.memory = memoryview(mmap.mmap(self._descriptor, size))
        """The blocks. Stays readable after `close`, for who still moves some of them."""

    def close(self) -> None:
        """Removes the file. Its memory is free once no worker maps it."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def remove_stale_arenas(folder: Path) -> int:
    """Removes this user's arenas whose service is gone, killed before it could. Returns how many."""
    removed = 0
    for path in folder.glob(f"{_prefix()}*.arena"):
        with contextlib.suppress(OSError):  # somebody else's file, locked, or gone by now
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed += 1
            finally:
                os.close(descriptor)
    if removed:
        log.warning("removed %d stale arena(s) from %s", removed, folder)
    return removed


def _prefix() -> str:
    return f"paceline-{os.getuid()}-"


def _create_locked(folder: Path) -> tuple[Path, int]:
    # Between creating and locking, a service that starts at the same time may take the file for a stale one and remove
    # it; then there is another try.
    for _ in range(10):
        path = folder / f"{_prefix()}{secrets.token_hex(8)}.arena"
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
