"""Attention over the paged cache.

The order of computation for a query depends on its position only. Tiles of KEYS keys and splits of SPLIT keys begin
at absolute positions, and splits are merged in order. A tile or split that a query does not see leaves its state as it
was, bit for bit. So the result does not depend on the other queries of the batch, nor on whether one program goes
through all splits or each split has its own program, whose states `combine` merges. The launch must disable the fusion
of multiply and add, because the compiler chooses it differently for each kernel.

The running state of a softmax is (row_max, row_sum, acc): the largest score so far, as an exponent of 2; the sum of the
weights relative to it; and the sum of the values with these weights. The state before any key is (-inf, 0, 0). A sink
is merged last, as the state of a key whose value is 0.

The rows of a tile are pairs (token, head) of one request and one KV head. The GROUP heads of a token are adjacent.
`tiles` int32 [tiles, 3] has for each tile: its request, its first row, and the place of this row in `states`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton_kernels.device.arithmetic import dot, tanh
from paceline.kernels.triton_kernels.device.codes import TILE, decoded, key_offset, scale_offset, value_offset

_PACKED = ["query_start", "context_len", "tiles"]
"""Arguments that are parts of one tensor and begin at any address. The kernel is compiled once for all alignments."""


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_PACKED)
def attend(
    out,
    states,
    accs,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    tables,
    query_start,
    context_len,
    last_keys,
    tiles,
    rows,
    token_stride,
    head_stride,
    table_stride,
    slot_stride,
    kv_head_stride,
    place_stride,
    inner_scale,
    outer_scale,
    CODE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    APART: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute attention and write the result to out [tokens, heads, HEAD_DIM]. Grid: (tiles, kv_heads).

    With APART, write states fp32 [splits, kv_heads, rows, 2] (row_max, row_sum) and accs fp32 [splits, kv_heads, rows,
    HEAD_DIM] instead. Then the grid is (tiles, kv_heads, splits). Split 0 is the first split that the tile sees.
    CODE is a `KVCode`, or 0. With a code, strides of the cache are in bytes, and place_stride is that of tiles.
    With AHEAD, a query sees keys up to last_keys, int64 [tokens], and with BOTH_SIDES no key after its window.
    Otherwise it sees no key after its own.
    """
    kv_head = tl.program_id(1)
    tile = tiles + 3 * tl.program_id(0)
    request, first_row = tl.load(tile), tl.load(tile + 1)
    if tl.load(query_start + request) + first_row // GROUP >= tl.load(query_start + request + 1):
        return
    token, position, valid = _rows(query_start, context_len, request, first_row, GROUP, ROWS)
    head = kv_head * GROUP + (first_row + tl.arange(0, ROWS)) % GROUP
    last_key = _last_key(last_keys, token, position, WINDOW, AHEAD, BOTH_SIDES)
    first_key, end = tl.min(position, 0) - WINDOW + 1 if WINDOW else 0, tl.max(last_key, 0) + 1
    first_key = tl.maximum(first_key, 0)
    first_split, end_split = first_key // SPLIT, tl.cdiv(end, SPLIT)
    if APART:
        first_split += tl.program_id(2)
        if first_split >= end_split:
            return
        end_split = first_split + 1
    dim = tl.arange(0, DIM)[None, :]
    inside = dim < HEAD_DIM
    query = tl.load(queries + (token * token_stride + head * head_stride)[:, None] + dim, inside, 0.0)
    table = tables + request.to(tl.int64) * table_stride
    row_max, row_sum, acc = _nothing(ROWS, DIM)
    for split in range(first_split, end_split):
        own_max, own_sum, own_acc = _nothing(ROWS, DIM)
        begin = tl.maximum(split * SPLIT, first_key // KEYS * KEYS)
        for first in range(begin, tl.minimum((split + 1) * SPLIT, end), KEYS):
            key = first + tl.arange(0, KEYS)
            # Outside of the keys that the tile sees, tables and slots may hold anything.
            exists = (key >= first_key) & (key < end)
            read = exists
            if CODE:  # whole tiles: any code is a finite number, and only equal masks let the compiler load words
                tile_key = first + tl.arange(0, KEYS) // TILE * TILE
                read = (tile_key + TILE > first_key) & (tile_key < end)
            slot = tl.load(table + key // BLOCK_TOKENS, read, 0).to(tl.int64)
            place = slot * slot_stride + kv_head * kv_head_stride
            present = read[:, None] & inside
            if CODE:
                place += key % BLOCK_TOKENS // TILE * place_stride
                # The compiler cannot see that sixteen codes are adjacent, because it does not know a slot's address.
                own_dim = tl.arange(0, DIM)[:, None]
                offset = tl.max_contiguous(
                    tl.multiple_of(place[None, :] + key_offset(key[None, :], own_dim), (1, 16)), (1, 16)
                )
                key_codes = tl.load(keys + offset, read[None, :] & (own_dim < HEAD_DIM), 0)
                offset = tl.max_contiguous(
                    tl.multiple_of(place[:, None] + value_offset(key[:, None], dim), (1, 16)), (1, 16)
                )
                value_codes = tl.load(values + offset, present, 0)
                key_tile, value_tile = decoded(key_codes, CODE, query.dtype), decoded(value_codes, CODE, query.dtype)
            else:
                place += key % BLOCK_TOKENS * place_stride
                key_tile = tl.trans(tl.load(keys + place[:, None] + dim, present, 0.0))
                value_tile = tl.load(values + place[:, None] + dim, present, 0.0)
            scores = dot(query, key_tile, tl.zeros([ROWS, KEYS], tl.float32), INTERPRETED) * inner_scale
            if CODE:
                key_scale = tl.load(key_scales + scale_offset(place, key), exists, 0.0).to(tl.float32)
                scores *= key_scale[None, :]
            if CAPPED:
                scores = outer_scale * tanh(scores)
            sees = exists[None, :] & (key[None, :] <= last_key[:, None])
            if WINDOW:
                sees = sees & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(sees, scores, float("-inf"))
            top = tl.maximum(own_max, tl.max(scores, 1))
            base = _finite(top)
            weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(own_max - base)
            own_sum = own_sum * kept + tl.sum(weights, 1)
            if CODE:
                value_scale = tl.load(value_scales + scale_offset(place, key), exists, 0.0).to(tl.float32)
                weights = tl.where(sees, weights * value_scale[None, :], 0.0)  # a scale may be NaN
            own_acc = dot(weights.to(value_tile.dtype), value_tile, own_acc * kept[:, None], INTERPRETED)
            own_max = top
        row_max, row_sum, acc = _merge(row_max, row_sum, acc, own_max, own_sum, own_acc)
    stored = valid[:, None] & inside
    if APART:
        part = (tl.program_id(2) * tl.num_programs(1) + kv_head).to(tl.int64) * rows + tl.load(tile + 2)
        place = part + tl.arange(0, ROWS)
        tl.store(states + 2 * place, row_max, valid)
        tl.store(states + 2 * place + 1, row_sum, valid)
        tl.store(accs + place[:, None] * HEAD_DIM + dim, acc, stored)
    else:
        if SINKS:
            row_max, row_sum, acc = _with_sink(row_max, row_sum, acc, tl.load(sinks + head))
        place = (token * tl.num_programs(1) * GROUP + head) * HEAD_DIM
        tl.store(out + place[:, None] + dim, (acc / row_sum[:, None]).to(out.dtype.element_ty), stored)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_PACKED)
def combine(
    out,
    states,
    accs,
    sinks,
    query_start,
    context_len,
    last_keys,
    tiles,
    rows,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
):
    """Merge the states of all splits of one row. Grid: (tiles, kv_heads, largest number of rows of a tile)."""
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    tile = tiles + 3 * tl.program_id(0)
    request, first_row = tl.load(tile), tl.load(tile + 1)
    row = first_row + tl.program_id(2)
    token = tl.load(query_start + request) + row // GROUP
    if token >= tl.load(query_start + request + 1):
        return
    tokens, position, _ = _rows(query_start, context_len, request, first_row, GROUP, ROWS)
    last_key = _last_key(last_keys, tokens, position, WINDOW, AHEAD, BOTH_SIDES)
    first_key = tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) if WINDOW else 0
    splits = tl.cdiv(tl.max(last_key, 0) + 1, SPLIT) - first_key // SPLIT
    dim = tl.arange(0, DIM)[None, :]
    row_max, row_sum, acc = _nothing(1, DIM)
    for split in range(splits):
        first = (split * kv_heads + kv_head).to(tl.int64) * rows + tl.load(tile + 2)
        place = first + tl.program_id(2) + tl.arange(0, 1)
        own_max, own_sum = tl.load(states + 2 * place), tl.load(states + 2 * place + 1)
        own_acc = tl.load(accs + place[:, None] * HEAD_DIM + dim, dim < HEAD_DIM, 0.0)
        row_max, row_sum, acc = _merge(row_max, row_sum, acc, own_max, own_sum, own_acc)
    head = kv_head * GROUP + row % GROUP
    if SINKS:
        row_max, row_sum, acc = _with_sink(row_max, row_sum, acc, tl.load(sinks + head + tl.arange(0, 1)))
    place = (token.to(tl.int64) * kv_heads * GROUP + head) * HEAD_DIM
    tl.store(out + place + dim, (acc / row_sum[:, None]).to(out.dtype.element_ty), dim < HEAD_DIM)


