"""The ragged batch of a step, as kernels see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Block tables and write positions of a step in one KV group."""

    block_tokens: int
    window: int
    """Number of tokens to which a query attends, itself included; 0 for all tokens before it."""
    tables: Tensor
    """int32 [requests, blocks]: slot of each block. Entries outside [first needed, context_len) are arbitrary."""
    write_slots: Tensor
    """int64 [tokens]: slot to which each token of the step is written."""
    write_offsets: Tensor
    """int64 [tokens]: the token's position inside the block."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The ragged batch of one step: `requests` contexts, whose last few tokens are the queries.

    Tokens of a request are consecutive, in order of position. The KV of the queries is stored before attention runs.
    """

    query_start: tuple[int, ...]
    """[requests + 1]: tokens [query_start[r], query_start[r + 1]) belong to request r."""
    context_len: tuple[int, ...]
    """[requests]: number of tokens of each context, queries included."""
    groups: tuple[GroupTables, ...]
    final_len: tuple[int, ...] = field(default=(), kw_only=True)
    """[requests]: number of final tokens at the front of each context; empty if all queries are final. Tokens after the
    final ones are drafts, which a later step may take back, or tokens that a later step computes again. Only layers
    with a state read this.
    """
    last_keys: Tensor | None = field(default=None, kw_only=True)
    """int64 [tokens], on the device of the tables: position of the last key that each query sees in attention that
    looks ahead. It never decreases within a request, and is below `context_len`. None if each query sees no key after
    its own."""
    adapters: Tensor | None = field(default=None, kw_only=True)
    """int64 [tokens], on the device of the tables: slot of the adapter of each token's linear layers, -1 for none. None
    if no token has an adapter."""

    def final_lengths(self) -> tuple[int, ...]:
        """Return the number of final tokens of each request, [requests]: `final_len`, or `context_len` if `final_len`
        is empty.
        """
        return self.final_len or self.context_len

    def from_group(self, first: int) -> AttentionBatch:
        """Return the same batch with only the groups from `first` on, for a model whose first group has this index."""
        return self if first == 0 else replace(self, groups=self.groups[first:])
