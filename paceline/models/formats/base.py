"""The interface of a weight format: how a checkpoint stores the matrices that it has quantized. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from paceline.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Json = Mapping[str, Any]

PACKED = ("I32",)
FLOATS = ("F16", "BF16", "F32")
FLOAT8 = ("F8_E4M3",)
BYTES = ("U8",)

KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")
"""Ends of the names of a checkpoint's own scales for keys and values in 8 bits. They are not read: with
--kv-cache-dtype, each token and head gets a scale of its own, which is more exact.
"""

ANY = -1
"""Marks the size of a stored tensor of one dimension that is known only from the file."""


class StoredTensor(NamedTuple):
    """A tensor of a quantized matrix, as a safetensors file has it."""

    name: str
    shape: tuple[int, ...]
    """The shape that the tensor must have. A tensor of shape (1,) may also be stored without a dimension. (ANY,) allows
    any size.
    """
    dtypes: tuple[str, ...]
    """The dtypes that the tensor may have, by their names in headers of safetensors files."""
    is_optional: bool = False


class Codes(NamedTuple):
    """A matrix of small numbers: a weight is value * scale + offset, rounded."""

    values: Tensor
    """[out, in], as `QuantizedMatrix.values`."""
    scales: Tensor
    """[out, groups], fp16, bf16 or fp32. All groups have `group` values along `in`, but the last may have fewer. With a
    table, and for floats, they may also be uint8 or float8_e4m3fn, as `QuantizedMatrix.scales`.
    """
    offsets: Tensor | None
    """fp32, in the shape of the scales; None if weights have no offset. fp32 scales never have offsets."""
    bits: int
    """Bits of each value: 4 or 8."""
    group: int
    """Number of values along `in` that share a scale: 16, or a multiple of 32."""
    table: Tensor | None = None
    factors: Tensor | None = None
    """`QuantizedMatrix.table` and `factors`."""
    rounding: torch.dtype | None = None
    """The dtype to which weights are rounded; None for that of the scales."""
    input_scale: float | None = None
    """`QuantizedMatrix.input_scale`. Then there is one scale for each output: [out, 1]."""


class WeightFormat(Protocol):
    """The way in which a checkpoint stores its quantized matrices. A matrix without a tensor of `marks` is not
    quantized.
    """

    name: ClassVar[str]
    """Name of the format in a few words, for messages."""
    marks: ClassVar[Sequence[str]]
    """Ends of tensors' names. A quantized matrix has one of these tensors, and no other matrix has any."""
    unread: ClassVar[Sequence[str]]
    """Ends of the names of tensors that are not read, such as scales of activations."""

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """Return the tensors that the file has for a matrix [out, in], by the names that `decode` expects.

        Args:
            matrix: the name of the matrix without its end ".weight".

        Raises:
            ModelError: the format cannot store a matrix of this shape.
        """

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        """Return the number of weights that one element of a tensor of this name, dtype and shape holds."""

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        """Return a matrix: as whole numbers if kernels can read them, else as a tensor [out, in] of any float dtype.

        Raises:
            ModelError: the tensors contradict each other.
        """


def refuse(name: str, what: str) -> ModelError:
    """Return the error for a checkpoint of a format whose variant is not supported."""
    return ModelError(f"the checkpoint's weights are quantized as {name}, {what}")


