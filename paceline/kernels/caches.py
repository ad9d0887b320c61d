"""The caches of layers: views of keys and values, or of states, into a pool of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.kv_layout import SCALE_BYTES, TILE_TOKENS
from paceline.kernels.codes import KVCode


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, views into the pool: [slots, kv_heads, block_tokens, head_dim].

    Latent vectors serve as keys and values, so both views show the same memory.
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales | None = None
    """If keys and values are coded in 8 bits: their code and scales. Then `keys` and `values` show codes in tiles, in
    uint8: [slots, kv_heads, tiles, head_dim, 16 tokens] and [slots, kv_heads, tiles, head_dim / 16, 16 tokens, 16].
    """

    @property
    def first(self) -> Tensor:
        """The tensor whose address and shape identify this cache."""
        return self.keys

    @property
    def code(self) -> KVCode | None:
        return None if self.scales is None else self.scales.code


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The code of a layer's keys and values, and their scales: bf16 views into the pool, [slots, kv_heads, tiles, 16
    tokens]. A number is its code's number times its token's scale.
    """

    code: KVCode
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one recurrent layer, in place of keys and values: fp32 views into the pool.

    A token reads the state after the token before it from that token's block, and writes to the block that it belongs
    to. So a full block never changes again.

    A step may begin before the end of an earlier step, because drafts were refused. Each part of a state can therefore
    go back by the largest number of drafts, but not behind `AttentionBatch.final_len`. A step reads only the block of
    the token before its first token, so a block can be cached, moved or handed over at any time.
    """

    parts: tuple[Tensor, ...]
    """Parts of the state, [slots, ...] each; all dimensions but the first are dense. The kernels of the layer define
    them.
    """

    @property
    def first(self) -> Tensor:
        return self.parts[0]

    @property
    def code(self) -> KVCode | None:
        return None


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a recurrence that can go back, such as Mamba-2's or a delta rule's: two parts of a `LayerState`.

    A block has the state after some of its tokens, and the inputs of the computed tokens after these. A step whose
    first token is at position p, in a context with `final` final tokens, does this for each request:

    1. It takes the state of the block of token p - 1, and advances it by the pending inputs of the tokens before p.
    2. It computes its tokens one after another. At the first token of a block, it puts the state before that token into
       the block.
    3. In the block, it advances the state only over final tokens. It leaves the block's state as it is if p > final.
    4. It adds the inputs of its other tokens to the pending inputs of their blocks. Inputs of refused tokens are
       overwritten by this, or never read.

    Advancing the state by a pending input gives the same bits as the first computation of the input's token.
    """

    state: Tensor
    """fp32 [slots, ...]: for each block, the state after some of its tokens."""
    pending: Tensor
    """fp32 [slots, 1 + drafts, inputs]: row 0 begins with the number of the block's tokens that `state` includes. Row
    i + 1 has the inputs of the i-th token after them. Kernels refuse a step for which there are too few rows."""


AnyCache = LayerCache | LayerState


def view_pool(
    arena: Tensor, slot_elements: int, layers: int, kv_heads: int, block_tokens: int, head_dim: int, planes: int = 2
) -> list[LayerCache]:
    """Return the caches of one group's layers as views into the pool.

    Args:
        arena: the pool, flat, [slots * slot_elements] in the cache's dtype.
        planes: 2 for keys and values; 1 if each key is also the value.
    """
    slots = arena.numel() // slot_elements
    plane = kv_heads * block_tokens * head_dim
    strides = (slot_elements, block_tokens * head_dim, head_dim, 1)
    shape = (slots, kv_heads, block_tokens, head_dim)

    def plane_view(index: int) -> Tensor:
        return torch.as_strided(arena, shape, strides, storage_offset=arena.storage_offset() + index * plane)

    views = [plane_view(index) for index in range(planes * layers)]
    return [LayerCache(keys, values) for keys, values in zip(views[::planes], views[planes - 1 :: planes])]


def view_coded_pool(
    arena: Tensor, slot_bytes: int, layers: int, kv_heads: int, block_tokens: int, head_dim: int, code: KVCode
) -> list[LayerCache]:
    """Return the caches of one group's layers, whose keys and values are coded, as views into the pool.

    Args:
        arena: the pool, flat, of any dtype.
        block_tokens, head_dim: multiples of 16.
    """
    octets = arena.view(torch.uint8)
    slots, tiles = octets.numel() // slot_bytes, block_tokens // TILE_TOKENS
    tile_bytes = TILE_TOKENS * (head_dim + SCALE_BYTES)
    plane = kv_heads * tiles * tile_bytes

    def view(words: Tensor, place: int, *shape: int) -> Tensor:
        """Return parts of all tiles of a plane; `place` is that of the first part in bytes, from the pool's first."""
        strides = [stride // words.itemsize for stride in (slot_bytes, tiles * tile_bytes, tile_bytes)]
        strides += [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = int(words.storage_offset()) + place // words.itemsize
        return torch.as_strided(words, (slots, kv_heads, tiles, *shape), strides, first)

    def cache_at(place: int) -> LayerCache:
        halves, scales = octets.view(torch.bfloat16), TILE_TOKENS * head_dim
        keys = view(octets, place, head_dim, TILE_TOKENS)
        values = view(octets, place + plane, head_dim // TILE_TOKENS, TILE_TOKENS, TILE_TOKENS)
        key_scales, value_scales = (view(halves, place + at + scales, TILE_TOKENS) for at in (0, plane))
        return LayerCache(keys, values, CacheScales(code, key_scales, value_scales))

    return [cache_at(2 * plane * layer) for layer in range(layers)]


def view_states(arena: Tensor, slot_bytes: int, layers: int, parts: Sequence[Sequence[int]]) -> list[LayerState]:
    """Return the states of one group's layers as views into the pool.

    Args:
        arena: the pool, flat, of any dtype.
        parts: the shape of each part of a layer's state.
    """
    words = arena.view(torch.uint8).view(torch.float32)
    slot_elements = slot_bytes // words.itemsize
    slots = words.numel() // slot_elements
    place = words.storage_offset()

    def take(shape: Sequence[int]) -> Tensor:
        nonlocal place
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        part = torch.as_strided(words, (slots, *shape), (slot_elements, *strides), place)
        place += math.prod(shape)
        return part

    return [LayerState(tuple(take(shape) for shape in parts)) for _ in range(layers)]
