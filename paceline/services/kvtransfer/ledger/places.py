"""The places of sealed blocks in their contexts. A place tells the cache policy the other block without which this
block is useless.
"""

from __future__ import annotations

from paceline.core.cache_policy.ranking import Name, Place
from paceline.core.kv_layout import KVLayout


def place_of(
    layout: KVLayout, group: int, block: int, digest: bytes, before: bytes, priority: int = 0, tail: int | None = None
) -> Place:
    """Return the place of a sealed block.

    A block with full attention needs the block before it. A block with a window is read with few other blocks of its
    group, but needs the full attention of its context up to its end. If the model has no full attention, such a block
    needs no other block. Groups that divide the layers of one kind are always read together.

    Args:
        layout: the layout of KV or of encodings.
        group: index of the block's group in `layout`.
        block: index of the block in its block table.
        digest: hash of the block.
        before: hash of the block before it in its group; empty if there is none or it is unknown.
        priority: priority of the request; lower is more urgent.
        tail: number of context tokens up to the end of the block's content, if the block is not full.
    """
    end = (block + 1) * layout.groups[group].block_tokens if tail is None else tail
    if layout.groups[group].shape.window == 0:
        parent = (layout.first_group + group, before) if before else None
    else:
        parent = _full_attention(layout, end, digest, tail is not None)
    return Place(parent, end, priority, _partners(layout, group))


def _partners(layout: KVLayout, group: int) -> tuple[int, ...]:
    """Return the other groups whose blocks a request reads whenever it reads blocks of `group`."""
    block_group = layout.groups[group]
    return tuple(
        layout.first_group + index
        for index, other in enumerate(layout.groups)
        if index != group
        and other.block_tokens == block_group.block_tokens
        and other.shape.window == block_group.shape.window
        and other.shape.drafter == block_group.shape.drafter
    )


def _full_attention(layout: KVLayout, end: int, digest: bytes, is_tail: bool) -> Name | None:
    """Return the name of the full-attention block that ends after `end` tokens, or None.

    Blocks with the same end have the same hash, which names the context up to there.
    """
    full = [(group.block_tokens, index) for index, group in enumerate(layout.groups) if group.shape.window == 0]
    if not full:
        return None
    tokens, group = min(full)
    return (group, digest) if is_tail or end % tokens == 0 else None
