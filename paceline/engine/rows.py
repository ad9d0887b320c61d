"""What the device remembers of running requests, one row each.

A step's inputs are formed here from what the steps before it have left, so that it can be launched before the host
knows their results. On CPU the "device" is the thread that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import SamplingParams
from paceline.engine.sampler import Draft, takes_best
from paceline.engine.step import Chunk, Grown, Joined
from paceline.kernels.interface import AttentionBatch, GroupTables
from paceline.kernels.transfer import to_device

Indices = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Row:
    """What sampling needs to know of a row and never changes while it is taken."""

    sampling: SamplingParams
    prompt_len: int
    takes_best: bool

    def ends(self, token_id: int, length: int) -> bool:
        """Whether a token that makes the context `length` tokens long is its last."""
        return self.sampling.ends(token_id, length - self.prompt_len)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The ragged batch of one step."""

    token_ids: Tensor
    """int64 [tokens]"""
    positions: Tensor
    """int64 [tokens]"""
    starts: list[int]
    """[chunks]: position of each chunk's first token."""
    batch: AttentionBatch


class Rows:
    """The state of up to `count` requests.

    `token_ids` int32 [count, max_len] holds contexts, and behind each its drafts. int64 [count] are: `lengths` and
    `drafts`, how many tokens of either there are; `limits`, how long a context may grow; `capacities`, how many tokens
    have room in its blocks; `drafter_lengths`, for how many tokens a draft model has computed KV of its own.

    Args:
        max_len: tokens of the longest context.
        max_drafts: draft tokens behind it.
    """

    def __init__(self, count: int, max_len: int, max_drafts: int, layout: KVLayout, device: torch.device) -> None:
        self.token_ids = np.zeros((count, max_len + max_drafts), dtype=np.int32)
        self.lengths = np.zeros(count, dtype=np.int64)
        self.drafts = np.zeros(count, dtype=np.int64)
        self.limits = np.zeros(count, dtype=np.int64)
        self.capacities = np.zeros(count, dtype=np.int64)
        self.drafter_lengths = np.zeros(count, dtype=np.int64)
        self._rows: list[Row | None] = [None] * count
        self._drafts: list[Sequence[Draft]] = [()] * count
        self._layout = layout
        self._device = device
        self._tables = [np.zeros((count, group.blocks_for(max_len)), dtype=np.int64) for group in layout.groups]

    def update(self, updates: Sequence[Joined | Grown]) -> None:
        """Takes in what the host has told."""
        for update in updates:
            row = update.row
            if isinstance(update, Joined):
                self._rows[row] = Row(update.sampling, update.prompt_len, takes_best(update.sampling))
                self.token_ids[row, : len(update.token_ids)] = update.token_ids
                self.lengths[row], self.limits[row] = len(update.token_ids), update.limit
                self.drafts[row], self._drafts[row] = 0, ()
                self.drafter_lengths[row] = update.drafter_len
            for table, slots in zip(self._tables, update.tables):
                table[row, : len(slots)] = slots
            self.capacities[row] = update.capacity

    def form(self, chunks: Sequence[Chunk]) -> Inputs:
        """The inputs of a step. A row that has come to its end has no token in it."""
        rows = np.array([chunk.row for chunk in chunks])
        lengths = self.lengths[rows]
        follows = np.array([chunk.follows for chunk in chunks])
        left = self.limits[rows] - lengths  # 0 where the row has ended
        counts = np.array([chunk.length for chunk in chunks])
        counts = np.where(follows, np.minimum(1 + self.drafts[rows], np.minimum(counts, left)), counts)
        starts = np.where(follows, lengths - 1, np.array([chunk.start for chunk in chunks]))
        return self.span(rows, starts, starts + counts)

    def span(self, rows: Indices, starts: Indices, ends: Indices) -> Inputs:
        """Tokens [starts[i], ends[i]) of each row."""
        rows, starts, ends = np.asarray(rows), np.asarray(starts), np.asarray(ends)
        counts = ends - starts
        owner = np.repeat(np.arange(len(rows)), counts)
        query_end = np.cumsum(counts)
        positions = np.arange(len(owner)) + (ends - query_end)[owner]
        tokens = self.token_ids[rows[owner], positions].astype(np.int64)
        longest = int(ends.max(initial=0))
        groups = tuple(self._group(index, rows, owner, positions, longest) for index in range(len(self._tables)))
        batch = AttentionBatch((0, *query_end.tolist()), tuple(ends.tolist()), groups)
        return Inputs(self._to_device(tokens), self._to_device(positions), starts.tolist(), batch)

    def _group(
        self, index: int, rows: np.ndarray, owner: np.ndarray, positions: np.ndarray, longest: int
    ) -> GroupTables:
        group = self._layout.groups[index]
        tables = self._tables[index][rows, : group.blocks_for(longest)]
        return GroupTables(
            block_tokens=group.block_tokens,
            window=group.shape.window,
            tables=self._to_device(tables.astype(np.int32)),
            write_slots=self._to_device(tables[owner, positions // group.block_tokens]),
            write_offsets=self._to_device(positions % group.block_tokens),
        )

    def row(self, row: int) -> Row:
        fixed = self._rows[row]
        assert fixed is not None
        return fixed

    def context(self, row: int, length: int | None = None) -> np.ndarray:
        """int32 [length]: the row's first tokens, drafts included where `length` reaches into them; by default none."""
        return self.token_ids[row, : self.lengths[row] if length is None else length]

    def drafts_of(self, row: int) -> Sequence[Draft]:
        """What stands behind the context of a row."""
        return self._drafts[row][: self.drafts[row]]

    def room_for_drafts(self, row: int) -> int:
        """Tokens that may be drafted for a row: each takes a place in its blocks, and one token more must follow."""
        return max(0, int(min(self.capacities[row], self.limits[row] - 1) - self.lengths[row]))

    def append(self, row: int, token_ids: Sequence[int], ended: bool) -> None:
        """Tokens that were sampled for a row; the drafts behind its context are gone. A row that has ended stays so."""
        length = int(self.lengths[row])
        self.token_ids[row, length : length + len(token_ids)] = token_ids
        self.lengths[row] = length + len(token_ids)
        self.drafts[row], self._drafts[row] = 0, ()
        # What it computed for refused drafts counts no more.
        self.drafter_lengths[row] = min(self.drafter_lengths[row], self.lengths[row] - 1)
        if ended:
            self.limits[row] = self.lengths[row]

    def has_ended(self, row: int) -> bool:
        return bool(self.lengths[row] >= self.limits[row])

    def draft(self, row: int, drafts: Sequence[Draft]) -> None:
        """Proposes what may come behind the context of a row."""
        length = int(self.lengths[row])
        self.token_ids[row, length : length + len(drafts)] = [draft.token for draft in drafts]
        self.drafts[row] = len(drafts)
        self._drafts[row] = drafts

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)
