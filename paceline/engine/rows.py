"""What the device remembers of running requests, one row each.

A step's inputs are formed here from what the steps before it have left, so that it can be launched before the host knows
their results. On CPU the "device" is the thread that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import SamplingParams
from paceline.engine.step import Chunk, Grown, Joined
from paceline.kernels.interface import AttentionBatch, GroupTables


@dataclass(slots=True)
class Row:
    """What sampling needs to know of a row and never changes while it is taken."""

    sampling: SamplingParams
    prompt_len: int


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

    `token_ids` int32 [count, max_len] holds contexts, and behind each its drafts; `lengths` and `drafts` int64 [count]
    say how many tokens of either there are; `limits` how long a context may grow.

    Args:
        max_len: tokens of the longest context.
        max_drafts: draft tokens behind it.
    """

    def __init__(self, count: int, max_len: int, max_drafts: int, layout: KVLayout, device: torch.device) -> None:
        self.token_ids = np.zeros((count, max_len + max_drafts), dtype=np.int32)
        self.lengths = np.zeros(count, dtype=np.int64)
        self.drafts = np.zeros(count, dtype=np.int64)
        self.limits = np.zeros(count, dtype=np.int64)
        self.rows: list[Row | None] = [None] * count
        self._layout = layout
        self._device = device
        self._tables = [np.zeros((count, group.blocks_for(max_len)), dtype=np.int64) for group in layout.groups]

    def update(self, updates: Sequence[Joined | Grown]) -> None:
        """Takes in what the host has told."""
        for update in updates:
            row = update.row
            if isinstance(update, Grown):
                end = update.first_block + len(update.slots)
                self._tables[update.group][row, update.first_block : end] = update.slots
                continue
            self.rows[row] = Row(update.sampling, update.prompt_len)
            self.token_ids[row, : len(update.token_ids)] = update.token_ids
            self.lengths[row], self.drafts[row], self.limits[row] = len(update.token_ids), 0, update.limit
            for table, slots in zip(self._tables, update.tables):
                table[row, : len(slots)] = slots

    def form(self, chunks: Sequence[Chunk]) -> Inputs:
        """The inputs of a step. A row that has come to its end has no token in it."""
        rows = np.array([chunk.row for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.length for chunk in chunks])
        follows = np.array([chunk.follows for chunk in chunks])
        lengths = self.lengths[rows]
        left = self.limits[rows] - lengths  # 0 where the row has ended
        starts = np.where(follows, lengths - 1, starts)
        counts = np.where(follows, np.minimum(1 + self.drafts[rows], np.minimum(counts, left)), counts)
        owner = np.repeat(np.arange(len(chunks)), counts)
        ends = np.cumsum(counts)
        positions = np.arange(len(owner)) - (ends - counts)[owner] + starts[owner]
        tokens = self.token_ids[rows[owner], positions].astype(np.int64)
        groups = tuple(self._group(index, rows, owner, positions) for index in range(len(self._tables)))
        batch = AttentionBatch((0, *ends.tolist()), tuple((starts + counts).tolist()), groups)
        return Inputs(self._to_device(tokens), self._to_device(positions), starts.tolist(), batch)

    def _group(self, index: int, rows: np.ndarray, owner: np.ndarray, positions: np.ndarray) -> GroupTables:
        group = self._layout.groups[index]
        tables = self._tables[index][rows]
        return GroupTables(
            block_tokens=group.block_tokens,
            window=group.shape.window,
            tables=self._to_device(tables.astype(np.int32)),
            write_slots=self._to_device(tables[owner, positions // group.block_tokens]),
            write_offsets=self._to_device(positions % group.block_tokens),
        )

    def context(self, row: int, length: int) -> np.ndarray:
        """int32 [length]: the row's first tokens, drafts included where `length` reaches into them."""
        return self.token_ids[row, :length]

    def append(self, row: int, token_ids: Sequence[int], ended: bool) -> None:
        """Tokens that were sampled for a row; the drafts behind its context are gone. A row that has ended stays so."""
        length = int(self.lengths[row])
        self.token_ids[row, length : length + len(token_ids)] = token_ids
        self.lengths[row] = length + len(token_ids)
        self.drafts[row] = 0
        if ended:
            self.limits[row] = self.lengths[row]

    def draft(self, row: int, token_ids: Sequence[int]) -> None:
        """Proposes what may come behind the context of a row."""
        length = int(self.lengths[row])
        self.token_ids[row, length : length + len(token_ids)] = token_ids
        self.drafts[row] = len(token_ids)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
