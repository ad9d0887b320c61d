"""The weights that this process maps from files. Their memory can be given back, because the files have the content."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.models.files.read_ahead import POPULATE_READ, advise

_THREADS = 2
_PIECE = 64 << 20


class WeightMap(NamedTuple):
    """A file, or a part of it, in the address space of this process."""

    begin: int
    """Address of the first byte."""
    size: int
    file: str


class WeightMaps:
    """The maps of a worker's files of weights, from the worker's load to its end.

    Args:
        packed_dir: the folder of packed weights, which the workers of a host share.
        folder: the folder of the model, from which tables are mapped.
    """

    def __init__(self, packed_dir: Path, folder: Path) -> None:
        self._packed = f"{packed_dir.resolve()}/"
        self._folders = (self._packed, f"{folder.resolve()}/")
        self._given: list[WeightMap] = []

    def check(self) -> None:
        """Raise InvalidRequestError if the weights are not mapped from files."""
        if not any(each.file.startswith(self._packed) for each in self._maps()):
            raise InvalidRequestError(
                "this worker's weights are in memory of its own, so it cannot give them back; start workers with a "
                "--packed-dir in which they can keep packed weights"
            )

    def give_back(self, from_cache: bool) -> int:
        """Take the maps' pages from this process, and return their size in bytes. Pages come back when they are read.

        The system's cache keeps the pages as long as nobody needs the memory.

        Args:
            from_cache: drop the pages from the system's cache, too. Pages that another process maps stay.
        """
        self._given = list(self._maps())
        for each in self._given:
            advise(each.begin, each.size, mmap.MADV_DONTNEED)
        if from_cache:
            for file in {each.file for each in self._given}:
                with contextlib.suppress(OSError):  # the next reader finds the pages in the cache
                    _drop_cache(file)
        return sum(each.size for each in self._given)

    def take_back(self) -> None:
        """Read the pages that were given back, so that the first step need not wait for them.

        Raises ModelError if a page cannot be read, because a step that touched it would end the process.
        """
        pieces = [
            WeightMap(begin, min(_PIECE, each.begin + each.size - begin), each.file)
            for each in self._given
            for begin in range(each.begin, each.begin + each.size, _PIECE)
        ]
        with ThreadPoolExecutor(_THREADS, "wake") as threads:  # one thread alone has a fraction of a disk's rate
            list(threads.map(_read, pieces))

    def _maps(self) -> Iterator[WeightMap]:
        """Yield the maps whose pages are all those of a file: none of them has been written."""
        found: WeightMap | None = None
        is_written = False
        # Without Linux's list of maps, there are none.
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, *rest = line.split(maxsplit=5)
                if not name.endswith(":"):
                    file = rest[4].rstrip("\n") if len(rest) == 5 else ""
                    begin, end = (int(address, 16) for address in name.split("-"))
                    found = WeightMap(begin, end - begin, file) if file.startswith(self._folders) else None
                elif name == "Anonymous:":
                    is_written = rest[0] != "0"
                elif name == "Swap:" and found is not None and not is_written and rest[0] == "0":
                    yield found  # a written page is in memory, or in the swap, which is listed after it


def _read(piece: WeightMap) -> None:
    """Read all pages of a piece of a map. Raises ModelError if one cannot be read."""
    if advise(piece.begin, piece.size, POPULATE_READ):
        return
    # Linux before 5.14 does not know this advice. There, pages come when they are used.
    if (number := ctypes.get_errno()) not in (0, errno.EINVAL, errno.ENOSYS):
        raise ModelError(
            f"the weights in {piece.file} cannot be read back into memory ({os.strerror(number)}); restart the worker "
            "if this goes on"
        )


def _drop_cache(file: str) -> None:
    """Drop a file from the system's cache. Raises OSError if it cannot be opened."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
