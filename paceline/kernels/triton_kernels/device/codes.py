"""Keys and values in codes of 8 bits. `kernels/codes.py` is the standard, and `core/kv_layout.py` shows a tile.

Numbers of codes are made with integers, because not every GPU converts the codes of floating point. All numbers of a
code are exact in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import rounded

TILE = tl.constexpr(16)
"""`TILE_TOKENS`."""


@triton.jit
def store_codes(
    key_codes,
    value_codes,
    key_scales,
    value_scales,
    keys,
    values,
    slots,
    places,
    slot_stride,
    head_stride,
    tile_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    CODE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Store token t as codes at place places[t] of slot slots[t] (int64), or nowhere if the slot is below 0.

    Codes are uint8 and scales bf16; strides of the cache are in bytes. Grid: (tokens,).
    """
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, PADDED_HEADS), tl.arange(0, DIM)[None, :]
    slot, place = tl.load(slots + token), tl.load(places + token)
    own = (head < HEADS) & (slot >= 0)
    inside = own[:, None] & (dim < HEAD_DIM)
    tile = slot * slot_stride + place // TILE * tile_stride + head * head_stride
    source = keys + token * key_token_stride + head[:, None] * key_head_stride + dim
    codes, scales = _encoded(tl.load(source, inside, 0.0).to(tl.float32), CODE)
    tl.store(key_codes + tile[:, None] + key_offset(place, dim), codes, inside)
    tl.store(key_scales + scale_offset(tile, place), scales, own)
    source = values + token * value_token_stride + head[:, None] * value_head_stride + dim
    codes, scales = _encoded(tl.load(source, inside, 0.0).to(tl.float32), CODE)
    tl.store(value_codes + tile[:, None] + value_offset(place, dim), codes, inside)
    tl.store(value_scales + scale_offset(tile, place), scales, own)


@triton.jit
def key_offset(place, dim):
    """Return where a key's element is in its tile."""
    return dim * TILE + place % TILE


@triton.jit
def value_offset(place, dim):
    """Return where a value's element is in its tile."""
    return dim // TILE * TILE * TILE + place % TILE * TILE + dim % TILE


@triton.jit
def scale_offset(tile, place):
    """Return where a token's scale is among scales of 2 bytes, from the place of its tile in bytes."""
    return tile // 2 + place % TILE


@triton.jit
def decoded(codes, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of codes uint8, without their scales."""
    if CODE == 1:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
    bits = codes.to(tl.int32)
    sign, rest = (bits & 128) << 24, bits & 127
    # 120 is the difference between the biases of exponents. There are no subnormal codes.
    bits = tl.where(rest == 0, 0, sign | ((rest << 20) + (120 << 23)))
    return bits.to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _encoded(x, CODE: tl.constexpr):
    """Return the codes of rows x fp32 [heads, DIM], which are padded with zeros, and their scales, bf16 [heads]."""
    largest: tl.constexpr = 127.0 if CODE == 1 else 448.0
    top = tl.max(tl.abs(x), 1)
    scales = tl.maximum(tl.div_rn(top, tl.full(top.shape, largest, tl.float32)), 7.888609052210118e-31)  # 2**-100
    scales = rounded(scales + tl.sum(x * 0.0, 1), tl.bfloat16)
    divisors = tl.broadcast_to(scales.to(tl.float32)[:, None], x.shape)
    scaled = tl.div_rn(x, divisors)
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
    if CODE == 1:
        whole = (scaled + 12582912.0) - 12582912.0  # to the nearest, because fp32 has no halves from 2**23 on
        return whole.to(tl.int8).to(tl.uint8, bitcast=True), scales
    bits = scaled.to(tl.int32, bitcast=True)
    rest = bits & 0x7FFFFFFF
    nearest = (rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20
    code = ((bits >> 24) & 128) | (nearest - (120 << 3))
    return tl.where(tl.abs(scaled) < 0.015625, 0, code).to(tl.uint8), scales  # 2**-6, the least normal number