def count_field(config: Json, name: str, field: str, default: int | None = None) -> int:
    """Return a whole number of a format's config. Raises ModelError if the field is not a whole number."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refuse(name, f"but {field} is {value!r:.40}, not a whole number")
    return value


def groups_of(name: str, group_size: int, size_in: int) -> tuple[int, int]:
    """Return the values of one group, and the number of groups, of a row with `size_in` values.

    Args:
        group_size: the number in the format's config; -1 means one group for each row.
    """
    if group_size == -1:
        return -(-size_in // 32) * 32, 1
    if group_size <= 0 or (group_size != 16 and group_size % 32):
        raise refuse(name, f"in groups of {group_size}; groups must have 16 values, or a multiple of 32")
    return group_size, -(-size_in // group_size)


def object_field(config: Json, name: str, field: str) -> Json:
    """Return an object of a format's config; empty if the field is missing or null. Raises ModelError if it is not an
    object.
    """
    value = config.get(field) or {}
    if not isinstance(value, Mapping):
        raise refuse(name, f"but {field} is {value!r:.40}, not an object")
    return value


def is_in_order(groups_of_inputs: Tensor, group: int) -> bool:
    """Return whether each input i belongs to group i // group, or all entries are 0, as some writers store this
    order.
    """
    in_order = groups_of_inputs.new_tensor(range(len(groups_of_inputs))) // group
    return bool((groups_of_inputs == in_order).all() or (groups_of_inputs == 0).all())


def checked_groups(name: str, tensor: str, groups_of_inputs: Tensor, groups: int) -> Tensor:
    """Return the group of each input, int64 [in]. Raises ModelError if a number is not that of a group."""
    if int(groups_of_inputs.min()) < 0 or int(groups_of_inputs.max()) >= groups:
        raise refuse(name, f"but {tensor} names groups outside of 0 to {groups - 1}")
    return groups_of_inputs.long()


def spread(scales: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Repeat the scale of each block, so that each element of a matrix of this shape has its own."""
    for dim, (count, size) in enumerate(zip(block, shape)):
        scales = scales.repeat_interleave(count, dim).narrow(dim, 0, size)
    return scales


def floats_of_8_bits(
    floats: Tensor, scales: Tensor, block: Sequence[int], rounding: torch.dtype | None = None
) -> Codes | Tensor:
    """Return a matrix of floats of 8 bits (E4M3) with a scale for each block.

    Args:
        scales: [blocks along out, blocks along in], as `Codes.scales`, but not float8_e4m3fn.
        block: outputs and values along `in` of one block.
        rounding: `Codes.rounding`.
    """
    size_out = len(floats)
    rows, group = min(block[0], size_out), block[1]
    if (group == 16 or group % 32 == 0) and not has_nan(floats):
        scales = scales.repeat_interleave(rows, 0)[:size_out]
        return Codes(floats, scales, None, 8, group, rounding=rounding or scales.dtype)
    if not scales.is_floating_point():
        return floats.float() * spread(powers(scales), block, floats.shape)
    return floats.to(scales.dtype) * spread(scales, block, floats.shape)


def has_nan(floats: Tensor) -> bool:
    """Return whether any element of a tensor in float8_e4m3fn is NaN."""
    return bool(floats.isnan().any())


def powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127), fp32, for exponents in uint8 (E8M0)."""
    import torch  # here, because processes without torch read configs

    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def unpack_words(packed: Tensor, bits: int, bias: int) -> Tensor:
    """Unpack int32 words [..., words] to int8 [..., 32 / bits * words], the lowest bits first, minus `bias`."""
    count, mask = 32 // bits, (1 << bits) - 1
    values = packed.new_empty(*packed.shape, count).char()
    for index in range(count):
        values[..., index] = (packed >> bits * index & mask) - bias
    return values.flatten(-2)


def with_zeros(values: Tensor, zeros: Tensor, scales: Tensor, bits: int, group: int) -> Codes | Tensor:
    """Return the matrix (value - zero) * scale, computed in the dtype of the scales.

    Args:
        values: int8 [out, in]: 4-bit codes from 0 to 15, or 8-bit codes minus 128.
        zeros: int16 [out, groups]: the zero of each group among the codes, before 128 is subtracted.
    """
    middle = 1 << bits - 1
    shift = middle if bits == 8 else 0
    if bool((zeros == middle).all()):  # symmetric, which needs no offsets
        return Codes(values if shift else values - middle, scales, None, bits, group)
    if str(scales.dtype) == "torch.float32":  # an offset has too many bits
        whole = values.short() + shift - spread(zeros, (1, group), values.shape)
        return whole * spread(scales, (1, group), values.shape)
    offsets = (shift - zeros.float()) * scales.float()
    return Codes(values, scales, offsets, bits, group)
