"""Writing of what a model's folder has of a GGUF file: small tensors as bf16 safetensors, and the places of matrices.

Matrices are not copied. Workers read them from the GGUF file, so they are only checked here. What workers cannot read
there is written as bf16, too, a few rows at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, ReaderTensor, dequantize

from paceline.core.machine import available_cores
from paceline.models.files.gguf_reference import GgufReference, PlacedMatrix
from paceline.models.files.safetensors_writer import TensorEntry, write_safetensors
from paceline.models.folder import SINGLE_FILE
from paceline.models.gguf.reader import DamagedError
from paceline.models.gguf.types import FP16_PLACES, WHOLE_TYPES

_MOST_THREADS = 8
_PIECE = 1 << 20
"""Number of elements that one thread converts or checks at a time."""
_FP16_INFINITY = 0x7C00
"""Bits of the exponent of an fp16 number. All of them are set in infinite numbers and NaN, and in no others."""

_FP32_INFINITY, _BF16_INFINITY = np.uint32(0x7F800000), np.uint16(0x7F80)

Rows = np.ndarray[Any, Any]
Result = TypeVar("Result")
Watch = Callable[[int, int], None]
"""A function that is called with the number of bytes done so far and the number of all bytes."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of the numbers of one tensor of the model in the GGUF file."""

    parts: Sequence[ReaderTensor]
    """The tensor of the GGUF file, or its two halves, which follow each other in each expert's matrix."""
    expert: int | None = None
    """Index of the expert whose matrix this is, if the GGUF tensor has the matrices of all experts; None otherwise."""
    heads: int = 0
    """Number of heads in which llama.cpp interleaves the halves of the rotary embedding; 0 if the order of rows is
    unchanged.
    """
    offset: float = 0.0
    """Number that is added to each number of the GGUF file."""

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, last = reversed(self.parts[0].shape.tolist())
        if len(self.parts) > 1:
            outer[-1] *= len(self.parts)
        return (*(outer if self.expert is None else outer[1:]), last)

    @property
    def type_name(self) -> str:
        """GGUF's type; "" if the halves have different types."""
        kinds = {part.tensor_type.name for part in self.parts}
        return "" if len(kinds) > 1 else kinds.pop()

    def is_mapped(self) -> bool:
        """Return whether workers can read this matrix in the GGUF file."""
        return self.type_name in (*FP16_PLACES, *WHOLE_TYPES) and len(self.shape) > 1 and not self.offset

    def placed(self, file_of: Mapping[str, int]) -> PlacedMatrix:
        """Return the place of a mapped matrix.

        Args:
            file_of: number of the file of each tensor, by its name in GGUF.
        """
        part = self.parts[0]
        size = int(part.n_bytes) if self.expert is None else int(part.n_bytes) // len(part.data)
        start = (self.expert or 0) * size
        places = tuple((file_of[each.name], int(each.data_offset) + start) for each in self.parts)
        return PlacedMatrix(part.tensor_type.name, self.shape, places, size, self.heads)

    def rows(self) -> Iterator[tuple[ReaderTensor, Rows]]:
        """Yield all rows as the GGUF file stores them, in pieces [rows, ...], each with the part that it comes from."""
        if len(self.parts) > 1:
            for matrices in zip(*(part.data for part in self.parts), strict=True):
                yield from zip(self.parts, matrices, strict=True)
            return
        (part,) = self.parts
        data = part.data if self.expert is None else part.data[self.expert]
        data = data.reshape(-1, data.shape[-1])
        yield part, data[_row_order(len(data), self.heads)] if self.heads else data

    def pieces(self) -> Iterator[tuple[ReaderTensor, Rows]]:
        """Yield all rows, a few at a time."""
        count = max(1, _PIECE // self.shape[-1])
        for part, rows in self.rows():
            for first in range(0, len(rows), count):
                yield part, rows[first : first + count]

    def numbers(self, threads: ThreadPoolExecutor) -> Iterator[memoryview]:
        """Yield all numbers as bf16. Raises DamagedError if one is NaN or infinite."""
        for numbers in _ordered(threads, self._convert, self.pieces()):
            yield numbers.reshape(-1).view(np.uint8).data

    def _convert(self, part: ReaderTensor, rows: Rows) -> Rows:
        """Return the numbers of some rows, rounded to bf16, as the bits of each: uint16."""
        exact = dequantize(rows, part.tensor_type).astype(np.float32, copy=False)
        with np.errstate(invalid="ignore"):  # NaN, which is refused below
            words = (exact + np.float32(self.offset) if self.offset else exact).view(np.uint32)
        numbers = (words + ((words >> 16 & 1) + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
        # NaN with few bits would become a number when it is rounded.
        if ((words & _FP32_INFINITY) == _FP32_INFINITY).any() or ((numbers & _BF16_INFINITY) == _BF16_INFINITY).any():
            raise _not_finite(part)
        return numbers

    def check(self, part: ReaderTensor, rows: Rows) -> int:
        """Return the number of bytes of some rows. Raises DamagedError if one of their numbers is NaN or infinite."""
        places = FP16_PLACES.get(part.tensor_type.name)
        if places is None:
            self._convert(part, rows)
            return rows.nbytes
        _, block_bytes = GGML_QUANT_SIZES[part.tensor_type]
        blocks = rows.reshape(-1, block_bytes)
        for place in places:
            # The exponent of a number is in its upper byte.
            exponents = blocks[:, place + 1] & (_FP16_INFINITY >> 8)
            if (exponents == _FP16_INFINITY >> 8).any():
                raise _not_finite(part)
        return rows.nbytes


def _not_finite(part: ReaderTensor) -> DamagedError:
    return DamagedError(f"its tensor {part.name} has numbers that are NaN or infinite")


def write_weights(
    sources: Mapping[str, TensorSource],
    target: Path,
    watch: Watch,
    digests: Mapping[str, str],
    file_of: Mapping[str, int],
    tables: Collection[str] = (),
) -> None:
    """Write bf16 safetensors with all tensors that workers cannot read in the GGUF file, and a reference to all others.

    Args:
        digests: digest of each part of the GGUF file, by the name of the folder's link to it.
        file_of: number of the part of each tensor, by its name in GGUF.
        tables: names of matrices whose rows are read from the safetensors.

    Raises:
        DamagedError: a tensor has numbers that are NaN or infinite.
    """
    mapped = {name: own for name, own in sources.items() if own.is_mapped() and name not in tables}
    with ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "convert") as threads:
        whole = {name: _whole(own, threads) for name, own in sources.items() if name not in mapped}
        placed = {name: own.placed(file_of) for name, own in mapped.items()}
        total = sum(entry.nbytes for entry in whole.values())
        total += sum(own.part_bytes * len(own.places) for own in placed.values())
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            watch(done, total)

        write_safetensors(target / SINGLE_FILE, whole, {"format": "pt"}, count)
        # The order of rows does not matter here, and to change it would copy them.
        pieces = ((own, *piece) for own in mapped.values() for piece in replace(own, heads=0).pieces())
        for size in _ordered(threads, TensorSource.check, pieces):
            count(size)
    others = {name: own.type_name for name, own in sources.items() if name not in mapped and name not in tables}
    unpacked = {name: kind for name, kind in others.items() if kind not in ("", "F64", *WHOLE_TYPES)}
    GgufReference(digests, placed, unpacked).write(target)


def _whole(source: TensorSource, threads: ThreadPoolExecutor) -> TensorEntry:
    return TensorEntry("BF16", source.shape, lambda: source.numbers(threads))


def _row_order(rows: int, heads: int) -> Rows:
    """Return the file's row for each row of a matrix whose heads' halves are interleaved."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _ordered(threads: ThreadPoolExecutor, work: Callable[..., Result], pieces: Iterable[Any]) -> Iterator[Result]:
    """Yield the results of a function in the order of the pieces, of which few are in memory at a time."""
    waiting: deque[Future[Result]] = deque()
    for piece in pieces:
        waiting.append(threads.submit(work, *piece))
        if len(waiting) > 2 * _MOST_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
