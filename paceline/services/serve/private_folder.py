"""A folder for the length of a process, also when the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "paceline-stack-"
_SETTLED_SECONDS = 60.0
"""A younger folder may belong to a process that has not locked it yet."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user may read; removed at the end, or, after a SIGKILL, by whoever comes next."""
    _remove_stale(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        # The lock lives as long as this process: so others know that the folder is in use.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, locked, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _SETTLED_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
