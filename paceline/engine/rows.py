"""What the device remembers of running requests, one row each.

A step's inputs are formed here from what the steps before it have left, so that it can be launched before the host
knows their results. On CPU the "device" is the thread that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import SamplingParams
from paceline.engine.sampler import Draft, takes_best
from paceline.engine.step import Chunk, RowAssigned, RowExtended
from paceline.kernels.interface import AttentionBatch, GroupTables
from paceline.kernels.transfer import to_device

Span = tuple[int, int, int]
"""A row, and the first and last + 1 of some of its tokens."""

_SIZES = 32
"""Of steps whose vectors are kept. Making a tensor takes longer than filling it."""


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

    `token_ids` int32 [count, max_len] holds contexts, and behind each its drafts. Lists of `count` numbers are:
    `lengths` and `drafts`, how many tokens of either there are; `limits`, how long a context may grow; `capacities`,
    how many tokens have room in its blocks; `drafter_lengths`, for how many tokens a draft model has computed KV.

    Between two steps the caches hold weights, and every function that was not called lately is far away. So inputs are
    formed with few of them: plain numbers in lists, and slices of arrays.

    Args:
        max_len: tokens of the longest context.
        max_drafts: draft tokens behind it.
    """

    def __init__(self, count: int, max_len: int, max_drafts: int, layout: KVLayout, device: torch.device) -> None:
        self.token_ids = np.zeros((count, max_len + max_drafts), dtype=np.int32)
        self.lengths = [0] * count
        self.drafts = [0] * count
        self.limits = [0] * count
        self.capacities = [0] * count
        self.drafter_lengths = [0] * count
        self._rows: list[Row | None] = [None] * count
        self._drafts: list[Sequence[Draft]] = [()] * count
        self._layout = layout
        self._device = device
        self._on_host = device.type == "cpu"
        self._tables = [np.zeros((count, group.blocks_for(max_len)), dtype=np.uint32) for group in layout.groups]
        self._gathered: dict[tuple[object, ...], Tensor] = {}
        self._positions = np.arange(max_len + max_drafts)
        self._places = [np.divmod(self._positions, group.block_tokens) for group in layout.groups]
        self._vectors = lru_cache(_SIZES)(self._make_vectors)

    def update(self, updates: Sequence[RowAssigned | RowExtended]) -> None:
        """Apply changes of rows, in order."""
        for update in updates:
            row = update.row
            if isinstance(update, RowAssigned):
                self._rows[row] = Row(update.sampling, update.prompt_len, takes_best(update.sampling))
                self.token_ids[row, : len(update.token_ids)] = update.token_ids
                self.lengths[row], self.limits[row] = len(update.token_ids), update.limit
                self.drafts[row], self._drafts[row] = 0, ()
                self.drafter_lengths[row] = update.drafter_len
            for table, slots in zip(self._tables, update.tables):
                table[row, : len(slots)] = slots
            self.capacities[row] = update.capacity
            self._gathered.clear()

    def form(self, chunks: Sequence[Chunk]) -> Inputs:
        """The inputs of a step. A row that has come to its end has no token in it."""
        spans: list[Span] = []
        for chunk in chunks:
            row, start, count = chunk.row, chunk.start, chunk.length
            if chunk.follows:
                length = self.lengths[row]
                start, count = length - 1, min(count, 1 + self.drafts[row], self.limits[row] - length)
            spans.append((row, start, start + count))
        return self.span(spans)

    def span(self, spans: Sequence[Span]) -> Inputs:
        """These tokens, which hold until the next inputs are formed."""
        arrays, tensors = self._vectors(sum([end - start for _, start, end in spans]))
        tokens, positions, *placed = arrays
        begin, query_start = 0, [0]
        for row, start, end in spans:
            own = slice(begin, begin := begin + end - start)
            query_start.append(begin)
            tokens[own] = self.token_ids[row, start:end]
            positions[own] = self._positions[start:end]
            for index, table in enumerate(self._tables):
                blocks, offsets = self._places[index]
                placed[2 * index][own] = table[row, blocks[start:end]]
                placed[2 * index + 1][own] = offsets[start:end]
        if not self._on_host:
            tensors = [to_device(tensor, self._device) for tensor in tensors]
        groups = [
            GroupTables(
                group.block_tokens,
                group.shape.window,
                tables=self._gather(index, spans),
                write_slots=tensors[2 + 2 * index],
                write_offsets=tensors[3 + 2 * index],
            )
            for index, group in enumerate(self._layout.groups)
        ]
        batch = AttentionBatch(tuple(query_start), tuple([end for _, _, end in spans]), tuple(groups))
        return Inputs(tensors[0], tensors[1], [start for _, start, _ in spans], batch)

    def _gather(self, index: int, spans: Sequence[Span]) -> Tensor:
        """The tables of a group, one a span, as far as they are needed; as before where nothing has changed."""
        rows = [row for row, _, _ in spans]
        blocks = self._layout.groups[index].blocks_for(max((end for _, _, end in spans), default=0))
        key = (index, blocks, *rows)
        if key not in self._gathered:
            tables = self._tables[index][rows, :blocks].view(np.int32)  # as the kernels have them: NO_SLOT is -1
            self._gathered[key] = to_device(torch.from_numpy(tables), self._device)
        return self._gathered[key]

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
        return max(0, min(self.capacities[row], self.limits[row] - 1) - self.lengths[row])

    def append(self, row: int, token_ids: Sequence[int], ended: bool) -> None:
        """Tokens that were sampled for a row; the drafts behind its context are gone. A row that has ended stays so."""
        length = self.lengths[row]
        self.token_ids[row, length : length + len(token_ids)] = token_ids
        self.lengths[row] = length + len(token_ids)
        self.drafts[row], self._drafts[row] = 0, ()
        # What it computed for refused drafts counts no more.
        self.drafter_lengths[row] = min(self.drafter_lengths[row], self.lengths[row] - 1)
        if ended:
            self.limits[row] = self.lengths[row]

    def has_ended(self, row: int) -> bool:
        return self.lengths[row] >= self.limits[row]

    def draft(self, row: int, drafts: Sequence[Draft]) -> None:
        """Proposes what may come behind the context of a row."""
        length = self.lengths[row]
        self.token_ids[row, length : length + len(drafts)] = [draft.token for draft in drafts]
        self.drafts[row] = len(drafts)
        self._drafts[row] = drafts

    def _make_vectors(self, tokens: int) -> tuple[list[np.ndarray], list[Tensor]]:
        """int64 [tokens] for token ids, positions, and slots and offsets of each group; as arrays, and as tensors."""
        arrays = list(np.empty((2 + 2 * len(self._tables), tokens), dtype=np.int64))
        return arrays, [torch.from_numpy(array) for array in arrays]
