"""Mapping of files that processes of a host share: the arena and the pools beside it.

The memory of these files is in pages of 2 MiB if Linux supports this (6.1 or newer, MADV_COLLAPSE). Attention reads
from the whole memory, and with pages of 4 KiB it would wait for page tables about as often as for keys. A huge page
must also begin at a multiple of its size in the address space. Python's own `mmap` does not guarantee this.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.turns import PAGE_BYTES

_PAGE = 2 << 20
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def map_shared(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of a file, shared and writable, until the last view of them is released.

    Until then a copy of the descriptor keeps the open file and its locks. The mapping alone does not keep the locks on
    overlayfs: it keeps the file of the lower layer open there, but the locks are on the file of the upper layer.

    Raises:
        OSError: there is no room in the address space, or the file cannot be mapped.
    """
    # The reserved range has room for an aligned part. The file is mapped there.
    reserved = _mmap(None, size + _PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        at = -(-reserved // _PAGE) * _PAGE
        _mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        kept = os.dup(descriptor)
    except OSError:
        _libc.munmap(reserved, size + _PAGE)
        raise
    whole = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(whole, _unmap, reserved, size + _PAGE, kept).atexit = False
    return memoryview(whole).cast("B")


def _unmap(reserved: int, size: int, descriptor: int) -> None:
    _libc.munmap(reserved, size)
    os.close(descriptor)


def take_huge_pages(descriptor: int, size: int) -> bool:
    """Allocate memory in huge pages for a new and empty file, as far as the system has them. The rest is allocated on
    first use.

    Returns whether all whole pages of 2 MiB are huge. Raises OSError if there is no memory.
    """
    whole = size // _PAGE * _PAGE
    if whole == 0:
        return False
    view = map_shared(descriptor, whole)
    # A page becomes huge only if a part of it is allocated. One byte is enough, and leaves little to copy.
    for start in range(0, whole, _PAGE):
        os.pwrite(descriptor, b"\0", start)
    return bool(_libc.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), whole, _MADV_COLLAPSE) == 0)


def give_back(descriptor: int, size: int) -> None:
    """Give the memory of the first `size` bytes of a file back to the system, for all processes that map it.

    The file keeps its size, and these bytes read as zeros afterwards. Raises OSError if the file system cannot do it.
    """
    if _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, 0, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mmap(at: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    address = _libc.mmap(at, size, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes")
    return int(address)


def map_arena(path: Path, size: int) -> memoryview:
    """Map the arena that the kvtransfer service has created, shared and writable: its blocks, then the page of
    `paceline.core.turns`.

    Until the last view of the arena is released, the arena stays readable even if the service has ended, and its file
    does not count as stale.

    Args:
        size: size of all blocks in bytes, as the service has announced.

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
            raise ConfigError(f"the arena {path} has {status.st_size} bytes, but its service announced {whole}")
        _lock(descriptor, fcntl.F_RDLCK)
        try:
            return map_shared(descriptor, whole)  # keeps the file open, and so the lock
        except OSError as error:
            raise ConfigError(f"cannot map the arena {path} ({error.strerror})") from error
    finally:
        os.close(descriptor)


def is_mapped(descriptor: int) -> bool:
    """Return whether a worker maps this arena."""
    try:
        _lock(descriptor, fcntl.F_WRLCK)
    except OSError:
        return True
    _lock(descriptor, fcntl.F_UNLCK)
    return False


def _lock(descriptor: int, kind: int) -> None:
    """Set a lock on a file that lasts until the file is closed. The service's own lock is of another kind (flock).

    Raises:
        OSError: another process has a conflicting lock.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))
