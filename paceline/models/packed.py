"""Packed weights in a file. They are packed once, and all workers of a host map the file and share its memory.

The file holds the matrices, each aligned to a cache line, then their index in JSON, then the index's length in eight
bytes. It appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Protocol

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.interface import PackedWeight
from paceline.models.file_lock import file_lock
from paceline.models.quantized import Matrix, Packer
from paceline.models.read_ahead import read_ahead


class Pack(Protocol):
    """A function that packs the matrix of a given name, such as a `Packer`."""

    @property
    def needs_content(self) -> bool:
        """Whether it reads the matrices. Otherwise, they may be on the meta device."""

    def __call__(self, name: str, weight: Matrix, /) -> PackedWeight: ...


_Place = tuple[int, int, int | None]
"""Begin and end of a matrix in the file, in bytes, and its `PackedWeight.format`."""

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_PACKING_THREADS = 2
_MATRICES_IN_MEMORY = 2 * _PACKING_THREADS
"""Packed matrices that are being made or wait for their place in the file."""
_KEPT_BYTES = 64 << 20
"""Largest memory that is used again for other matrices."""
_PIECE = 8 << 20
"""Bytes that are written at once: some large pages."""
_MOST_FORMS = 2
"""Files kept for one model, each in another packing: enough to go back a release, or to run two releases in turns."""

log = logging.getLogger(__name__)


def packed_weights(folder: Path, model: str, packer: Packer, visit: Callable[[Pack], object]) -> Pack:
    """Return a `Pack` that takes a model's matrices from a file in `folder`. Write the file first if it does not exist.

    If the file cannot be kept, log a warning and return a `Pack` that packs into memory of this process.

    Args:
        model: a name for the model's content and dtype, used as a prefix of the file's name.
        packer: packs the matrices, if the file does not have them yet.
        visit: calls a `Pack` with every matrix of the model.

    Raises:
        ModelError: the file is damaged, or `visit` raises it.
    """
    file = folder / f"{model}-{packer.form}.packed"
    try:
        if not file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with file_lock(folder / f".{model}.lock", "packed weights", log.info):
                if not file.is_file():
                    _remove_unused(folder, model)
                    _write(file, packer, visit)
        _mark_used(file)
    except OSError as error:
        log.warning("this worker packs weights into its own memory, because %s cannot be kept: %s", file, error)
        return packer
    return _PackedFile(file, packer)


def _mark_used(file: Path) -> None:
    """Set a file's time to now. Raise OSError if the file was just removed."""
    try:
        os.utime(file)
    except OSError:
        if not file.is_file():
            raise
        # A folder that cannot be written. Its files can still be shared, and nobody removes them.


def _remove_unused(folder: Path, model: str) -> None:
    """Remove the least recently used files, to make room for one more. Workers that map a removed file go on."""
    files = sorted(folder.glob(f"{glob.escape(model)}-*.packed"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_MOST_FORMS - 1 :]:
        file.unlink(missing_ok=True)


def _write(file: Path, packer: Packer, visit: Callable[[Pack], object]) -> None:
    with _replacing(file) as output, _Writing(output, packer) as writing:
        visit(writing)
        writing.finish()


class _Writing:
    """A `Pack` that writes matrices to a file, in the order of its calls. Reading, packing and writing overlap."""

    needs_content = True

    def __init__(self, output: Output, packer: Packer) -> None:
        self._output = output
        self._packer = packer
        self._packers = ThreadPoolExecutor(_PACKING_THREADS, "pack")
        self._writer = ThreadPoolExecutor(1, "write-packed")
        self._index: dict[str, _Place] = {}
        self._written: deque[Future[None]] = deque()
        self._free: SimpleQueue[_Scratch] = SimpleQueue()
        for _ in range(_MATRICES_IN_MEMORY):
            self._free.put(_Scratch())

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, *_: object) -> None:
        self._packers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def __call__(self, name: str, weight: Matrix) -> PackedWeight:
        if not _is_missing(weight):  # else it is a missing tensor, which the loader reports
            scratch = self._free.get()
            while self._written and self._written[0].done():
                self._written.popleft().result()
            packing = self._packers.submit(self._packer, name, weight, scratch.take)
            self._written.append(self._writer.submit(self._write, name, scratch, packing))
        return self._packer.without_data(weight)

    def finish(self) -> None:
        """Write all that is not written yet, and the index."""
        for written in self._written:
            written.result()
        text = json.dumps(self._index).encode()
        self._output.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))

    def _write(self, name: str, scratch: _Scratch, packing: Future[PackedWeight]) -> None:
        try:
            packed = packing.result()
            self._output.write(bytes(-self._output.tell() % _ALIGNMENT))
            start = self._output.tell()
            self._output.write(packed.data.view(torch.uint8).numpy().data)
            self._index[name] = start, self._output.tell(), packed.format
            scratch.keep(_KEPT_BYTES)
        finally:
            self._free.put(scratch)


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


@contextlib.contextmanager
def _replacing(file: Path) -> Iterator[Output]:
    """Open a new file, which takes its name when it is complete and on the disk."""
    scratch = file.with_suffix(".tmp")
    try:
        with scratch.open("wb", buffering=0) as raw:
            output = Output(raw)
            yield output
            output.flush()
            os.fsync(raw.fileno())
        scratch.rename(file)
    finally:
        scratch.unlink(missing_ok=True)


class Output:
    """Writes a file in aligned pieces, so that the system can cache it in large pages and map these.

    Args:
        raw: an unbuffered file at its beginning.
        piece: bytes of a piece.
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
        """Write what is in memory. Only a whole piece may have others after it."""
        rest = self._piece[: self._used]
        while rest:
            rest = rest[self._raw.write(rest) :]
        self._written += self._used
        self._used = 0


def _is_missing(weight: Matrix) -> bool:
    return isinstance(weight, Tensor) and weight.is_meta


def _map(file: Path) -> Tensor:
    """Map a file as uint8 [size], to read only. Processes share the file's pages."""
    with file.open("rb") as source:
        # The system refuses a private map that is larger than its memory, because all of it could be written.
        mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor must not be written
        return torch.frombuffer(mapped, dtype=torch.uint8)


class _PackedFile:
    """A `Pack` that takes matrices from a file that exists."""

    needs_content = False

    def __init__(self, file: Path, packer: Packer) -> None:
        self._file = file
        self._packer = packer
        try:
            self._bytes = _map(file)
            self._index = self._read_index()
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged() from error
        read_ahead(self._bytes)

    def __call__(self, name: str, weight: Matrix) -> PackedWeight:
        packed = self._packer.without_data(weight)
        try:
            start, end, layout = self._index[name]
            data = self._bytes[start:end]
            found = replace(packed, data=data if layout else data.view(weight.dtype), format=layout)
            if self._packer.kernels.fits(found):
                return found
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged() from error
        raise self._damaged()

    def _read_index(self) -> dict[str, _Place]:
        end = len(self._bytes) - _LENGTH_BYTES
        length = int.from_bytes(self._bytes[max(end, 0) :].numpy().tobytes(), "little")
        if not 0 < length <= end:
            raise ValueError("the index is outside of the file")
        index: dict[str, _Place] = json.loads(self._bytes[end - length : end].numpy().tobytes())
        return index

    def _damaged(self) -> ModelError:
        return ModelError(f"{self._file} is damaged; remove it, and the next start writes it again")
