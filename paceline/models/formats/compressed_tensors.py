"""compressed-tensors, as llm-compressor writes it: whole numbers or floats of 4 or 8 bits, by layer.

Layouts: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.models.formats import mx
from paceline.models.formats.base import (
    BYTES,
    FLOAT8,
    FLOATS,
    KV_SCALES,
    PACKED,
    Codes,
    Json,
    StoredTensor,
    checked_groups,
    count_field,
    floats_of_8_bits,
    groups_of,
    is_in_order,
    object_field,
    refuse,
    unpack_words,
    with_zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "compressed-tensors"
_PATTERN = "re:"
"""Prefix that marks a target as a regular expression."""
_OF_SCALES = (".weight_scale", ".weight_global_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")
"""Ends of the names of tensors that hold no weights."""


class _Scheme(Protocol):
    """The form of the matrices of one config group."""

    bits: int
    """Bits of one weight."""

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]: ...

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor: ...


class CompressedTensors:
    """Matrices of compressed-tensors. Each config group has a scheme, and names the layers that it applies to."""

    name: ClassVar[str] = _NAME
    marks: ClassVar[Sequence[str]] = (".weight_packed", ".weight_scale")
    unread: ClassVar[Sequence[str]] = (
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        *KV_SCALES,
    )

    def __init__(self, config: Json) -> None:
        sparsity = object_field(config, _NAME, "sparsity_config").get("format", "dense")
        if sparsity != "dense":
            raise refuse(_NAME, f"with the sparsity {sparsity}, which is not supported")
        if object_field(config, _NAME, "transform_config"):
            raise refuse(_NAME, "with transforms of activations (transform_config), which are not supported")
        groups = object_field(config, _NAME, "config_groups")
        if not groups and not object_field(config, _NAME, "kv_cache_scheme"):
            raise refuse(_NAME, "but config_groups is empty")
        self._schemes: list[tuple[Sequence[str], _Scheme]] = []
        for name in groups:
            group = object_field(groups, _NAME, name)
            targets = group.get("targets")
            if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
                raise refuse(_NAME, f"but the targets of config group {name} are no list of names")
            _check_patterns(targets)
            if weights := object_field(group, _NAME, "weights"):
                form = group.get("format") or config.get("format")
                self._schemes.append((targets, _scheme(weights, form, group.get("input_activations"))))

    @property
    def rounds_input(self) -> bool:
        """Whether kernels round the input of some matrices to signed bytes (W8A8)."""
        return any(isinstance(scheme, _SignedBytes) and scheme.rounds_input for _, scheme in self._schemes)

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        return self._scheme_of(matrix).tensors(matrix, shape)

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        if tensor.endswith(".weight_packed"):
            matrix = tensor.removesuffix(".weight_packed")
            return 2 if dtype == "U8" else 32 // self._scheme_of(matrix).bits
        return 0 if tensor.endswith((*_OF_SCALES, *self.unread)) else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        return self._scheme_of(matrix).decode(matrix, tensors, shape)

    def _scheme_of(self, matrix: str) -> _Scheme:
        """Return the scheme of a matrix. Names come before patterns, and these before kinds of layers."""
        for matches in (_is_name, _is_pattern, _is_kind):
            for targets, scheme in self._schemes:
                if any(matches(target, matrix) for target in targets):
                    return scheme
        raise refuse(_NAME, f"but no config group names {matrix}, which has a scale")


def _is_name(target: str, matrix: str) -> bool:
    return target == matrix


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix(_PATTERN))
        except re.error as error:
            raise refuse(_NAME, f"but the target {target!r:.80} is no regular expression: {error}") from error


def _is_pattern(target: str, matrix: str) -> bool:
    return target.startswith(_PATTERN) and re.match(target.removeprefix(_PATTERN), matrix) is not None


def _is_kind(target: str, matrix: str) -> bool:
    """Return whether the target is a class of layers. All matrices with a scale are linear layers."""
    return target.rsplit(".", 1)[-1] in ("Linear", "LinearBase")


def _scheme(weights: Json, form: object, activations: object) -> _Scheme:
    bits, kind = count_field(weights, _NAME, "num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    is_packed = form == "pack-quantized" or (form in (None, "mixed-precision") and activations is None)
    if kind == "int" and bits in (4, 8) and is_packed:
        return _Packed(bits, strategy, weights)
    if kind == "int" and bits == 8:
        return _SignedBytes(strategy, weights, activations)
    if kind == "float" and bits == 8:
        return _Float8(strategy, weights)
    if kind == "float" and bits == 4 and strategy == "tensor_group":
        return _NvFp4(weights)
    if kind == "float" and bits == 4 and strategy == "group":
        return _MxFp4()
    raise refuse(_NAME, f"with weights of type {kind} in {bits} bits by {strategy}, which are not supported")


def _block(sizes: object) -> tuple[int, int]:
    """Return the sizes of a block of a matrix that has one scale."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise refuse(_NAME, f"but a block is {sizes!r:.40}, not two sizes")
    return sizes[0], sizes[1]


