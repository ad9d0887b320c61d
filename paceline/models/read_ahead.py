"""Reading of mapped files before they are used. A process that touches such memory waits for one page after another."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

from torch import Tensor

from paceline.core.machine import available_memory

_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, which Python does not name. It exists since Linux 5.14."""
_THREADS = 2
"""Threads that read a map. One of them waits for each page, so it has a fraction of a disk's rate."""
_PIECE = 16 << 20


def will_read(data: Tensor) -> None:
    """Let the system begin to read a tensor, if it is in a mapped file."""
    if hasattr(mmap, "MADV_WILLNEED") and not data.is_meta:
        _advise(data.data_ptr(), data.nbytes, mmap.MADV_WILLNEED)


def read_ahead(mapped: Tensor) -> None:
    """Begin to read a mapped file, uint8 [size], from its beginning to its end. Large pages stay possible.

    Do nothing if it would take most of the available memory, because pages might be dropped before they are used.
    """
    available = available_memory()
    if available is None or len(mapped) > available * 3 // 4:
        return
    pieces = iter(range(0, len(mapped), _PIECE))

    def read() -> None:
        for start in pieces:  # each thread takes the next one; the iterator's step is atomic
            if not _advise(mapped.data_ptr() + start, min(_PIECE, len(mapped) - start), _POPULATE_READ):
                return

    with contextlib.suppress(RuntimeError):  # the system gives no more threads
        for number in range(_THREADS):
            # A daemon, because the system ends the call together with the process.
            threading.Thread(target=read, name=f"read-ahead-{number}", daemon=True).start()


def _advise(address: int, size: int, advice: int) -> bool:
    """Call madvise for the pages of this memory, without the GIL. Return False if the system refuses it."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        madvise = ctypes.CDLL(None).madvise
    except AttributeError:
        return False
    return not madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), advice)
