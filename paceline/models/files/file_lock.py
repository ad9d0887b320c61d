"""A lock that processes of one machine share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from paceline.core.errors import ModelError

_LOCK_SECONDS = 7200.0


@contextmanager
def file_lock(path: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock in the context, so that no other process makes the same result. The system releases it if this
    process dies.

    Args:
        path: the file to lock; it is made if it does not exist.
        what: the result that is made, for messages.
        report: called with a sentence if another process holds the lock.

    Raises:
        ModelError: another process held the lock for two hours.
        OSError: `path` cannot be written.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report(f"waiting for another process that makes {what}")
        try:
            lock.acquire(_LOCK_SECONDS, poll_interval=0.2)
        except Timeout:
            raise ModelError(f"another process has been making {what} for too long; end it ({path})") from None
    try:
        yield
    finally:
        lock.release()
