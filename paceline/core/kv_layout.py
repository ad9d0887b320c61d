"""The division of a model's KV cache into blocks. Pure arithmetic, no tensors.

A *group* is a set of layers whose caches have the same shape. A *block* is the KV of `block_tokens` tokens of all
layers of one group, contiguous in memory:

    [layers, 2 (keys, values), kv_heads, block_tokens, head_dim]

Layers that cache one latent vector for each token, which serves as key and value, have one plane instead of two.

Keys and values may be *coded* in 8 bits. Then sixteen tokens of one head and plane are a *tile*, and a block is

    [layers, 2 (keys, values), kv_heads, block_tokens / 16, tile]

A tile has 16 * head_dim codes, of keys as [head_dim, 16 tokens] and of values as [head_dim / 16, 16 tokens, 16], and
then one bf16 scale for each token. So kernels read codes in the order in which they multiply.

The layers of a *state group* are recurrent. Instead of keys and values, its blocks hold one state for each layer: the
state after one of the block's tokens, and the inputs of the computed tokens after it. A token reads the state after the
token before it, so a state group has a window of two tokens. Only models and kernels know more about states.

The output of an encoder is cached, too. A block of an *encoding* has one row for each token: [block_tokens, hidden].

All blocks are stored in *slots* of one size. A group with fewer bytes per token gets more tokens per block, so that it
fills its slots well. The rest of a slot is padding, so any combination of groups works. `kv_groups`
divides groups whose blocks would otherwise differ too much in length.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from paceline.core.errors import ConfigError, InvalidRequestError

BASE_TOKENS = 16
"""Number of tokens of the smallest block, and of one link of the hash chain."""

KV_FORMAT = 2
"""Version of the meaning of a block's bytes. A new version keeps old and new workers from sharing blocks."""

TILE_TOKENS = BASE_TOKENS
"""Number of tokens of a tile of coded keys or values, and of values side by side in it."""

KV_CACHE_PART = "--kv-cache-dtype"
"""Name of the part of a layout that says the code of keys and values, if there is one; see `KVLayout.parts`."""

SCALE_BYTES = 2
"""Bytes of the scale of one token's key or value in one head, if these are coded."""

NO_SLOT = 0xFFFFFFFF
"""The entry of a block table for a block that was released or was never needed."""

SLOT_ALIGNMENT = 4096
"""Alignment of slots in bytes, so that each slot begins on a page of memory."""

STATE_ITEMSIZE = 4
"""Bytes of one element of a state: fp32, whatever the dtype of the model."""

STATE_WINDOW = 2
"""Window of a state group in tokens: the token itself and the one before, whose state includes all earlier tokens."""

_MOST_TOKENS = 256
"""Largest number of tokens of a block. Prefixes are reused in whole blocks, so larger blocks would reuse too little."""

