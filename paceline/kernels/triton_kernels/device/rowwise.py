"""Kernels in which a token has nothing to do with another. All compute in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import tanh


@triton.jit
def rms_norm(out, x, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """out, x [rows, SIZE], contiguous. Grid: (rows,)."""
    dim = tl.arange(0, PADDED)
    inside = dim < SIZE
    offset = tl.program_id(0).to(tl.int64) * SIZE + dim
    wide = tl.load(x + offset, inside, 0.0).to(tl.float32)
    factor = tl.load(weight + dim, inside, 0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    if UNIT_OFFSET:
        scaled = normed * (1.0 + factor)
    else:
        # Rounded before the product as well as behind it, as the models of this form are.
        scaled = normed.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + offset, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def rotate(
    out,
    x,
    cos,
    sin,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """out [tokens, HEADS, 2 * HALF], contiguous; cos, sin fp32 [tokens, 2 * HALF], contiguous. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_HALF)
    inside = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    source = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(source, inside, 0.0).to(tl.float32)
    second = tl.load(source + HALF, inside, 0.0).to(tl.float32)
    angle, real = token * 2 * HALF + pair[None, :], (pair < HALF)[None, :]
    first_cos, first_sin = tl.load(cos + angle, real, 0.0), tl.load(sin + angle, real, 0.0)
    second_cos, second_sin = tl.load(cos + angle + HALF, real, 0.0), tl.load(sin + angle + HALF, real, 0.0)
    target = out + (token * HEADS + head[:, None]) * 2 * HALF + pair[None, :]
    dtype = out.dtype.element_ty
    tl.store(target, (first * first_cos - second * first_sin).to(dtype), inside)
    tl.store(target + HALF, (second * second_cos + first * second_sin).to(dtype), inside)


@triton.jit
def store_kv(
    key_cache,
    value_cache,
    keys,
    values,
    slots,
    places,
    slot_stride,
    head_stride,
    place_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Token t goes to slots[t] (int64), places[t] (int64). Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < HEADS) & (dim < HEAD_DIM)
    target = tl.load(slots + token) * slot_stride + tl.load(places + token) * place_stride + head * head_stride + dim
    key = tl.load(keys + token * key_token_stride + head * key_head_stride + dim, inside)
    value = tl.load(values + token * value_token_stride + head * value_head_stride + dim, inside)
    tl.store(key_cache + target, key, inside)
    tl.store(value_cache + target, value, inside)


@triton.jit(do_not_specialize=["size"])
def gated(out, gate, up, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """out = activation(gate) * up, the activation rounded before the product. All contiguous. Grid: (size / BLOCK,)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + index, index < size, 0.0).to(tl.float32)
    factor = tl.load(up + index, index < size, 0.0).to(tl.float32)
    if GELU:
        activated = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        activated = x * tl.sigmoid(x)
    dtype = out.dtype.element_ty
    tl.store(out + index, (activated.to(dtype).to(tl.float32) * factor).to(dtype), index < size)
