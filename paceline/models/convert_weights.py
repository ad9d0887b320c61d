"""Writing of a GGUF file's tensors as bf16 safetensors, and of its quantized blocks beside them.

The numbers become bf16 a few rows at a time, so little memory is needed, however large the model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import ReaderTensor, dequantize
from torch import Tensor

from paceline.core.machine import available_cores
from paceline.models.folder import BLOCKS_FILE, SINGLE_FILE
from paceline.models.gguf_blocks import BLOCK_TYPES, WHOLE_TYPES
from paceline.models.gguf_reader import DamagedError
from paceline.models.safetensors_writer import TensorEntry, write_safetensors

_MOST_THREADS = 8
_PIECE = 1 << 20
"""Number of elements that one thread converts at a time."""

Rows = np.ndarray[Any, Any]
Watch = Callable[[int, int], None]
"""A function that is called with the number of bytes written so far and the number of all bytes."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of the numbers of one tensor of the safetensors in the GGUF file."""

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
    def block_type(self) -> str:
        """GGUF's type of a quantized matrix; "" if it is not quantized, or its halves have different types."""
        kinds = {part.tensor_type.name for part in self.parts}
        return "" if len(kinds) > 1 or kinds & set(WHOLE_TYPES) else kinds.pop()

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

    def numbers(self, threads: ThreadPoolExecutor) -> Iterator[memoryview]:
        """Yield all numbers as bf16. Raises DamagedError if one is NaN or infinite."""
        count = max(1, _PIECE // self.shape[-1])
        pieces = (
            (part, rows[first : first + count]) for part, rows in self.rows() for first in range(0, len(rows), count)
        )
        for numbers in _ordered(threads, self._convert, pieces):
            yield numbers.view(torch.uint8).numpy().data

    def _convert(self, part: ReaderTensor, rows: Rows) -> Tensor:
        exact = dequantize(rows, part.tensor_type)
        numbers = torch.tensor(exact + np.float32(self.offset) if self.offset else exact).bfloat16()
        # Minimum and maximum take one pass without a temporary tensor, and both are NaN if any number is.
        if not torch.stack(torch.aminmax(numbers)).isfinite().all():
            raise DamagedError(f"its tensor {part.name} has numbers that are NaN or infinite")
        return numbers


def write_weights(
    sources: Mapping[str, TensorSource], target: Path, watch: Watch, tables: Collection[str] = ()
) -> None:
    """Write bf16 safetensors and BLOCKS_FILE, whose matrices have the same names and order of rows.

    Blocks are uint8 [..., out, bytes]. The metadata of BLOCKS_FILE name the type of each quantized matrix. Matrices of
    a type for which Paceline has no kernels are named, but have no blocks.

    Args:
        tables: names of matrices whose rows are read from the safetensors, whatever the quantization is.

    Raises:
        DamagedError: a tensor has numbers that are NaN or infinite.
    """
    types = {name: own.block_type for name, own in sources.items() if own.block_type and name not in tables}
    kept = {name: sources[name] for name, kind in types.items() if kind in BLOCK_TYPES}
    with ThreadPoolExecutor(min(available_cores(), _MOST_THREADS), "convert") as threads:
        whole = {name: _whole(own, threads) for name, own in sources.items()}
        blocks = {name: _blocks(own) for name, own in kept.items()}
        total = sum(entry.nbytes for entry in (*whole.values(), *blocks.values()))
        written = 0

        def count(size: int) -> None:
            nonlocal written
            written += size
            watch(written, total)

        write_safetensors(target / SINGLE_FILE, whole, {"format": "pt"}, count)
        write_safetensors(target / BLOCKS_FILE, blocks, types, count)


def _whole(source: TensorSource, threads: ThreadPoolExecutor) -> TensorEntry:
    return TensorEntry("BF16", source.shape, lambda: source.numbers(threads))


def _blocks(source: TensorSource) -> TensorEntry:
    shape = (*source.shape[:-1], source.parts[0].data.shape[-1])
    return TensorEntry("U8", shape, lambda: (np.ascontiguousarray(rows).data for _, rows in source.rows()))


def _row_order(rows: int, heads: int) -> Rows:
    """Return the file's row for each row of a matrix whose heads' halves are interleaved."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _ordered(
    threads: ThreadPoolExecutor, convert: Callable[[ReaderTensor, Rows], Tensor], pieces: Iterable[Any]
) -> Iterator[Tensor]:
    """Yield the results of a function in the order of the pieces, of which few are in memory at a time."""
    waiting: deque[Future[Tensor]] = deque()
    for piece in pieces:
        waiting.append(threads.submit(convert, *piece))
        if len(waiting) > 2 * _MOST_THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
