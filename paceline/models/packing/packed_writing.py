"""Writing of packed weights: several threads pack a model's matrices, each into a file of its own.

A file holds matrices, each aligned to a cache line, then their index in JSON, then the index's length in eight bytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import torch
from torch import Tensor

from paceline.kernels.packed_weight import PackedWeight
from paceline.models.files.cache import UNFINISHED
from paceline.models.files.durable import rename_durably
from paceline.models.files.folder_lease import clear
from paceline.models.packing.quantized import Matrix, Packer

LENGTH_BYTES = 8
"""Number of bytes of the index's length at the end of a file: an unsigned integer, lowest byte first."""

Place = tuple[int, int, int | None]
"""Begin and end of a matrix in its file, in bytes, and its `PackedWeight.format`."""

_ALIGNMENT = 64

_MOST_THREADS = 8
_MOST_WITH_TORCH = 2
_WAITING_PER_THREAD = 2
_MOST_UNWRITTEN = 2 << 30
"""Largest number of bytes of matrices that wait to be packed or are being packed, counted in bf16. They use memory if
they are not part of a mapped file, for example because the checkpoint has another dtype."""
_KEPT_BYTES = 64 << 20
"""Largest size of a buffer that is kept for the next matrix, in bytes."""
_PIECE = 8 << 20
"""Number of bytes that are written at a time: some large pages."""
_TOLD_SECONDS = 5.0
"""Seconds between two messages about the progress."""

log = logging.getLogger(__name__)


def write_packed(
    folder: Path, packer: Packer, visit: Callable[[Writing], object], check: Callable[[], None] = lambda: None
) -> None:
    """Write the matrices that `visit` passes to its argument to a new folder, which appears whole or not at all.

    Args:
        check: raises an error if the folder must not appear, because its name promises something else.

    Raises:
        OSError: the folder cannot be written.
    """
    with _replacing(folder) as scratch, Writing(scratch, packer) as writing:
        visit(writing)
        writing.finish()
        check()


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Make a new folder, which takes its name when its files are complete."""
    scratch = folder.with_suffix(UNFINISHED)
    try:
        scratch.mkdir()
        yield scratch
        rename_durably(scratch, folder)
    finally:
        clear(scratch)


class Writing:
    """A `Pack` that writes matrices to files. Reading, packing and writing overlap.

    One file would keep threads waiting, because Linux lets one thread at a time write to it.

    Args:
        folder: folder for the files, one for each thread.
        packer: packs the matrices.
    """

    needs_content = True

    def __init__(self, folder: Path, packer: Packer) -> None:
        self._packer = packer
        # Rounding and decoding are done by torch, which has a team of threads for each of ours.
        most = _MOST_THREADS if packer.weight_form == "none" else _MOST_WITH_TORCH
        threads = min(torch.get_num_threads(), most)
        self._threads = ThreadPoolExecutor(threads, "pack")
        self._most_unwritten = threads * (1 + _WAITING_PER_THREAD)
        self._unwritten: deque[tuple[Future[None], int]] = deque()
        self._unwritten_bytes = 0
        self._written_weights = 0
        self._told = time.monotonic()
        self._files = [_PackedFile(folder / str(number)) for number in range(threads)]
        self._free: SimpleQueue[_PackedFile] = SimpleQueue()
        for file in self._files:
            self._free.put(file)

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._files:
            file.close()

    def __call__(self, name: str, weight: Matrix) -> PackedWeight:
        if not (isinstance(weight, Tensor) and weight.is_meta):  # else it is a missing tensor, which the loader reports
            size = math.prod(weight.shape) * torch.bfloat16.itemsize
            while self._unwritten and not self._has_room(size):
                self._wait_for_one()
            self._unwritten.append((self._threads.submit(self._write, name, weight), size))
            self._unwritten_bytes += size
        return self._packer.without_data(weight)

    def _has_room(self, size: int) -> bool:
        return len(self._unwritten) < self._most_unwritten and self._unwritten_bytes + size <= _MOST_UNWRITTEN

    def _wait_for_one(self) -> None:
        written, size = self._unwritten.popleft()
        written.result()
        self._unwritten_bytes -= size
        self._written_weights += size // torch.bfloat16.itemsize
        if (now := time.monotonic()) - self._told >= _TOLD_SECONDS:
            self._told = now
            log.info("packing the model's weights: %.2f billion so far", self._written_weights / 1e9)

    def _write(self, name: str, weight: Matrix) -> None:
        file = self._free.get()
        try:
            file.write(name, weight, self._packer)
        finally:
            self._free.put(file)

    def finish(self) -> None:
        """Write all matrices that are not written yet, and wait until all files are on the disk."""
        while self._unwritten:
            self._wait_for_one()
        for _ in self._threads.map(_PackedFile.finish, self._files):
            pass


class _PackedFile:
    """A new file of packed matrices, for one thread at a time."""

    def __init__(self, file: Path) -> None:
        self._raw = file.open("wb", buffering=0)
        self._output = Output(self._raw)
        self._scratch = _Scratch()
        self._index: dict[str, Place] = {}

    def write(self, name: str, weight: Matrix, packer: Packer) -> None:
        packed = packer(name, weight, self._scratch.take)
        self._output.write(bytes(-self._output.tell() % _ALIGNMENT))
        start = self._output.tell()
        self._output.write(packed.data.view(torch.uint8).numpy().data)
        self._index[name] = start, self._output.tell(), packed.format
        self._scratch.keep(_KEPT_BYTES)

    def finish(self) -> None:
        text = json.dumps(self._index).encode()
        self._output.write(text + len(text).to_bytes(LENGTH_BYTES, "little"))
        self._output.flush()
        os.fsync(self._raw.fileno())

    def close(self) -> None:
        self._raw.close()


class _Scratch:
    """Memory for one packed matrix at a time. The system would clear new memory for each of them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if size > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]

    def keep(self, most: int) -> None:
        """Free the memory if it is larger than `most` bytes."""
        if len(self._memory) > most:
            self._memory = torch.empty(0, dtype=torch.uint8)


class Output:
    """Writes a file in aligned pieces, so that the system can cache it in large pages and map these.

    Args:
        raw: an unbuffered file at its beginning.
        piece: size of a piece, in bytes.
    """

    def __init__(self, raw: IO[bytes], piece: int = _PIECE) -> None:
        self._raw = raw
        self._piece = memoryview(bytearray(piece))
        self._used = self._written = 0

    def tell(self) -> int:
        return self._written + self._used

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            part = rest[: len(self._piece) - self._used]
            self._piece[self._used : self._used + len(part)] = part
            self._used += len(part)
            rest = rest[len(part) :]
            if self._used == len(self._piece):
                self.flush()

    def flush(self) -> None:
        """Write the bytes that are still in memory to the file. If they are not a whole piece, nothing more may be
        written.
        """
        rest = self._piece[: self._used]
        while rest:
            rest = rest[self._raw.write(rest) :]
        self._written += self._used
        self._used = 0
