"""Search for the longest prefix of a context whose blocks are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.context import full_block_names
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVGroup, KVLayout

Find = Callable[[int, bytes], int | None]
"""A function from (group number, hash) to the slot of the block with this name; None if no such block is cached."""


def match_prefix(layout: KVLayout, find: Find, links: Sequence[bytes], max_tokens: int) -> tuple[int, list[list[int]]]:
    """Return the longest prefix that can be reused.

    It ends on a block boundary of every group. For groups with full attention, all of its blocks are cached. For groups
    with a window, the blocks that a query after the prefix still reads are cached.

    Args:
        layout: the layout of KV or of encodings.
        links: the links of the context.
        max_tokens: the most tokens to reuse.

    Returns:
        The length in tokens, and a block table for each group, with NO_SLOT before the window.
    """
    align = layout.alignment
    length = min(max_tokens, len(links) * BASE_TOKENS) // align * align
    found: dict[int, list[int | None]] = {}
    # Groups with full attention first, because their first missing block limits the prefix for all groups.
    for index, group in sorted(enumerate(layout.groups), key=lambda entry: entry[1].shape.window > 0):
        slots = found[index] = []
        for digest in full_block_names(group, links, length):
            slot = find(layout.first_group + index, digest)
            if slot is None and group.shape.window == 0:
                length = len(slots) * group.block_tokens // align * align
                break
            slots.append(slot)

    def missing(index: int, group: KVGroup) -> bool:
        return None in found[index][group.first_needed_block(length) : length // group.block_tokens]

    while length > 0 and any(missing(index, group) for index, group in enumerate(layout.groups)):
        length -= align
    return length, [_table(group, found[index], length) for index, group in enumerate(layout.groups)]


def lacking_links(layout: KVLayout, find: Find, links: Sequence[bytes]) -> Sequence[bytes]:
    """Return the links from the end of the longest cached prefix to the end of the longest one that could be reused."""
    most = len(links) * BASE_TOKENS // layout.alignment * layout.alignment
    length, _ = match_prefix(layout, find, links, most)
    return links[length // BASE_TOKENS : most // BASE_TOKENS]


def _table(group: KVGroup, found: Sequence[int | None], length: int) -> list[int]:
    needed = group.first_needed_block(length)
    return [
        slot if slot is not None and index >= needed else NO_SLOT
        for index, slot in enumerate(found[: length // group.block_tokens])
    ]
