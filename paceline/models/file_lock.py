"""A lock that processes of one machine share."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.core.errors import ModelError

_LOCK_SECONDS = 7200.0


@contextmanager
def file_lock(path: Path, what: str, report: Callable[[str], None]) -> Iterator[None]:
    """Keeps out other processes that want to make the same thing. The system lifts it when this process dies.

    Args:
        path: the file that is locked; made where it is not there.
        what: is being made, for people.
        report: is told when another process has the lock.

    Raises:
        ModelError: the lock was not to be had for two hours.
        OSError: `path` cannot be written.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    waiting = False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has been making {what} for too long; end it ({path})") from None
            if not waiting:
                waiting = True
                report(f"waiting for another process that makes {what}")
            time.sleep(0.2)
        yield
