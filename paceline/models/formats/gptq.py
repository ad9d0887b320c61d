"""GPTQ, as GPTQModel, AutoGPTQ and AutoRound write it: codes of 4 or 8 bits with a zero and a scale for each group.

Layout: https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/nn_modules/qlinear
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from paceline.models.formats.base import (
    FLOATS,
    PACKED,
    Codes,
    Json,
    StoredTensor,
    checked_groups,
    count_field,
    groups_of,
    is_in_order,
    object_field,
    refuse,
    unpack_words,
    with_zeros,
)

if TYPE_CHECKING:
    from torch import Tensor

_ONES = {4: 0x11111111, 8: 0x01010101}
"""For each number of bits, a word of 32 bits whose codes are all 1."""


class Gptq:
    """Matrices of GPTQ. Version 1 of the layout stores zeros minus one, version 2 stores them as they are."""

    name: ClassVar[str] = "GPTQ"
    marks: ClassVar[Sequence[str]] = (".qweight",)
    unread: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Json) -> None:
        self._bits = count_field(config, self.name, "bits")
        if self._bits not in _ONES:
            raise refuse(self.name, f"in {self._bits} bits; 4 and 8 are supported")
        layout = str(config.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise refuse(self.name, f"in the layout {layout}; gptq and gptq_v2 are supported")
        # Rules that begin with "-:" name layers that are not quantized, which their tensors show.
        if any(not rule.startswith("-:") for rule in object_field(config, self.name, "dynamic")):
            raise refuse(self.name, "with other settings for single layers (dynamic); that is not supported")
        self._is_first_version = layout == "gptq"
        self._is_symmetric = config.get("sym") is True
        self._group_size = count_field(config, self.name, "group_size")

    def tensors(self, matrix: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        size_out, size_in = shape
        _, groups = groups_of(self.name, self._group_size, size_in)
        per_word = 32 // self._bits
        words_in, words_out = -(-size_in // per_word), -(-size_out // per_word)
        return {
            "qweight": StoredTensor(f"{matrix}.qweight", (words_in, size_out), PACKED),
            "qzeros": StoredTensor(f"{matrix}.qzeros", (groups, words_out), PACKED),
            "scales": StoredTensor(f"{matrix}.scales", (groups, size_out), FLOATS),
            "g_idx": StoredTensor(f"{matrix}.g_idx", (size_in,), PACKED, is_optional=True),
        }

    def weights_in(self, tensor: str, dtype: str, shape: Sequence[int]) -> int:
        if tensor.endswith(".qweight"):
            return 32 // self._bits
        return 0 if tensor.endswith((".qzeros", ".scales", ".g_idx")) else 1

    def decode(self, matrix: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Codes | Tensor:
        size_out, size_in = shape
        group, groups = groups_of(self.name, self._group_size, size_in)
        bias = 128 if self._bits == 8 else 0
        codes = unpack_words(tensors["qweight"].T.contiguous(), self._bits, bias)[:, :size_in]
        zeros, scales = self._zeros(tensors["qzeros"], size_out), tensors["scales"].T.contiguous()
        groups_of_inputs = tensors.get("g_idx")
        if groups_of_inputs is None or is_in_order(groups_of_inputs, group):
            return with_zeros(codes, zeros, scales, self._bits, group)
        # The groups are mixed along `in` (act-order), which kernels do not read.
        places = checked_groups(self.name, f"{matrix}.g_idx", groups_of_inputs, groups)
        return (codes.short() + bias - zeros[:, places]) * scales[:, places]

    def _zeros(self, packed: Tensor, size_out: int) -> Tensor:
        """Return the zeros: int16 [out, groups]."""
        middle = 1 << self._bits - 1
        as_stored = unpack_words(packed, self._bits, 0).short()[:, :size_out] & (1 << self._bits) - 1
        # Some writers claim version 1 and store the zeros of version 2. In a symmetric matrix this can be seen.
        if not self._is_first_version or (self._is_symmetric and bool((as_stored == middle).all())):
            return as_stored.T.contiguous()
        # The one is subtracted from words rather than codes, so a zero of 0 has borrowed from the next code.
        zeros = unpack_words(packed + _ONES[self._bits], self._bits, 0).short()[:, :size_out]
        return (zeros & (1 << self._bits) - 1).T.contiguous()