@triton.jit
def _last_key(last_keys, token, position, WINDOW: tl.constexpr, AHEAD: tl.constexpr, BOTH_SIDES: tl.constexpr):
    """Return the position of the last key that each query sees."""
    last = position
    if AHEAD:
        last = tl.load(last_keys + token).to(tl.int32)
        if BOTH_SIDES and WINDOW:
            last = tl.minimum(last, position + WINDOW - 1)
    return last


@triton.jit
def _rows(query_start, context_len, request, first_row, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the token (int64) and the position of each row of a tile, and whether the row exists. A row that does not
    exist has the request's last token."""
    end = tl.load(query_start + request + 1)
    token = tl.load(query_start + request) + (first_row + tl.arange(0, ROWS)) // GROUP
    valid = token < end
    token = tl.minimum(token, end - 1)
    return token.to(tl.int64), tl.load(context_len + request) - end + token, valid


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the state before any key."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def _merge(row_max, row_sum, acc, other_max, other_sum, other_acc):
    """Return the state after the keys of both states."""
    top = tl.maximum(row_max, other_max)
    base = _finite(top)
    factor, other = tl.exp2(row_max - base), tl.exp2(other_max - base)
    return top, row_sum * factor + other_sum * other, acc * factor[:, None] + other_acc * other[:, None]


@triton.jit
def _with_sink(row_max, row_sum, acc, sink):
    """Return the state after the keys of a state and a sink, whose score is in base e."""
    one = tl.full(sink.shape, 1.0, tl.float32)
    return _merge(row_max, row_sum, acc, sink * 1.4426950408889634, one, tl.zeros_like(acc))  # log2(e)


@triton.jit
def _finite(row_max):
    """Return the number to subtract from scores. A row without keys has the maximum -inf, and -inf - -inf is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)
