"""The 8-bit codes of keys and values in a KV cache, in plain torch: the standard for kernels."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

LEAST_SCALE = 2.0**-100
"""The smallest scale, so that rows of zeros, and numbers far below those of any model, have one."""


class KVCode(IntEnum):
    """An 8-bit code. `CacheFormat` of native/src/program.h has the same numbers."""

    INT8 = 1
    """Signed bytes from -127 to 127."""
    FP8_E4M3 = 2
    """Floating point with 4 bits of exponent and 3 of mantissa, up to 448. Subnormal numbers are rounded to 0."""


CODES = {"int8": KVCode.INT8, "fp8_e4m3": KVCode.FP8_E4M3}
"""The codes by their names in options and layouts."""

_LARGEST = {KVCode.INT8: 127.0, KVCode.FP8_E4M3: 448.0}
_LEAST_NORMAL = 2.0**-6


def encode(x: Tensor, code: KVCode) -> tuple[Tensor, Tensor]:
    """Return the codes of rows x [..., size] as uint8 in the same shape, and their scales, bf16 [...].

    The largest number of a row gets the largest code. The scale of a row with NaN or infinity is NaN.
    """
    wide, largest = x.float(), _LARGEST[code]
    scales = (wide.abs().amax(-1) / largest).clamp(min=LEAST_SCALE) + (wide * 0.0).sum(-1)
    scales = scales.bfloat16()
    scaled = (wide / scales.float().unsqueeze(-1)).clamp(-largest, largest).nan_to_num(0.0)
    if code == KVCode.INT8:
        return scaled.round().to(torch.int8).view(torch.uint8), scales
    scaled = torch.where(scaled.abs() < _LEAST_NORMAL, 0.0, scaled)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, code: KVCode) -> Tensor:
    """Return the numbers of codes, uint8 [..., size], with scales [...]: fp32 in the shape of the codes."""
    kind = torch.int8 if code == KVCode.INT8 else torch.float8_e4m3fn
    return codes.view(kind).float() * scales.float().unsqueeze(-1)
