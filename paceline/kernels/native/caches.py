"""Caches as the library reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.kv_layout import SCALE_BYTES, TILE_TOKENS
from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import CacheScales, LayerCache
from paceline.kernels.native.library import Cache
from paceline.kernels.native.operations import need


def cache_format(cache: LayerCache) -> int:
    """Return the `CacheFormat` of src/program.h."""
    return 0 if cache.scales is None else int(cache.scales.code)


def kernel_cache(cache: LayerCache, x: Tensor, group: GroupTables) -> Cache:
    """Return the C structure of the cache to which x [tokens, heads, head_dim] is written, or which it attends to."""
    if cache.scales is not None:
        return _coded(cache, cache.scales, x.shape[2], group.block_tokens)
    slots, kv_heads, _, _ = cache.keys.shape
    head_dim = x.shape[2]
    for plane in (cache.keys, cache.values):
        need("the cache", plane, x.dtype, slots, kv_heads, group.block_tokens, head_dim)
    strides = cache.keys.stride()
    if strides[3] != 1 or cache.values.stride() != strides:
        raise ValueError(f"the cache: keys have strides {strides}, values {cache.values.stride()}; the last must be 1")
    return Cache(cache.keys.data_ptr(), cache.values.data_ptr(), slots, kv_heads, head_dim, *strides[:3])


def _coded(cache: LayerCache, scales: CacheScales, head_dim: int, block_tokens: int) -> Cache:
    """Return the same for a cache of 8 bits, with strides in bytes. Scales must follow the codes of their tile."""
    slots, kv_heads, _, _, _ = cache.keys.shape
    tiles, groups = block_tokens // TILE_TOKENS, head_dim // TILE_TOKENS
    row = head_dim + SCALE_BYTES
    need("keys", cache.keys, torch.uint8, slots, kv_heads, tiles, head_dim, TILE_TOKENS)
    need("values", cache.values, torch.uint8, slots, kv_heads, tiles, groups, TILE_TOKENS, TILE_TOKENS)
    for codes, own_scales in ((cache.keys, scales.keys), (cache.values, scales.values)):
        need("scales", own_scales, torch.bfloat16, slots, kv_heads, tiles, TILE_TOKENS)
        if own_scales.data_ptr() - codes.data_ptr() != TILE_TOKENS * head_dim or codes.stride(2) != TILE_TOKENS * row:
            raise ValueError("the cache: the scales of a tile must follow its codes, and another tile its scales")
        if [2 * stride for stride in own_scales.stride()[:3]] != list(codes.stride()[:3]):
            raise ValueError("the cache: scales and codes must be equally far apart")
    strides = cache.keys.stride()[:2]
    if block_tokens % TILE_TOKENS or cache.values.stride()[:2] != strides:
        raise ValueError(f"the cache: blocks of {block_tokens} tokens must be whole tiles, with equal strides")
    return Cache(cache.keys.data_ptr(), cache.values.data_ptr(), slots, kv_heads, head_dim, *strides, row)
