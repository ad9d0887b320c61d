"""Kernels whose results for a token do not depend on other tokens. All compute in fp32.

A fused kernel gives the same bits as the kernels that it replaces. So the fused kernel and these call the same
functions, take a sum over the same vector with the same number of warps, and round intermediate values as if they had
been stored. The launch disables the fusion of multiply and add, because the compiler chooses it differently for each
kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import rounded, tanh


@triton.jit
def rms_norm(out, x, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr):
    """Compute out = norm of x, both [rows, SIZE], contiguous. Grid: (rows,)."""
    dim = tl.arange(0, PADDED)
    inside = dim < SIZE
    offset = tl.program_id(0).to(tl.int64) * SIZE + dim
    wide = tl.load(x + offset, inside, 0.0).to(tl.float32)
    factor = tl.load(weight + dim, inside, 0.0).to(tl.float32)
    normed = _scaled(wide, _inverse_rms(wide, eps, SIZE), factor, KIND, out.dtype.element_ty)
    tl.store(out + offset, normed, inside)


@triton.jit
def add_rms_norm(total, out, x, y, weight, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr):
    """Compute total = x + y and out = rms_norm(total). All [rows, SIZE], contiguous. Grid: (rows,)."""
    dim = tl.arange(0, PADDED)
    inside = dim < SIZE
    offset = tl.program_id(0).to(tl.int64) * SIZE + dim
    dtype = out.dtype.element_ty
    added = tl.load(x + offset, inside, 0.0).to(tl.float32) + tl.load(y + offset, inside, 0.0).to(tl.float32)
    added = rounded(added, dtype)
    tl.store(total + offset, added, inside)
    wide = added.to(tl.float32)
    factor = tl.load(weight + dim, inside, 0.0).to(tl.float32)
    tl.store(out + offset, _scaled(wide, _inverse_rms(wide, eps, SIZE), factor, KIND, dtype), inside)


@triton.jit
def _inverse_rms(wide, eps, SIZE: tl.constexpr):
    """Return 1 / RMS of a whole row, which is padded with zeros."""
    return tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)


@triton.jit
def _scaled(wide, inverse_rms, factor, KIND: tl.constexpr, DTYPE: tl.constexpr):
    normed = wide * inverse_rms
    # The numbers of `NormKind`.
    if KIND == 0:
        scaled = rounded(normed, DTYPE).to(tl.float32) * factor
    elif KIND == 1:
        scaled = normed * (1.0 + factor)
    else:
        scaled = normed * factor
    return rounded(scaled, DTYPE)


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
    """Rotate x. out [tokens, HEADS, 2 * HALF] and cos, sin fp32 [tokens, 2 * HALF] are contiguous. Grid: (tokens,)."""
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
    turned_first, turned_second = _turned(first, second, first_cos, first_sin, second_cos, second_sin)
    tl.store(target, turned_first.to(out.dtype.element_ty), inside)
    tl.store(target + HALF, turned_second.to(out.dtype.element_ty), inside)


@triton.jit
def _turned(first, second, first_cos, first_sin, second_cos, second_sin):
    return first * first_cos - second * first_sin, second * second_cos + first * second_sin


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
    """Store token t at place places[t] of slot slots[t] (int64), or nowhere if the slot is below 0. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, DIM)[None, :]
    slot = tl.load(slots + token)
    inside = (head < HEADS) & (dim < HEAD_DIM) & (slot >= 0)
    target = slot * slot_stride + tl.load(places + token) * place_stride + head * head_stride + dim
    key = tl.load(keys + token * key_token_stride + head * key_head_stride + dim, inside)
    value = tl.load(values + token * value_token_stride + head * value_head_stride + dim, inside)
    tl.store(key_cache + target, key, inside)
    tl.store(value_cache + target, value, inside)


@triton.jit
def rotate_and_store(
    out,
    key_cache,
    value_cache,
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    slots,
    places,
    eps,
    slot_stride,
    cache_head_stride,
    place_stride,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Apply `rms_norm` to each head of queries and keys if NORMS, then `rotate` and `store_kv`.

    out [tokens, HEADS, 2 * HALF]. Grid: (tokens, HEADS + KV heads): a head of the queries, or one of keys and values.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PADDED_HALF)
    real = pair < HALF
    own_cos, own_sin = cos + token * 2 * HALF, sin + token * 2 * HALF
    dtype = out.dtype.element_ty
    if head < HEADS:
        source = queries + token * query_token_stride + head * query_head_stride
        first, second = _head(source, query_norm, own_cos, own_sin, eps, HALF, PADDED_HALF, PADDED, NORMS, KIND, dtype)
        target = out + (token * HEADS + head) * 2 * HALF + pair
        tl.store(target, first, real)
        tl.store(target + HALF, second, real)
    else:
        kv_head = head - HEADS
        slot = tl.load(slots + token)
        stored = real & (slot >= 0)
        source = keys + token * key_token_stride + kv_head * key_head_stride
        first, second = _head(source, key_norm, own_cos, own_sin, eps, HALF, PADDED_HALF, PADDED, NORMS, KIND, dtype)
        place = slot * slot_stride + tl.load(places + token) * place_stride + kv_head * cache_head_stride + pair
        tl.store(key_cache + place, first, stored)
        tl.store(key_cache + place + HALF, second, stored)
        value = values + token * value_token_stride + kv_head * value_head_stride + pair
        tl.store(value_cache + place, tl.load(value, real), stored)
        tl.store(value_cache + place + HALF, tl.load(value + HALF, real), stored)


@triton.jit
def _head(
    source,
    weight,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the two halves of one head, normed if NORMS, and rotated."""
    pair, dim = tl.arange(0, PADDED_HALF), tl.arange(0, PADDED)
    real = pair < HALF
    first = tl.load(source + pair, real, 0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, real, 0.0).to(tl.float32)
    if NORMS:
        # The sum is over the head as one vector, as `rms_norm` takes it.
        inverse_rms = _inverse_rms(tl.load(source + dim, dim < 2 * HALF, 0.0).to(tl.float32), eps, 2 * HALF)
        factor = tl.load(weight + pair, real, 0.0).to(tl.float32)
        first = _scaled(first, inverse_rms, factor, KIND, DTYPE).to(tl.float32)
        factor = tl.load(weight + HALF + pair, real, 0.0).to(tl.float32)
        second = _scaled(second, inverse_rms, factor, KIND, DTYPE).to(tl.float32)
    first_cos, first_sin = tl.load(cos + pair, real, 0.0), tl.load(sin + pair, real, 0.0)
    second_cos, second_sin = tl.load(cos + HALF + pair, real, 0.0), tl.load(sin + HALF + pair, real, 0.0)
    first, second = _turned(first, second, first_cos, first_sin, second_cos, second_sin)
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit(do_not_specialize=["size"])
def gated(out, gate, up, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out = activation(gate) * up, rounded before the product. All contiguous. Grid: (size / BLOCK,)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + index, index < size, 0.0).to(tl.float32)
    factor = tl.load(up + index, index < size, 0.0).to(tl.float32)
    if GELU:
        activated = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        activated = x * tl.sigmoid(x)
    dtype = out.dtype.element_ty
    tl.store(out + index, (activated.to(dtype).to(tl.float32) * factor).to(dtype), index < size)