MOST_STATE_TOKENS = 512
"""Largest number of tokens of a block if the model has states. The size of a state does not depend on the number of
tokens of its block.
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of the cache that all layers of one group have."""

    name: str
    layers: tuple[int, ...]
    """Indices of the layers in the model, in their order in the block."""
    kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens: a query at position p sees keys at (p - window, p]. 0 means that it sees all keys up to
    p.
    """
    drafter: bool = False
    """Whether the layers are a draft model's, whose KV may have fewer tokens than the target model's."""
    state: tuple[tuple[int, ...], ...] = ()
    """Shapes of the parts of one layer's state, for a state group. Such a group has STATE_WINDOW and no heads. All
    parts but the first have rows, and one more row for each token that may be a draft; see `with_drafts`.
    """
    planes: int = 2
    """2 for keys and values; 1 for latent vectors, which serve as both."""
    readers: tuple[tuple[int, int], ...] = ()
    """(layer, source): layers without a cache of their own, and the layer of this group whose cache each one reads."""
    code: str = field(default="", repr=False)
    """Name of the 8-bit code of keys and values, such as "int8"; empty if they have the dtype of the model. It is not
    in the representation, because fingerprints of other caches must not change.
    """

    @property
    def elements_per_token(self) -> int:
        return len(self.layers) * self.planes * self.kv_heads * self.head_dim

    def row_bytes(self, itemsize: int, scales: bool = True) -> int:
        """Return the bytes of one token's key or value in one head.

        Args:
            itemsize: bytes of an element that is not coded.
            scales: whether to count the scale, if the row is coded.
        """
        return self.head_dim + SCALE_BYTES * scales if self.code else self.head_dim * itemsize

    def coded(self, code: str) -> GroupShape:
        """Return this shape with keys and values in an 8-bit code. States keep their dtype.

        Args:
            code: the name of the code; empty for none.

        Raises:
            ConfigError: the group has latent vectors, or heads that tiles cannot hold.
        """
        if not code or self.state:
            return self
        if self.planes == 1:
            raise ConfigError(f"--kv-cache-dtype {code} is not available for latent vectors (MLA); choose auto")
        if self.head_dim % TILE_TOKENS:
            raise ConfigError(
                f"--kv-cache-dtype {code} needs heads of a multiple of {TILE_TOKENS} numbers, and this model's have "
                f"{self.head_dim}; choose auto"
            )
        return replace(self, code=code)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers of the group; 0 if the group has keys and values."""
        return len(self.layers) * sum(map(math.prod, self.state)) * STATE_ITEMSIZE

    def of_drafter(self, first: int) -> GroupShape:
        """Return this shape for a draft model, whose layers are numbered after the target's `first` layers."""
        layers = tuple(first + layer for layer in self.layers)
        readers = tuple((first + layer, first + source) for layer, source in self.readers)
        return replace(self, name=f"draft-{self.name}", layers=layers, readers=readers, drafter=True)

    def divided(self, count: int) -> tuple[GroupShape, ...]:
        """Return `count` groups among which the layers of this group are divided evenly."""
        if count == 1:
            return (self,)
        bounds = [len(self.layers) * index // count for index in range(count + 1)]
        parts = [self.layers[begin:end] for begin, end in pairwise(bounds)]
        return tuple(self.part(f"{self.name}-{index}", layers) for index, layers in enumerate(parts))

    def part(self, name: str, layers: tuple[int, ...]) -> GroupShape:
        """Return the group of some of these layers, and of the layers that read their caches."""
        readers = tuple(pair for pair in self.readers if pair[1] in layers)
        return replace(self, name=name, layers=layers, readers=readers)

    def with_drafts(self, drafts: int) -> GroupShape:
        """Return this shape with states that can go back by `drafts` tokens, because their blocks keep the tokens'
        inputs.
        """
        first, rows = self.state[:1], self.state[1:]
        return replace(self, state=first + tuple((count + drafts, *row) for count, *row in rows))

    def block_bytes(self, tokens: int, itemsize: int, scales: bool = True) -> int:
        """Return the bytes of a block of `tokens` tokens. The other arguments are those of `row_bytes`."""
        rows = len(self.layers) * self.planes * self.kv_heads * tokens
        return self.state_bytes or rows * self.row_bytes(itemsize, scales)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A group of layers, and the size of its blocks."""

    shape: GroupShape
    block_tokens: int
    """Number of tokens of a full block: a multiple of BASE_TOKENS."""

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def first_needed_block(self, position: int) -> int:
        """Return the index of the first block that a query at `position` or later may still read."""
        if self.shape.window == 0:
            return 0
        return max(0, position - self.shape.window + 1) // self.block_tokens


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model, and the size of the slots for their blocks."""

    groups: tuple[KVGroup, ...]
    itemsize: int
    """Bytes of one cached element that is not coded."""
    slot_bytes: int
    fingerprint: str
    """A hash of everything that blocks depend on. Two workers may share blocks only if their fingerprints are equal."""
    encodings: KVLayout | None = None
    """Layout of the blocks of encodings, which are in the same slots and have one group; None if the model has no
    encoders.
    """
    parts: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Names and values of everything that the fingerprint covers besides shapes, such as files and their digests.
    Messages about two different fingerprints name the parts that differ.
    """
    first_group: int = 0
    """Number of the first group. Numbers are in the names of blocks, and the group of encodings has the last number."""

    def part(self, encoding: bool) -> KVLayout:
        """Return the layout of encodings if `encoding`, else of KV. Raises InvalidRequestError if the model has no
        encoders.
        """
        if not encoding:
            return self
        if self.encodings is None:
            raise InvalidRequestError("this model has no encoders, so there are no blocks of encodings")
        return self.encodings

    @property
    def all_groups(self) -> tuple[KVGroup, ...]:
        """The groups of KV, then the group of encodings if there is one, in the order of their numbers."""
        return self.groups if self.encodings is None else self.groups + self.encodings.groups

    @property
    def alignment(self) -> int:
        """Unit of reused prefixes in tokens: at a multiple of it, a block ends in every group."""
        return max(group.block_tokens for group in self.groups)

    @property
    def keeps_tails(self) -> bool:
        """Whether the ends of contexts are cached although they do not fill a block. True for models with states,
        because their blocks are long.
        """
        return any(group.shape.window == STATE_WINDOW for group in self.groups)

    @property
    def token_bytes(self) -> float:
        """Average memory in slots for one token of a context, in bytes, if no blocks before a window are dropped."""
        return sum(self.slot_bytes / group.block_tokens for group in self.groups)

    def slots_for(self, tokens: int) -> int:
        """Return the number of slots for a context of `tokens` tokens, if no blocks before a window are dropped."""
        return sum(group.blocks_for(tokens) for group in self.groups)

    def arena_slots_for(self, tokens: int) -> int:
        """Return the largest number of arena slots that a context of `tokens` tokens and its encodings can need.

        The encodings need the most slots if every token is a placeholder. No blocks before a window are dropped.
        """
        return sum(group.blocks_for(tokens) for group in self.all_groups)


def make_layout(
    shapes: tuple[GroupShape, ...], itemsize: int, identity: str, drafts: int = 0, encoding_size: int = 0
) -> KVLayout:
    """Choose the sizes of blocks and slots, and return the layout.

    Args:
        shapes: one for each group of the model; at least one.
        itemsize: bytes of one cached element that is not coded.
        identity: everything else that must be equal before workers may share blocks (model, dtype, version).
        drafts: largest number of draft tokens of a request in a step. It changes the layout only if there are states.
        encoding_size: elements of one row of an encoding; 0 if the model has no encoders.
    """
    if not shapes:
        raise ValueError("a model needs at least one KV group")
    shapes = tuple(shape.with_drafts(drafts) for shape in shapes)
    # Without scales: with them, a block of smaller heads would often be a little too large for twice as many tokens.
    base_bytes = [shape.block_bytes(BASE_TOKENS, itemsize, scales=False) for shape in shapes]
    # A link of a chain covers BASE_TOKENS tokens, so a slot has room for as many rows of an encoding.
    row_bytes = encoding_size * itemsize
    largest = max(*base_bytes, row_bytes * BASE_TOKENS)
    states = sum(bool(shape.state) for shape in shapes)
    most = MOST_STATE_TOKENS if states else _MOST_TOKENS
    # Powers of two, so that the end of the largest block is also the end of a block in every other group.
    tokens = [
        0 if shape.state else min(most, BASE_TOKENS * _floor_power_of_two(largest // size))
        for shape, size in zip(shapes, base_bytes)
    ]
    state_tokens = _state_tokens([count for count in tokens if count], states)
    groups = tuple(KVGroup(shape, count or state_tokens) for shape, count in zip(shapes, tokens))
    largest = max(largest, *(group.shape.block_bytes(group.block_tokens, itemsize) for group in groups))
    slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    if not encoding_size:  # the rest must not change the fingerprints of other models: caches outlive a release
        return KVLayout(groups, itemsize, slot_bytes, _fingerprint(identity, itemsize, slot_bytes, groups))
    # As many rows as fit. The number need not match the blocks of KV, because an encoding is a context of its own.
    rows = slot_bytes // (row_bytes * BASE_TOKENS) * BASE_TOKENS
    group = KVGroup(GroupShape("encoding", (0,), kv_heads=1, head_dim=encoding_size, planes=1), rows)
    fingerprint = _fingerprint(identity, itemsize, slot_bytes, (*groups, group))
    encodings = KVLayout((group,), itemsize, slot_bytes, fingerprint, first_group=len(groups))
    return KVLayout(groups, itemsize, slot_bytes, fingerprint, encodings)


def _fingerprint(identity: str, itemsize: int, slot_bytes: int, groups: tuple[KVGroup, ...]) -> str:
    text = repr((KV_FORMAT, identity, itemsize, slot_bytes, groups))
    codes = [group.shape.code for group in groups]
    if any(codes):
        text += repr(codes)
    return hashlib.sha256(text.encode()).hexdigest()


def slots_tail_first(groups: Sequence[KVGroup], tables: Sequence[Sequence[int]]) -> list[int]:
    """Return all slots in block tables, from the end of the context to its beginning, so that children come before
    parents.
    """
    placed = [
        (index * group.block_tokens, slot)
        for group, table in zip(groups, tables)
        for index, slot in enumerate(table)
        if slot != NO_SLOT
    ]
    placed.sort(reverse=True)
    return [slot for _, slot in placed]


def _state_tokens(kv_tokens: Sequence[int], states: int) -> int:
    """Return the tokens of a state group's block.

    The number is chosen so that states take no more slots than keys and values, but is at most MOST_STATE_TOKENS.

    Args:
        kv_tokens: tokens of a block, for each group with keys and values.
        states: number of state groups.
    """
    slots_per_token = sum(1 / tokens for tokens in kv_tokens)
    tokens = max(kv_tokens, default=MOST_STATE_TOKENS)
    while tokens < MOST_STATE_TOKENS and states / tokens > slots_per_token:
        tokens *= 2
    return tokens


def _floor_power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1)
