"""Shared memory in pages of 2 MiB: attention reads all over the arena, and with pages of 4 KiB it waits for page tables
about as often as for keys.

That needs no setting of the system, only Linux 6.1 (MADV_COLLAPSE); elsewhere pages stay small. In the address space,
too, a page must begin at a multiple of its size, which Python's own `mmap` does not promise.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_PAGE = 2 << 20
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(descriptor: int, size: int) -> memoryview:
    """Map the first `size` bytes of a file, shared and writable, until the last view of them is gone.

    The file stays open for as long, and so do locks that its descriptor holds. A mapping alone would not do that on
    overlayfs, where it keeps a file of the layer below open, and the lock is on the one above.

    Raises:
        OSError: there is no room in the address space, or the file cannot be mapped.
    """
    # The reserved range has room for an aligned part, where the file is mapped.
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
    """Gives a new and empty file its memory in huge pages, as far as there are any; the rest stays untaken.

    Returns whether all whole pages are huge. Raises OSError where there is no memory.
    """
    whole = size // _PAGE * _PAGE
    if whole == 0:
        return False
    view = map_shared(descriptor, whole)
    # A page without any memory does not become a huge one, and one with much of it would be copied.
    for start in range(0, whole, _PAGE):
        os.pwrite(descriptor, b"\0", start)
    return bool(_libc.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), whole, _MADV_COLLAPSE) == 0)


def _mmap(at: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    address = _libc.mmap(at, size, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes")
    return int(address)
