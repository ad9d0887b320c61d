"""Shared locks on folders of Paceline's cache, which tell other processes that a folder is in use. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import ModelError

REMOVED = ".removed-"
"""Part of the name of a folder or file that is being removed. If the removing process was killed, any process may
remove the rest.
"""

_LOCK_SECONDS = 10.0
_RETRY_SECONDS = 0.01


class FolderLease:
    """A shared lock on a folder until this object is closed or collected, or this process ends.

    A lease needs no right to write. In a file system without locks nothing is locked, and nothing is removed
    automatically.

    Raises:
        OSError: there is no such folder, or another process has just removed it.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock_shared(self._descriptor)
            # A process that removes a folder takes its name while it holds the lock.
            if not os.path.samestat(os.fstat(self._descriptor), folder.stat()):
                raise FileNotFoundError(folder)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the folder could not be opened
            self.close()


def lease_model(folder: Path) -> FolderLease:
    """Return a lease of a model's folder. Raises ModelError if the folder has just been removed."""
    try:
        return FolderLease(folder)
    except OSError as error:
        raise ModelError(f"{folder} has just been removed; start again") from error


def is_leased(folder: Path) -> bool:
    """Return whether a process may have a lease of this folder. Raises OSError if the folder cannot be opened."""
    with _sole_use(folder) as is_sole:
        return not is_sole


def remove_unless_leased(path: Path, leased: Path) -> bool:
    """Remove a folder or file, unless a process has a lease of the folder `leased` in it. Return whether it is gone.

    The folder or file is renamed first, so that no process takes the rest for a whole folder if this process dies.
    Raises OSError if it cannot be removed.
    """
    left = path.with_name(f".{path.name}{REMOVED}{secrets.token_hex(4)}")
    try:
        with _sole_use(leased) if leased.is_dir() else contextlib.nullcontext(True) as is_sole:
            if not is_sole:
                return False
            path.rename(left)
    except FileNotFoundError:  # another process was quicker
        return True
    clear(left)
    return True


def clear(path: Path) -> None:
    """Remove a folder or file that no process uses. Raises OSError if it cannot be removed."""
    with contextlib.suppress(FileNotFoundError):  # another process removes it, too
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _lock_shared(descriptor: int) -> None:
    """Wait until no process holds the lock alone, which it does for moments only, and share it."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        except OSError:  # a file system without locks
            return


@contextlib.contextmanager
def _sole_use(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder alone meanwhile, if nobody has a lease of it. The value says whether this is so."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
