"""The block tables of leases, the places of their blocks in contexts, and checks that the pool has enough blocks. Pure.

A place tells the cache policy the other block without which a block is useless.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.block_pool import BlockPool
from paceline.core.cache_policy.ranking import Name, Place
from paceline.core.context import HASH_BYTES
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.services.kvtransfer.ledger.lease import Lease


def table_of(lease: Lease, group: int) -> list[int]:
    """Return the block table of a group. Raises InvalidRequestError if there is no such group."""
    if not 0 <= group < len(lease.tables):
        raise InvalidRequestError(f"there is no group {group}; the layout has {len(lease.tables)}")
    return lease.tables[group]


def names_of(pool: BlockPool, table: Sequence[int]) -> list[bytes]:
    """Return the hash of each block of a table; b"" for a block that is not sealed."""
    found = [None if slot == NO_SLOT else pool.name(slot) for slot in table]
    return [b"" if name is None else name[1] for name in found]


def slots_to_seal(
    pool: BlockPool, lease: Lease, group: int, first_block: int, hashes: Sequence[bytes]
) -> tuple[list[int], bytes]:
    """Return the slots of the blocks to seal, and the hash of the block before them; b"" if this block has no hash or
    does not exist.

    Raises InvalidRequestError if a block does not belong to the lease, or already has another hash.
    """
    table = table_of(lease, group)
    check_hashes(hashes)
    if first_block + len(hashes) > len(table):
        raise InvalidRequestError(
            f"lease {lease.key} has {len(table)} blocks in group {group}: "
            f"[{first_block}, {first_block + len(hashes)}) cannot be sealed"
        )
    slots = table[first_block : first_block + len(hashes)]
    for block, (slot, digest) in enumerate(zip(slots, hashes), first_block):
        if slot == NO_SLOT:
            raise InvalidRequestError(f"lease {lease.key} has given back block {block} of group {group}")
        if pool.name(slot) not in (None, (lease.layout.first_group + group, digest)):
            raise InvalidRequestError(f"lease {lease.key}: block {block} of group {group} is sealed with another hash")
    return slots, name_before(pool, lease, group, first_block)


def name_before(pool: BlockPool, lease: Lease, group: int, block: int) -> bytes:
    """Return the hash of the block before a block of a lease; b"" if there is none or it is not sealed."""
    (before,) = names_of(pool, lease.tables[group][block - 1 : block]) or [b""] if block else [b""]
    return before


def partial_blocks(layout: KVLayout, tables: Sequence[Sequence[int]], length: int) -> list[int]:
    """Return the slots of the blocks that the first `length` tokens of a context fill only in part."""
    return [table[-1] for group, table in zip(layout.groups, tables) if length % group.block_tokens]


def missing_blocks(layout: KVLayout, tables: Sequence[Sequence[int]], token_count: int) -> list[int]:
    """Return, for each group, the number of blocks that its table lacks to cover `token_count` tokens."""
    return [max(0, group.blocks_for(token_count) - len(table)) for group, table in zip(layout.groups, tables)]


def grow(pool: BlockPool, tables: Sequence[list[int]], missing: Sequence[int]) -> list[int]:
    """Append `missing` new blocks to each table and return all new slots. That many blocks must be available."""
    fresh = pool.take(sum(missing))
    start = 0
    for table, count in zip(tables, missing):
        table += fresh[start : start + count]
        start += count
    return fresh


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raise InvalidRequestError if a hash does not have HASH_BYTES bytes."""
    if any(len(digest) != HASH_BYTES for digest in hashes):
        raise InvalidRequestError(f"a hash must have {HASH_BYTES} bytes")


def check_available(pool: BlockPool, needed: int, reusing: Sequence[int] = ()) -> None:
    """Raise BusyError if fewer than `needed` blocks are available now without evicting the blocks in `reusing`."""
    available = pool.available(reusing)
    if needed > available:
        raise BusyError(f"{needed} blocks are needed and {available} are available; try again when requests have ended")


def check_fits(pool: BlockPool, slots: int, token_count: int) -> None:
    """Raise InvalidRequestError if even the whole arena has fewer than `slots` blocks."""
    total = pool.counts().total
    if slots > total:
        raise InvalidRequestError(
            f"{token_count} tokens take {slots} blocks and the arena has {total}: "
            "shorten the request or raise --kv-memory"
        )


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
