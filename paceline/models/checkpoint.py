"""A checkpoint of safetensors files, which is read one tensor at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.quantized import BLOCK, QuantizedMatrix
from paceline.models.adapters.linears import NamedLinears
from paceline.models.base import FusedExperts
from paceline.models.files.read_ahead import Lookahead, MappedFiles, safetensors_places, will_read
from paceline.models.formats import ANY, Codes, StoredTensor, WeightFormat
from paceline.models.packing.packed import Pack

_NAMED_AT_MOST = 5
_ROWS_COMPARED = 1024
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""Dtypes of torch by their names in safetensors files."""

log = logging.getLogger(__name__)


class Checkpoint:
    """`Weights` from safetensors files, which are mapped into memory.

    Args:
        stored: the format of quantized matrices; None if there are none.
    """

    def __init__(
        self,
        files: Iterable[Path],
        dtype: torch.dtype,
        device: torch.device,
        pack: Pack,
        stored: WeightFormat | None = None,
    ) -> None:
        self.pack = pack
        self.linears = NamedLinears()
        self._stored = stored
        self.dtype = dtype
        self._device = device
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
                self._file_of.update(dict.fromkeys(handle.keys(), (file, handle)))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or not a safetensors file: {error}") from error
        files = {file for file, _ in self._file_of.values()}
        self._lookahead = Lookahead(safetensors_places(sorted(files) if pack.needs_content else ()))
        self._mapped = MappedFiles(files)
        self._packing: list[Tensor] = []
        """Tensors that were read since the last matrix was packed."""
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
        self._packing.append(tensor)
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"{file}: {name} has dtype {tensor.dtype}; config.json names no format of quantized weights with it"
            )
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
        """Return whether a tensor has no elements, such as the matrices of shared experts if their number is 0."""
        _, handle = self._file_of[name]
        return 0 in handle.get_slice(name).get_shape()

    def has(self, name: str, *shape: int) -> bool:
        if name not in self._file_of or not shape:
            return name in self._file_of or self._is_quantized(name)
        _, handle = self._file_of[name]
        return tuple(handle.get_slice(name).get_shape()) == shape

    def is_one_matrix(self, name: str, other: str) -> bool:
        if not (self.has(name) and self.has(other)):
            return True
        if name not in self._file_of or other not in self._file_of:
            return False  # one is quantized
        first, second = (self._file_of[each][1].get_slice(each) for each in (name, other))
        shape = first.get_shape()
        if second.get_shape() != shape:
            return False
        parts = (slice(start, start + _ROWS_COMPARED) for start in range(0, shape[0], _ROWS_COMPARED))
        return all(torch.equal(first[rows], second[rows]) for rows in parts)

    def _is_quantized(self, name: str) -> bool:
        """Return whether the checkpoint has a matrix of this name, and has quantized it."""
        marks = () if self._stored is None else self._stored.marks
        return any(f"{_stem(name)}{mark}" in self._file_of for mark in marks)

    def _take_matrix(self, name: str, *shape: int) -> Tensor | QuantizedMatrix:
        """Return a matrix for packing."""
        if len(shape) == 2 and self._is_quantized(name):
            return next(self._quantized(name, (shape[0], shape[1])))
        return self.take(name, *shape) if self.pack.needs_content else self._leave_unread(name, *shape)

    def _leave_unread(self, name: str, *shape: int) -> Tensor:
        """Take a matrix without reading it. If safetensors touched it, the system would read megabytes around it."""
        self._find(name, shape)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _quantized(
        self, name: str, shape: tuple[int, int], stack: tuple[int, ...] = ()
    ) -> Iterator[Tensor | QuantizedMatrix]:
        """Yield a matrix [out, in] that is quantized, or each of a stack of them."""
        assert self._stored is not None
        matrix = _stem(name)
        tensors = self._stored.tensors(matrix, shape)
        found = {part: self._take_stored(tensor, stack) for part, tensor in tensors.items() if self._is_there(tensor)}
        for place in itertools.product(*map(range, stack)):
            if any(tensor.is_meta for tensor in found.values()):
                yield torch.empty(shape, dtype=self.dtype, device="meta")
                continue
            parts = {part: tensor[place] for part, tensor in found.items()}
            for tensor in parts.values():
                will_read(tensor)
            decoded = self._stored.decode(matrix, parts, shape)
            if isinstance(decoded, Codes):
                yield _as_matrix(decoded, self.dtype)
            else:
                yield decoded.to(self._device, self.dtype)

    def _is_there(self, tensor: StoredTensor) -> bool:
        return tensor.name in self._file_of or not tensor.is_optional

    def _take_stored(self, tensor: StoredTensor, stack: tuple[int, ...]) -> Tensor:
        shape = (*stack, *tensor.shape)
        if tensor.shape in ((1,), (ANY,)) and tensor.name in self._file_of:
            _, handle = self._file_of[tensor.name]
            found = tuple(handle.get_slice(tensor.name).get_shape())
            if tensor.shape == (ANY,):
                shape = found if len(found) == len(shape) and found[:-1] == stack else shape
            else:
                shape = stack if found == stack else shape
        if not self.pack.needs_content:
            return self._leave_unread(tensor.name, *shape)
        return self.take_table(tensor.name, *shape, dtypes=[_DTYPES[name] for name in tensor.dtypes])

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        weight = self._take_matrix(name, *shape)
        return self._packed([(name, weight if order is None else weight[list(order)])])[0]

    def _packed(self, matrices: Iterable[tuple[str, Tensor | QuantizedMatrix]]) -> list[PackedWeight]:
        """Pack matrices by their names, and leave their part of the files to the system.

        So a process that loads a model never has the whole checkpoint in memory beside the packed weights.
        """
        packed = [self.pack(name, matrix) for name, matrix in matrices]
        self._leave_pages()
        self._packing.clear()
        return packed

    def _leave_pages(self) -> None:
        for tensor in self._packing:
            self._mapped.has_read(tensor)

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, sum(sizes_out), size_in)
        weight = weight if order is None else weight[list(order)]
        ends = itertools.accumulate(sizes_out)
        parts = [weight[end - size : end] for size, end in zip(sizes_out, ends)]
        return self._packed((f"{name}[{index}]", part) for index, part in enumerate(parts))

    def take_packed_derived(
        self, name: str, shape: tuple[int, ...], derive: Sequence[Callable[[Tensor], Tensor]]
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, *shape)
        whole = weight if isinstance(weight, Tensor) else weight.dequantize()
        return self._packed((f"{name}[{index}]", each(whole)) for index, each in enumerate(derive))

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        packed = []
        for expert, parts in enumerate(self.expert_parts(name, shape)):
            packed.append([self.pack(f"{name}[{expert}][{index}]", part) for index, part in enumerate(parts)])
            self._leave_pages()  # experts of a layer may take gigabytes
        self._packing.clear()
        return [list(part) for part in zip(*packed)]

    def expert_parts(self, name: str, shape: FusedExperts) -> Iterator[Sequence[Tensor | QuantizedMatrix]]:
        """Yield the parts of each expert's matrix. Only one expert at a time is copied or converted."""
        if self._is_quantized(name):
            whole = replace(shape, transposed=False).shape
            for matrix in self._quantized(name, whole[1:], whole[:1]):
                yield [matrix[outputs] for outputs in shape.outputs()]
            return
        take = self.take_table if self.pack.needs_content else self._leave_unread
        for matrix in take(name, *shape.shape):
            will_read(matrix)
            yield shape.parts(matrix if matrix.is_meta else matrix.to(self._device, self.dtype))

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros, which some writers store for quantized layers without a bias."""
        if self._stored is None or not name.endswith(".bias"):
            return False
        _, handle = self._file_of[name]
        return not handle.get_tensor(name).any()

    def finish(self, unread: Sequence[str] = (), others: Sequence[str] = ()) -> None:
        """Close the files.

        Args:
            unread: beginnings of the names of tensors that the model does not read.
            others: names of tensors in other files that were not taken.

        Raises:
            ModelError: names the tensors that are missing, have another shape, or were not taken.
        """
        # Old checkpoints hold rotary frequencies, which are computed from the config here.
        endings = ("rotary_emb.inv_freq", *(() if self._stored is None else self._stored.unread))
        named = [name for name in self._file_of if not name.endswith(endings) and not self._is_empty(name)]
        left = [*(name for name in named if not self._is_zero_bias(name)), *others]
        surplus = [name for name in left if not name.startswith(tuple(unread))]
        if known := [name for name in left if name not in surplus]:
            log.info("%d tensors of the checkpoint are not used by this model: %s", len(known), _enumerate(known))
        self._file_of.clear()
        self._packing.clear()
        refuse_misfits(self._missing, self._misshaped, surplus)


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _as_matrix(codes: Codes, dtype: torch.dtype) -> QuantizedMatrix:
    """Return small numbers as kernels read them, with a scale for each block or for several blocks."""
    if codes.input_scale is not None:
        rounding, scales = codes.rounding or codes.scales.dtype, codes.scales.float().contiguous()
        return QuantizedMatrix(
            codes.values, scales, None, codes.bits, dtype, rounding, input_scale=codes.input_scale
        )  # fmt: skip
    blocks = -(-codes.values.shape[1] // BLOCK)
    rounding, offsets = codes.rounding or codes.scales.dtype, codes.offsets
    has_floats = codes.table is not None or codes.values.is_floating_point()
    units = [4 * BLOCK, 2 * BLOCK] if has_floats else []
    unit = next((unit for unit in units if codes.group % unit == 0), min(BLOCK, codes.group))
    count, repeats = -(-blocks * BLOCK // unit), codes.group // unit
    # Kernels read scales and offsets of one type: fp16, or fp32, which offsets need.
    is_wide = codes.scales.dtype in _FLOATS and (codes.scales.dtype != torch.float16 or offsets is not None)
    scales = _spread(codes.scales.float() if is_wide else codes.scales, repeats, count)
    offsets = None if offsets is None else _spread(offsets, repeats, count)
    return QuantizedMatrix(
        codes.values, scales, offsets, codes.bits, dtype, rounding, codes.table, codes.factors
    )  # fmt: skip


def _spread(scales: Tensor, repeats: int, count: int) -> Tensor:
    """Repeat the scales [out, groups], to be [out, count]. If there are too few, zeros follow."""
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, 1)
    bits = scales.view(torch.uint8) if scales.itemsize == 1 else scales
    return F.pad(bits, (0, count - bits.shape[1])).view(scales.dtype).contiguous()


def refuse_misfits(missing: Sequence[str], misshaped: Sequence[str], surplus: Sequence[str] = ()) -> None:
    """Raise ModelError, with the names of the tensors, if any tensors do not fit config.json.

    Args:
        misshaped: names of tensors, each with its shape and the shape that config.json asks for.
    """
    named = (("missing tensors", missing), ("tensors of another shape", misshaped), ("unexpected tensors", surplus))
    if misfits := [f"{what}: {_enumerate(names)}" for what, names in named if names]:
        raise ModelError(f"the weights do not fit config.json: {'; '.join(misfits)}")


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
