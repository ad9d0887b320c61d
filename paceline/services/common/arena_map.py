"""A worker's view of its host's arena."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.turns import PAGE_BYTES
from paceline.services.common.huge_pages import map_shared


def map_arena(path: Path, size: int) -> memoryview:
    """Maps the arena that the kvtransfer service made, shared and writable: its blocks, and behind them the page of
    `paceline.core.turns`.

    Until the last view of it is released it stays readable, even after the service has gone, and nobody takes the file
    for a stale one.

    Args:
        size: bytes for blocks that the service announced.

    Raises:
        ConfigError: there is no such file, it is not the private arena of this user, or it cannot be mapped.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot open the arena {path} ({error.strerror}); worker and kvtransfer must run as the same user "
            "and see the same --arena-dir"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"{path} is not an arena that only this user can open; refusing to use it")
        whole = size + PAGE_BYTES
        if status.st_size != whole:
            raise ConfigError(f"the arena {path} has {status.st_size} bytes where its service announced {whole}")
        _lock(descriptor, fcntl.F_RDLCK)
        try:
            return map_shared(descriptor, whole)  # which keeps the file open, and so the lock
        except OSError as error:
            raise ConfigError(f"cannot map the arena {path} ({error.strerror})") from error
    finally:
        os.close(descriptor)


def is_mapped(descriptor: int) -> bool:
    """Whether a worker maps this arena."""
    try:
        _lock(descriptor, fcntl.F_WRLCK)
    except OSError:
        return True
    _lock(descriptor, fcntl.F_UNLCK)
    return False


def _lock(descriptor: int, kind: int) -> None:
    """A lock of the open file, as long as that is open; beside the service's own, which is of another kind.

    Raises:
        OSError: somebody else has one that does not go with it.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))
