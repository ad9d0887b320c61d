"""A reader of GGUF files that may be damaged or hostile."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from numpy.typing import DTypeLike, NDArray

from paceline.core.errors import ModelError

_LEAST_ALIGNMENT = 8


class DamagedError(ModelError):
    """A GGUF file contradicts itself or is incomplete. The text says what is wrong, and does not name the file."""


def open_gguf(file: Path) -> CheckedReader:
    """Return a reader of a file whose header was read.

    Raises:
        DamagedError: the header cannot be read, or contradicts itself.
    """
    try:
        return CheckedReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise DamagedError(str(error)) from error


class CheckedReader(GGUFReader):
    """A reader that refuses tensors that overlap, and values and tensors that would lie after the file's end.

    The package's own reader treats missing bytes as empty values. If a file of a few bytes claimed a list of 2^60
    numbers, that reader would run until the memory is full.
    """

    def _get(self, offset: int, dtype: DTypeLike, count: int = 1, override_order: Any = None) -> NDArray[Any]:
        # The package slices its numpy.memmap, which takes seconds for the tokens of a large vocabulary.
        order = self.byte_order if override_order is None else override_order
        size = np.dtype(dtype).itemsize * int(count)
        if offset + size > len(self.data):
            raise ValueError(f"it says that it has {count} values at byte {offset}, and ends before them")
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        # The package makes arrays for each entry of a list, which takes seconds for a large vocabulary.
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        entries, length, start = GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
        scalar = self.gguf_scalar_to_np.get(entries)
        if not length or (scalar is None and entries != GGUFValueType.STRING):
            return super()._get_field_parts(orig_offs, raw_type)
        parts: list[Any] = self._texts(start, length) if scalar is None else [self._get(start, scalar, length)]
        size = sum(part.nbytes for part in parts) + (8 * length if scalar is None else 0)
        return 12 + size, [kind, count, *parts], list(range(2, 2 + len(parts))), [GGUFValueType.ARRAY, entries]

    def _texts(self, offset: int, count: int) -> list[memoryview]:
        """Return the bytes of texts that follow one another, each after its length."""
        order = "=" if self.byte_order == "I" else ">" if sys.byteorder == "little" else "<"
        length_at, data = struct.Struct(f"{order}Q").unpack_from, self.data.data
        found: list[memoryview] = []
        for _ in range(count):
            if offset + 8 > len(data) or (end := offset + 8 + length_at(data, offset)[0]) > len(data):
                raise ValueError(f"it says that it has {count} texts, and ends before text {len(found)}")
            found.append(data[offset + 8 : end])
            offset = end
        return found

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self._check_places(start_offs, fields)
        super()._build_tensors(start_offs, fields)

    def _check_places(self, data_start: int, fields: Sequence[ReaderField]) -> None:
        """Raise DamagedError if a tensor is not aligned, overlaps another one, or ends after the file.

        Raise ModelError if this machine has another byte order.

        Args:
            data_start: byte of the file from which offsets of tensors count.
            fields: the descriptions of all tensors.
        """
        if self.byte_order == "S":
            raise ModelError("it is a file for big-endian machines")
        if self.alignment % _LEAST_ALIGNMENT:
            raise DamagedError(f"its general.alignment is {self.alignment}, which is not a multiple of 8")
        end, before = data_start, ""
        for field in sorted(fields, key=lambda field: int(field.parts[-1][0])):
            _, name_bytes, _, shape, kind, own_offset = field.parts
            name, offset = bytes(name_bytes).decode(), int(own_offset[0])
            if offset % self.alignment:
                raise DamagedError(
                    f"its tensor {name} has the offset {offset}, which is not a multiple of {self.alignment}"
                )
            if data_start + offset < end:
                raise DamagedError(f"its tensors {before} and {name} overlap")
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            end = data_start + offset + math.prod(shape.tolist()) // block_elements * block_bytes
            if end > len(self.data):
                raise DamagedError(f"its tensor {name} ends at byte {end}, but the file has {len(self.data)} bytes")
            before = name
