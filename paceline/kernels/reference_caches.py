"""Reads and writes of paged caches in plain torch."""

from __future__ import annotations

from torch import Tensor

from paceline.core.kv_layout import TILE_TOKENS
from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import CacheScales, LayerCache
from paceline.kernels.codes import decode, encode


def store_codes(keys: Tensor, values: Tensor, cache: LayerCache, scales: CacheScales, group: GroupTables) -> None:
    """Write keys and values [tokens, kv_heads, head_dim] as codes to the slots of their tokens."""
    slots, tiles, places = group.write_slots, group.write_offsets // TILE_TOKENS, group.write_offsets % TILE_TOKENS
    codes, scales.keys[slots, :, tiles, places] = encode(keys, scales.code)
    cache.keys[slots, :, tiles, :, places] = codes
    codes, scales.values[slots, :, tiles, places] = encode(values, scales.code)
    cache.values[slots, :, tiles, :, places] = codes.view(*codes.shape[:2], -1, TILE_TOKENS)


def gather_context(
    cache: LayerCache, group: GroupTables, request: int, first_key: int, context_len: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions [first_key, context_len), [kv_heads, keys, head_dim] each. Those of codes are
    fp32.

    Nothing outside this range is returned, because a slot may hold anything there, NaN included.
    """
    first_block = first_key // group.block_tokens
    end_block = -(-context_len // group.block_tokens)
    slots = group.tables[request, first_block:end_block]
    base = first_block * group.block_tokens

    def seen(blocks: Tensor) -> Tensor:
        """Choose the positions from blocks [blocks, kv_heads, block_tokens, ...]."""
        return blocks.transpose(0, 1).flatten(1, 2)[:, first_key - base : context_len - base]

    # Not index_select: a layer's plane is strided, and index_select would first copy the whole pool.
    if cache.scales is None:
        return seen(cache.keys[slots]), seen(cache.values[slots])
    code = cache.scales.code
    keys = cache.keys[slots].transpose(3, 4).flatten(2, 3)
    values = cache.values[slots].transpose(3, 4).flatten(4, 5).flatten(2, 3)
    key_scales, value_scales = (part[slots].flatten(2, 3) for part in (cache.scales.keys, cache.scales.values))
    return decode(seen(keys), seen(key_scales), code), decode(seen(values), seen(value_scales), code)
