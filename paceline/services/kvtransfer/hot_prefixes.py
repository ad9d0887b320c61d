"""The cached prefixes of a host that are worth most to other hosts when this host leaves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from paceline.core.cache_policy.ranking import Block, Name
from paceline.core.context import HASH_BYTES
from paceline.core.kv_layout import BASE_TOKENS, KVLayout

_NO_BLOCK_ENDS_HERE = bytes(HASH_BYTES)


def hot_prefixes(
    blocks: Iterable[Block], layout: KVLayout, elsewhere: Collection[Name], most_blocks: int
) -> list[list[bytes]]:
    """Return hash chains of prefixes, the hottest first. A prefix is left out if another chain begins with it.

    A block is hotter than another one if more requests have found it, or equally many requests but more recently. A
    model without full attention has no chains, because a block with a window does not name the block before it.

    Args:
        blocks: the reusable blocks of the host.
        elsewhere: names of the blocks that another host has.
        most_blocks: approximate limit on the blocks in the chains that no other host has.

    Returns:
        One hash for each BASE_TOKENS tokens of each prefix. If blocks have more tokens, the links at which no block
        ends are zeros.
    """
    full = [(group.block_tokens, index) for index, group in enumerate(layout.groups) if group.shape.window == 0]
    if not full:
        return []
    tokens, group = min(full)
    known_blocks = {block.name: block for block in blocks if block.name[0] == group}
    chosen: dict[Name, None] = {}
    for block in sorted(known_blocks.values(), key=lambda block: (block.touches, block.used), reverse=True):
        if len(chosen) >= most_blocks:
            break
        if block.name not in elsewhere and (path := _path(known_blocks, block, chosen)) is not None:
            chosen |= dict.fromkeys(path)
    inner = {known_blocks[name].parent for name in chosen}
    filler = [_NO_BLOCK_ENDS_HERE] * (tokens // BASE_TOKENS - 1)
    return [
        [
            link
            for _, digest in reversed(_path(known_blocks, known_blocks[name], {}) or [])
            for link in (*filler, digest)
        ]
        for name in chosen
        if name not in inner
    ]


def _path(known_blocks: Mapping[Name, Block], block: Block, known: Collection[Name]) -> list[Name] | None:
    """Return the names of the block and of the blocks before it, back to the first block or to a known one.

    Returns None if one of them is missing. Then no request can use the block.
    """
    path = [block.name]
    while (parent := block.parent) is not None and parent not in known:
        if (before := known_blocks.get(parent)) is None:
            return None
        path.append(parent)
        block = before
    return path
