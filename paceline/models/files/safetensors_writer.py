"""A writer of safetensors files that needs only a piece of a tensor in memory at a time.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "U8": 1}
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file."""

    dtype: Literal["BF16", "U8"]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[memoryview]]
    """Function that returns the tensor's bytes, piece by piece."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(
    file: Path, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], watch: Callable[[int], None]
) -> None:
    """Write a safetensors file with these tensors, one after another.

    Args:
        metadata: strings for the file's header.
        watch: called with the number of bytes of each piece after it was written.

    Raises:
        ValueError: the pieces of a tensor have more or fewer bytes than its shape says.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name, entry in entries.items():
            written = 0
            for piece in entry.pieces():
                written += output.write(piece)
                watch(piece.nbytes)
            if written != entry.nbytes:
                raise ValueError(f"{name} has {written} bytes, and its shape {entry.shape} takes {entry.nbytes}")
