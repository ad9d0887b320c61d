"""A checkpoint of safetensors files, which is read one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.quantized import BLOCK, QuantizedMatrix
from paceline.models import mxfp4
from paceline.models.base import FusedExperts
from paceline.models.packed import Pack
from paceline.models.read_ahead import Lookahead, will_read

_NAMED_AT_MOST = 5
_ROWS_COMPARED = 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

log = logging.getLogger(__name__)


class Checkpoint:
    """`Weights` from safetensors files, which are mapped into memory."""

    def __init__(self, files: Iterable[Path], dtype: torch.dtype, device: torch.device, pack: Pack) -> None:
        self.pack = pack
        self.dtype = dtype
        self._device = device
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
                self._file_of.update(dict.fromkeys(handle.keys(), (file, handle)))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or not a safetensors file: {error}") from error
        self._lookahead = Lookahead(sorted({file for file, _ in self._file_of.values()}) if pack.needs_content else ())
        self._missing: list[str] = []
        self._misshaped: list[str] = []

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.take_table(name, *shape)
        # Without this call, the system reads megabytes around the first page that is touched.
        will_read(tensor)
        # A vector is copied, because a view of it would keep its whole file in memory.
        return tensor if tensor.is_meta else tensor.to(self._device, dtype or self.dtype, copy=tensor.dim() == 1)

    def take_table(self, name: str, *shape: int, dtypes: Sequence[torch.dtype] = _FLOATS) -> Tensor:
        place = self._find(name, shape)
        if place is None:
            return torch.empty(shape, device="meta")
        file, handle = place
        if self.pack.needs_content:
            self._lookahead.take(name)
        try:
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error
        if tensor.dtype not in dtypes:
            raise ModelError(f"{file}: {name} has dtype {tensor.dtype}; quantized checkpoints are not supported")
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any] | None:
        """Take a tensor of this shape, and return its file's path and handle. If there is none, return None."""
        if name not in self._file_of:
            self._missing.append(name)
            return None
        file, handle = self._file_of.pop(name)
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            self._misshaped.append(f"{name} is {list(found)} instead of {list(shape)}")
            return None
        return file, handle

    def take_indices(self, name: str, size: int) -> Tensor:
        tensor = self.take_table(name, size, dtypes=(torch.int64, torch.int32))
        return tensor if tensor.is_meta else tensor.to(self._device, torch.int64, copy=True)

    def _is_empty(self, name: str) -> bool:
        """Return whether a tensor has no elements, as the matrices of no shared experts."""
        _, handle = self._file_of[name]
        return 0 in handle.get_slice(name).get_shape()

    def has(self, name: str, *shape: int) -> bool:
        if name not in self._file_of or not shape:
            return name in self._file_of
        _, handle = self._file_of[name]
        return tuple(handle.get_slice(name).get_shape()) == shape

    def is_one_matrix(self, name: str, other: str) -> bool:
        if name not in self._file_of or other not in self._file_of:
            return True
        first, second = (self._file_of[each][1].get_slice(each) for each in (name, other))
        shape = first.get_shape()
        if second.get_shape() != shape:
            return False
        parts = (slice(start, start + _ROWS_COMPARED) for start in range(0, shape[0], _ROWS_COMPARED))
        return all(torch.equal(first[rows], second[rows]) for rows in parts)

    def _take_matrix(self, name: str, *shape: int) -> Tensor:
        """Return a matrix for packing."""
        return self.take(name, *shape) if self.pack.needs_content else self._leave_unread(name, *shape)

    def _leave_unread(self, name: str, *shape: int) -> Tensor:
        """Take a matrix without reading it. safetensors would touch it, and the system read megabytes around it."""
        self._find(name, shape)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        weight = self._take_matrix(name, *shape)
        return self.pack(name, weight if order is None else weight[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, sum(sizes_out), size_in)
        parts = torch.split(weight if order is None else weight[list(order)], list(sizes_out))
        return [self.pack(f"{name}[{index}]", part) for index, part in enumerate(parts)]

    def take_packed_derived(
        self, name: str, shape: tuple[int, ...], derive: Sequence[Callable[[Tensor], Tensor]]
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, *shape)
        return [self.pack(f"{name}[{index}]", each(weight)) for index, each in enumerate(derive)]

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        packed = [
            [self.pack(f"{name}[{expert}][{index}]", part) for index, part in enumerate(parts)]
            for expert, parts in enumerate(self.expert_parts(name, shape))
        ]
        return [list(part) for part in zip(*packed)]

    def expert_parts(self, name: str, shape: FusedExperts) -> Iterator[Sequence[Tensor | QuantizedMatrix]]:
        """Yield the parts of each expert's matrix. Only one expert at a time is copied or converted."""
        if f"{name}{mxfp4.BLOCKS}" in self._file_of:
            yield from self._mxfp4_parts(name, replace(shape, transposed=False))
            return
        take = self.take_table if self.pack.needs_content else self._leave_unread
        for matrix in take(name, *shape.shape):
            will_read(matrix)
            yield shape.parts(matrix if matrix.is_meta else matrix.to(self._device, self.dtype))

    def _mxfp4_parts(self, name: str, shape: FusedExperts) -> Iterator[Sequence[Tensor | QuantizedMatrix]]:
        experts, size_out, size_in = shape.shape
        counts = (experts, size_out, -(-size_in // BLOCK))
        take = partial(self.take_table, dtypes=(torch.uint8,)) if self.pack.needs_content else self._leave_unread
        blocks = take(f"{name}{mxfp4.BLOCKS}", *counts, mxfp4.BLOCK_BYTES)
        scales = take(f"{name}{mxfp4.SCALES}", *counts)
        if blocks.is_meta or scales.is_meta:
            for _ in range(experts):
                yield shape.parts(torch.empty(size_out, size_in, dtype=self.dtype, device="meta"))
            return
        for own, own_scales in zip(blocks, scales):
            will_read(own)
            will_read(own_scales)
            parts = zip(shape.parts(own), shape.parts(own_scales))
            yield [mxfp4.decode_mxfp4(*part, size_in, self.dtype) for part in parts]

    def leave(self, name: str) -> None:
        """Count a tensor as taken without reading it, because the caller reads it from another file."""
        if self._file_of.pop(name, None) is None:
            self._missing.append(name)

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Close the files.

        Args:
            unread: beginnings of the names of tensors that the model does not read.

        Raises:
            ModelError: names the tensors that are missing, have another shape, or were not taken.
        """
        # Old checkpoints hold rotary frequencies, which are computed from the config here.
        left = [name for name in self._file_of if not name.endswith("rotary_emb.inv_freq") and not self._is_empty(name)]
        surplus = [name for name in left if not name.startswith(tuple(unread))]
        if known := [name for name in left if name not in surplus]:
            log.info("%d tensors of the checkpoint are not used by this model: %s", len(known), _enumerate(known))
        self._file_of.clear()
        refuse_misfits(self._missing, self._misshaped, surplus)


def refuse_misfits(missing: Sequence[str], misshaped: Sequence[str], surplus: Sequence[str] = ()) -> None:
    """Raise ModelError, with the names of the tensors, if any tensors do not fit config.json.

    Args:
        misshaped: names of tensors with their shapes and those that config.json asks for.
    """
    named = (("missing tensors", missing), ("tensors of another shape", misshaped), ("unexpected tensors", surplus))
    if misfits := [f"{what}: {_enumerate(names)}" for what, names in named if names]:
        raise ModelError(f"the weights do not fit config.json: {'; '.join(misfits)}")


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
