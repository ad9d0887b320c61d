"""How the KV cache of a model is cut into blocks. Pure arithmetic, no tensors.

A *group* is a set of layers whose cache has one shape. A *block* is `block_tokens` tokens of all layers of one group,
contiguous in memory:

    [layers, 2 (keys, values), kv_heads, block_tokens, head_dim]

All blocks live in *slots* of one size. A group whose tokens are small gets blocks of more tokens, so that slots are
well filled; what remains is padding, so that no combination of groups is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

BASE_TOKENS = 16
"""Tokens of the smallest block, and of one link of the hash chain."""

KV_FORMAT = 1
"""Grows when the meaning of a block's bytes changes, so that old and new workers share nothing."""

NO_SLOT = 0xFFFFFFFF
"""Stands in a block table where a block was given back or never needed."""

SLOT_ALIGNMENT = 4096
"""Bytes: slots begin on pages."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The cache shape that the layers of one group share."""

    name: str
    layers: tuple[int, ...]
    """Indices of the model's layers, in the order of their place in the block."""
    kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens: a query at position p sees keys in (p - window, p]. 0 sees all."""
    drafter: bool = False
    """Whether these are layers of a draft model, which may lag behind the target."""

    @property
    def elements_per_token(self) -> int:
        return len(self.layers) * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A group and the size of its blocks."""

    shape: GroupShape
    block_tokens: int
    """A multiple of BASE_TOKENS."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def first_needed_block(self, position: int) -> int:
        """Index of the first block that a query at `position` or behind it may still read."""
        if self.shape.window == 0:
            return 0
        return max(0, position - self.shape.window + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model in slots of one size."""

    groups: tuple[KVGroup, ...]
    itemsize: int
    """Bytes of one cached element."""
    slot_bytes: int
    fingerprint: str
    """Two workers may share blocks only where this is equal."""

    @property
    def alignment(self) -> int:
        """A reused prefix is a multiple of this many tokens, so that it ends on a block of every group."""
        return max(group.block_tokens for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Of slots that one token more takes, while nothing is trimmed."""
        return sum(self.slot_bytes / group.block_tokens for group in self.groups)

    def slots_for(self, tokens: int) -> int:
        """Slots that a context of `tokens` tokens takes while nothing was trimmed."""
        return sum(group.blocks_for(tokens) for group in self.groups)


def make_layout(shapes: tuple[GroupShape, ...], itemsize: int, identity: str) -> KVLayout:
    """Chooses block and slot sizes.

    Args:
        shapes: one for each group of the model; at least one.
        itemsize: bytes of one cached element.
        identity: whatever else must agree before blocks may be shared (model, dtype, version).
    """
    if not shapes:
        raise ValueError("a model needs at least one KV group")
    base_bytes = [shape.elements_per_token * itemsize * BASE_TOKENS for shape in shapes]
    largest = max(base_bytes)
    # Powers of two, so that block boundaries of all groups meet at the largest block.
    groups = tuple(
        KVGroup(shape, BASE_TOKENS * _floor_power_of_two(largest // size)) for shape, size in zip(shapes, base_bytes)
    )
    slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    described = repr((KV_FORMAT, identity, itemsize, slot_bytes, groups))
    return KVLayout(groups, itemsize, slot_bytes, hashlib.sha256(described.encode()).hexdigest())


def slots_tail_first(groups: Sequence[KVGroup], tables: Sequence[Sequence[int]]) -> list[int]:
    """All slots of block tables, those at the end of the context first: so given back, no block is evicted after its
    parent."""
    placed = [
        (index * group.block_tokens, slot)
        for group, table in zip(groups, tables)
        for index, slot in enumerate(table)
        if slot != NO_SLOT
    ]
    placed.sort(reverse=True)
    return [slot for _, slot in placed]


def _floor_power_of_two(n: int) -> int:
    # 16 at most: a block of more than 256 tokens would make reuse too coarse.
    return min(16, 1 << (n.bit_length() - 1))