class _Packed:
    """Whole numbers, packed into words along `in`."""

    def __init__(self, bits: int, strategy: str, weights: Json) -> None:
        self.bits = bits
        self._rows = _RowScales(strategy, weights)
        self._is_symmetric = weights.get("symmetric", True) is True

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        words_out, words_in = (-(-size * self.bits // 32) for size in shape)
        parts = {
            "packed": StoredTensor(f"{matrix}.weight_packed", (size_out, words_in), PACKED),
            "scale": StoredTensor(f"{matrix}.weight_scale", self._rows.shape(shape), FLOATS),
            "shape": StoredTensor(f"{matrix}.weight_shape", (2,), ("I64", "I32"), is_optional=True),
            "order": StoredTensor(f"{matrix}.weight_g_idx", (size_in,), PACKED, is_optional=True),
        }
        if not self._is_symmetric:
            zeros = (words_out, self._rows.groups(size_in)[1])
            parts["zeros"] = StoredTensor(f"{matrix}.weight_zero_point", zeros, PACKED)
        return parts

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        size_out, size_in = shape
        if "shape" in tensors and tuple(tensors["shape"].tolist()) != shape:
            raise refuse(_NAME, f"but {matrix}.weight_shape is not {list(shape)}")
        group, groups = self._rows.groups(size_in)
        bias, scales = 128 if self.bits == 8 else 0, tensors["scale"].expand(size_out, groups)
        values = unpack_words(tensors["packed"], self.bits, bias)[:, :size_in]
        zeros = scales.new_full(scales.shape, 1 << self.bits - 1).short()
        if "zeros" in tensors:
            packed = tensors["zeros"].T.contiguous()
            codes = unpack_words(packed, self.bits, 0).short() & (1 << self.bits) - 1
            zeros = codes[:, :size_out].T.contiguous()
        order = tensors.get("order")
        if order is None or is_in_order(order, group):
            return with_zeros(values, zeros, scales, self.bits, group)
        places = checked_groups(_NAME, f"{matrix}.weight_g_idx", order, groups)
        return (values.short() + bias - zeros[:, places]) * scales[:, places]


class _SignedBytes:
    """Whole numbers of 8 bits as signed bytes. If activations are signed bytes, too, with one scale for a token or for
    all, and weights have one for each output or for the matrix, kernels round x (W8A8). Other activations stay as they
    are.
    """

    bits = 8

    def __init__(self, strategy: str, weights: Json, activations: object) -> None:
        self._rows = _RowScales(strategy, weights)
        self._is_symmetric = weights.get("symmetric", True) is True
        given = activations if isinstance(activations, Mapping) else {}
        are_bytes = (given.get("num_bits"), given.get("type", "int"), given.get("symmetric", True)) == (8, "int", True)
        self._has_fixed_scale = given.get("dynamic") is not True
        by_row = given.get("strategy") in ((None, "tensor") if self._has_fixed_scale else (None, "token", "tensor"))
        self.rounds_input = are_bytes and by_row and self._is_symmetric and strategy in ("channel", "tensor")

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        scales = self._rows.shape(shape)
        parts = {
            "scale": StoredTensor(f"{matrix}.weight_scale", scales, FLOATS),
            "bytes": StoredTensor(f"{matrix}.weight", shape, ("I8",)),
        }
        if self.rounds_input and self._has_fixed_scale:
            parts["input"] = StoredTensor(f"{matrix}.input_scale", (1,), FLOATS)
        if not self._is_symmetric:
            parts["zeros"] = StoredTensor(f"{matrix}.weight_zero_point", scales, ("I8",))
        return parts

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        size_out, size_in = shape
        group, groups = self._rows.groups(size_in)
        scales = tensors["scale"].expand(size_out, groups)
        if self.rounds_input:
            fixed = float(tensors["input"]) if self._has_fixed_scale else 0.0
            if self._has_fixed_scale and not 0.0 < fixed < math.inf:
                raise refuse(_NAME, f"but {matrix}.input_scale is {fixed}, not a scale")
            return Codes(tensors["bytes"], scales, None, 8, group, input_scale=fixed)
        zeros = tensors["zeros"].short() if "zeros" in tensors else scales.new_zeros(1, 1).short()
        return with_zeros(tensors["bytes"], zeros.expand(size_out, groups) + 128, scales, 8, group)


class _RowScales:
    """Scales for whole numbers: for groups of a row, for rows, or one for the matrix."""

    def __init__(self, strategy: str, weights: Json) -> None:
        if strategy not in ("group", "channel", "tensor"):
            raise refuse(_NAME, f"as whole numbers by {strategy}; group, channel and tensor are supported")
        self._strategy = strategy
        self._group_size = count_field(weights, _NAME, "group_size") if strategy == "group" else -1

    def groups(self, size_in: int) -> tuple[int, int]:
        """Return the number of values of a group, and the number of groups of a row."""
        return groups_of(_NAME, self._group_size, size_in)

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix."""
        size_out, size_in = shape
        return (1,) if self._strategy == "tensor" else (size_out, self.groups(size_in)[1])


class _Float8:
    """Floats of 8 bits (E4M3). A scale is a power of two as a byte, or a float."""

    bits = 8

    def __init__(self, strategy: str, weights: Json) -> None:
        self._strategy = strategy
        self._block = (1, 1)
        if strategy == "block":
            self._block = _block(weights.get("block_structure"))
        elif strategy == "group":
            self._block = _block([1, weights.get("group_size")])
        elif strategy not in ("tensor", "channel"):
            raise refuse(_NAME, f"as floats of 8 bits by {strategy}; tensor, channel, group and block are supported")

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        scales: tuple[int, ...] = (1,)
        if self._strategy == "channel":
            scales = (size_out, 1)
        elif self._strategy != "tensor":
            scales = (-(-size_out // self._block[0]), -(-size_in // self._block[1]))
        return {
            "scale": StoredTensor(f"{matrix}.weight_scale", scales, (*BYTES, *FLOATS)),
            "floats": StoredTensor(f"{matrix}.weight", shape, FLOAT8),
        }

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        import torch  # here, because processes without torch read configs

        scales, whole = tensors["scale"], (shape[0], -(-shape[1] // 32) * 32)
        block = {"tensor": whole, "channel": (1, whole[1])}.get(self._strategy, self._block)
        # Powers of two become bf16 in the format's own library, and so do the weights.
        rounding = scales.dtype if scales.is_floating_point() else torch.bfloat16
        return floats_of_8_bits(
            tensors["floats"], scales.view(1, 1) if self._strategy == "tensor" else scales, block, rounding
        )


class _NvFp4:
    """Floats of 4 bits (E2M1) in groups of 16 with scales of 8 bits (E4M3), and one scale for the matrix (NVFP4)."""

    bits = 4

    def __init__(self, weights: Json) -> None:
        if count_field(weights, _NAME, "group_size", 16) != 16:
            raise refuse(_NAME, "as NVFP4 in groups that have not 16 values")

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        return {
            "packed": StoredTensor(f"{matrix}.weight_packed", (size_out, -(-size_in // 2)), BYTES),
            "scale": StoredTensor(f"{matrix}.weight_scale", (size_out, -(-size_in // 16)), FLOAT8),
            "whole": StoredTensor(f"{matrix}.weight_global_scale", (1,), FLOATS),
        }

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        import torch  # here, because processes without torch read configs

        return mx.decode_nvfp4(
            tensors["packed"], tensors["scale"], tensors["whole"], shape[1], divides=True, rounding=torch.bfloat16
        )


class _MxFp4:
    """Floats of 4 bits (E2M1) in groups of 32 with a power of two as a byte (MXFP4)."""

    bits = 4

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        return {
            "packed": StoredTensor(f"{matrix}.weight_packed", (size_out, -(-size_in // 2)), BYTES),
            "scale": StoredTensor(f"{matrix}.weight_scale", (size_out, -(-size_in // 32)), BYTES),
        }

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes:
        return mx.decode_mxfp4(tensors["packed"], tensors["scale"], shape[1])
