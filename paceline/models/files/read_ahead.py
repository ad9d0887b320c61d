"""Reading of mapped files before they are used. A process that touches such memory waits for one page after another."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from paceline.core.machine import available_memory

POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, which Python does not name. It exists since Linux 5.14."""
_THREADS = 2
"""Number of threads that read a map. A thread waits for each page, so one thread alone has a fraction of a disk's
rate.
"""
_PIECE = 16 << 20
_WINDOW = 128 << 20
"""Number of bytes of a checkpoint that the system reads at the same time. A disk behind a network or a hypervisor reads
many pieces at once faster than one after another.
"""
_REQUEST = 512 << 10
"""Number of bytes of one request to read ahead. Linux ignores the part of a request above `read_ahead_kb` or the disk's
`max_sectors_kb`.
"""


class TensorPlace(NamedTuple):
    """The place of a tensor, or of a part of it, in a file."""

    name: str
    file: Path
    start: int
    """First byte in the file."""
    end: int
    """Number of the byte after the last one."""


class Lookahead:
    """Lets the system read the tensors of a checkpoint before they are taken, in the order of its files.

    Args:
        places: the places of all tensors, in the order of the files. A tensor may have several places.
        window: bytes that are read at the same time. Larger tensors, which may be tables, are left out.
    """

    def __init__(self, places: Iterable[TensorPlace], window: int = _WINDOW) -> None:
        self._window = window
        self._places = list(places)
        numbers = enumerate(self._places)
        self._number_of = dict(reversed([(place.name, number) for number, place in numbers]))
        self._announced = bytearray(len(self._places))

    def take(self, name: str) -> None:
        """Let the system begin to read this tensor, and the tensors that follow it within the window."""
        room = self._window
        for number in range(self._number_of[name], len(self._places)):
            _, file, start, end = self._places[number]
            room -= end - start
            if room < 0:
                return
            if not self._announced[number]:
                self._announced[number] = True
                _begin_reading(file, start, end)


def safetensors_places(files: Iterable[Path]) -> Iterator[TensorPlace]:
    """Yield the places of all tensors of safetensors files with complete headers, in the order of the files."""
    for file in files:
        with file.open("rb") as source:
            size = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(size))
        header.pop("__metadata__", None)
        first = 8 + size
        places = [
            TensorPlace(name, file, first + begin, first + end)
            for name, entry in header.items()
            for begin, end in [entry["data_offsets"]]
        ]
        yield from sorted(places, key=lambda place: place.start)


def _begin_reading(file: Path, start: int, end: int) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), file.open("rb") as source:  # The file is read without this advice, too.
        for place in range(start, end, _REQUEST):
            os.posix_fadvise(source.fileno(), place, min(_REQUEST, end - place), os.POSIX_FADV_WILLNEED)


def will_read(data: Tensor) -> None:
    """Let the system begin to read a tensor, if it is in a mapped file."""
    if hasattr(mmap, "MADV_WILLNEED") and not data.is_meta:
        for place in range(0, data.nbytes, _REQUEST):
            advise(data.data_ptr() + place, min(_REQUEST, data.nbytes - place), mmap.MADV_WILLNEED)


class MappedFiles:
    """The memory into which this process has mapped some files. Without Linux's list of maps, it is empty."""

    def __init__(self, files: Iterable[Path]) -> None:
        names = {str(file.resolve()) for file in files}
        self._ranges: list[tuple[int, int]] = []
        with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                place, *_, name = line.rstrip("\n").split(maxsplit=5)
                if name in names:
                    begin, end = (int(address, 16) for address in place.split("-"))
                    self._ranges.append((begin, end))

    def has_read(self, data: Tensor) -> None:
        """Take a tensor's pages from this process, if it is in one of the files. Whoever reads it again gets the same
        content from the system's cache or from the disk.
        """
        if data.is_meta or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin, end = data.data_ptr(), data.data_ptr() + data.nbytes
        # Memory that is not mapped from a file would lose its content.
        if data.is_contiguous() and any(first <= begin and end <= last for first, last in self._ranges):
            advise(begin, end - begin, mmap.MADV_DONTNEED)


def read_ahead(maps: Sequence[Tensor]) -> None:
    """Begin to read mapped files, each uint8 [size], side by side from their beginnings. Large pages stay possible.

    Do nothing if the files would take most of the available memory, because pages might be dropped before they are
    used.
    """
    available = available_memory()
    if available is None or sum(map(len, maps)) > available * 3 // 4:
        return
    pieces = iter(sorted((start, number) for number, each in enumerate(maps) for start in range(0, len(each), _PIECE)))

    def read() -> None:
        for start, number in pieces:  # each thread takes the next one; the iterator's step is atomic
            piece = maps[number][start : start + _PIECE]
            if not advise(piece.data_ptr(), len(piece), POPULATE_READ):
                return

    with contextlib.suppress(RuntimeError):  # the system gives no more threads
        for number in range(_THREADS):
            # A daemon, because the system ends the call together with the process.
            threading.Thread(target=read, name=f"read-ahead-{number}", daemon=True).start()


def advise(address: int, size: int, advice: int) -> bool:
    """Call madvise for the pages of this memory, without the GIL. Return False if the system refuses it; `ctypes` has
    the number of the error.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = _madvise()
    return madvise is not None and not madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), advice)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the system's function; None if it has none."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    return found
