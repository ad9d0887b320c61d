"""Which cached block needs which."""

from __future__ import annotations

from paceline.core.cache_policy.base import Name, Place
from paceline.core.kv_layout import KVLayout


def place_of(layout: KVLayout, group: int, block: int, digest: bytes, before: bytes, priority: int = 0) -> Place:
    """Where a sealed block stands.

    One of full attention needs the block before it. One with a window is read with few others of its group, but never
    without full attention up to its end; a model that has none needs nothing else for it.

    Args:
        digest: the block's hash.
        before: that of the block before it in its group; empty where there is none, or it is not known.
        priority: of the request.
    """
    tokens = layout.groups[group].block_tokens
    end = (block + 1) * tokens
    if layout.groups[group].shape.window == 0:
        parent = (group, before) if before else None
    else:
        parent = _full_attention(layout, end, digest)
    return Place(parent, end, priority)


def _full_attention(layout: KVLayout, end: int, digest: bytes) -> Name | None:
    """The block of full attention with this end: the chain up to there gives it the same hash."""
    full = [(group.block_tokens, index) for index, group in enumerate(layout.groups) if group.shape.window == 0]
    if not full:
        return None
    tokens, group = min(full)
    return (group, digest) if end % tokens == 0 else None
