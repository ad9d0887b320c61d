"""How the KV cache of a model is cut into blocks. Pure arithmetic, no tensors.

A *group* is a set of layers whose cache has one shape. A *block* is `block_tokens` tokens of all layers of one group,
contiguous in memory:

    [layers, 2 (keys, values), kv_heads, block_tokens, head_dim]

A block of a *state group*, whose layers are recurrent, holds one state a layer instead: that behind the last of the
block's tokens that was computed. A token reads the state behind the token before it, so these are groups with a window
of two tokens, and nobody but models and kernels has to know more of them.

All blocks live in *slots* of one size. A group whose tokens are small gets blocks of more tokens, so that slots are
well filled; what remains is padding, so that no combination of groups is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

BASE_TOKENS = 16
"""Tokens of the smallest block, and of one link of the hash chain."""

KV_FORMAT = 1
"""Grows when the meaning of a block's bytes changes, so that old and new workers share nothing."""

NO_SLOT = 0xFFFFFFFF
"""Stands in a block table where a block was given back or never needed."""

SLOT_ALIGNMENT = 4096
"""Bytes: slots begin on pages."""

STATE_ITEMSIZE = 4
"""Bytes of one element of a state: fp32, whatever the dtype of the model."""

STATE_WINDOW = 2
"""A token sees itself and the token before it, whose state stands for all before."""

_MOST_TOKENS = 256
"""Of a block: with more, reuse would be too coarse."""

_MOST_STATE_TOKENS = 512
"""Of a block where there are states, which are large however few tokens they stand for."""

_MOST_STATE_GROUPS = 32


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
    state: tuple[tuple[int, ...], ...] = ()
    """Of recurrent layers: the shapes of the parts of one layer's state. They have STATE_WINDOW and no heads."""
    readers: tuple[tuple[int, int], ...] = ()
    """(layer, source): layers without a cache of their own, which read that of another one in this group."""

    @property
    def elements_per_token(self) -> int:
        return len(self.layers) * 2 * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Of the states of all layers; 0 where there are keys and values."""
        return len(self.layers) * sum(map(math.prod, self.state)) * STATE_ITEMSIZE

    def of_drafter(self, first: int) -> GroupShape:
        """The same of a draft model whose layers come behind `first` of the target's."""
        layers = tuple(first + layer for layer in self.layers)
        readers = tuple((first + layer, first + source) for layer, source in self.readers)
        return replace(self, name=f"draft-{self.name}", layers=layers, readers=readers, drafter=True)

    def block_bytes(self, tokens: int, itemsize: int) -> int:
        """What a block of so many tokens takes."""
        return self.state_bytes or self.elements_per_token * tokens * itemsize


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
    base_bytes = [shape.block_bytes(BASE_TOKENS, itemsize) for shape in shapes]
    largest = max(base_bytes)
    states = sum(bool(shape.state) for shape in shapes)
    most = _MOST_STATE_TOKENS if states else _MOST_TOKENS
    # Powers of two, so that block boundaries of all groups meet at the largest block.
    tokens = [
        0 if shape.state else min(most, BASE_TOKENS * _floor_power_of_two(largest // size))
        for shape, size in zip(shapes, base_bytes)
    ]
    state_tokens = _state_tokens([count for count in tokens if count], states)
    groups = tuple(KVGroup(shape, count or state_tokens) for shape, count in zip(shapes, tokens))
    slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    described = repr((KV_FORMAT, identity, itemsize, slot_bytes, groups))
    return KVLayout(groups, itemsize, slot_bytes, hashlib.sha256(described.encode()).hexdigest())


def slots_tail_first(groups: Sequence[KVGroup], tables: Sequence[Sequence[int]]) -> list[int]:
    """All slots of block tables, those at the end of the context first: children before their parents."""
    placed = [
        (index * group.block_tokens, slot)
        for group, table in zip(groups, tables)
        for index, slot in enumerate(table)
        if slot != NO_SLOT
    ]
    placed.sort(reverse=True)
    return [slot for _, slot in placed]


def _state_tokens(kv_tokens: Sequence[int], states: int) -> int:
    """Tokens of a state's block: so many that states take no more slots than keys and values, where that can be."""
    slots_per_token = sum(1 / tokens for tokens in kv_tokens)
    tokens = max(kv_tokens, default=_MOST_STATE_TOKENS)
    while tokens < _MOST_STATE_TOKENS and states / tokens > slots_per_token:
        tokens *= 2
    return tokens


def state_groups(
    name: str, layers: Sequence[int], state: tuple[tuple[int, ...], ...], others: Sequence[GroupShape]
) -> tuple[GroupShape, ...]:
    """Groups for recurrent layers, so few of them in each that slots are not much larger than `others` can fill.

    Args:
        state: shapes of the parts of one layer's state.
        others: the groups with keys and values of the same model.
    """
    layer_bytes = sum(map(math.prod, state)) * STATE_ITEMSIZE
    # As if they were cached in 16 bits, which is not known here and does not matter much.
    room = max((shape.block_bytes(_MOST_STATE_TOKENS, 2) for shape in others), default=0)
    fit = max(1, room // layer_bytes) if others else len(layers)
    count = min(-(-len(layers) // fit), _MOST_STATE_GROUPS)
    bounds = [len(layers) * index // count for index in range(count + 1)]
    return tuple(
        GroupShape(f"{name}-{index}", tuple(layers[begin:end]), 0, 0, STATE_WINDOW, state=state)
        for index, (begin, end) in enumerate(pairwise(bounds))
    )


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)
