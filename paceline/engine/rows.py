"""The device's state of running requests, with one row for each.

The inputs of a step are formed here from the state that earlier steps have left. So a step can be launched before the
host knows their results. On a CPU, the "device" is the thread that computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.media import MediaKind
from paceline.core.types import SamplingParams
from paceline.engine.row_adapters import RowAdapters
from paceline.engine.row_media import EncodingReader, MediaPiece, RowMedia
from paceline.engine.sampler import Draft, SamplingRow, allowed_mask, takes_best
from paceline.engine.step import Chunk, RowAssigned, RowEncoded, RowUpdate
from paceline.engine.token_counts import TokenCounts
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.transfer import to_device
from paceline.models.base import EncodedRows

Span = tuple[int, int, int]
"""(row, start, end): tokens [start, end) of a row."""

_SIZES = 32
"""Number of batch sizes whose input tensors are kept for reuse, because making a tensor takes longer than filling
it.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """The data for sampling that stay the same while a request has a row."""

    sampling: SamplingParams
    prompt_len: int
    takes_best: bool
    allowed: np.ndarray | None
    """Mask of the tokens that the request allows, as `SamplingRow.mask`; None if it allows all tokens."""

    def ends(self, token_id: int, length: int) -> bool:
        """Return whether this token ends the request if the context has `length` tokens, this token included."""
        return self.sampling.ends(token_id, length - self.prompt_len)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The ragged batch of one step."""

    token_ids: Tensor
    """int64 [tokens]: ids of the tokens of all chunks, one chunk after the other."""
    positions: Tensor
    """int64 [tokens]: positions of the tokens. The positions of placeholder tokens of a grid are in `encoded`
    instead.
    """
    starts: list[int]
    """[chunks]: index of each chunk's first token in its context."""
    batch: AttentionBatch
    encoded: EncodedRows | None = None
    """Rows in place of the embeddings of placeholder tokens; None if there are no such tokens."""


class Rows:
    """The state of up to `count` requests.

    `token_ids` int32 [count, max_len + max_drafts] has the context of each row, followed by the row's drafts. Each of
    these lists has one value for each row:

    - `lengths`: number of tokens of the context.
    - `drafts`: number of drafts after the context.
    - `limits`: largest number of tokens that the context may have.
    - `capacities`: number of tokens that fit into the context's blocks.
    - `drafter_lengths`: number of tokens whose KV a draft model has computed.
    - `undraftable`: whether the draft model makes no more drafts for the row, because it has computed NaN for the row.

    A forward pass fills the CPU's caches with weights, so the first call of any function after it is slow. Therefore
    the code that forms inputs calls few functions: it uses plain numbers in lists, and slices of arrays.

    Args:
        max_len: tokens of the longest context.
        max_drafts: largest number of draft tokens after a context.
        whole_media, encodings: the arguments of `RowMedia`.
        bidirectional: whether all tokens of a context see each other. A step computes the whole context.
    """

    def __init__(
        self,
        count: int,
        max_len: int,
        max_drafts: int,
        layout: KVLayout,
        device: torch.device,
        whole_media: frozenset[MediaKind] = frozenset(),
        bidirectional: bool = False,
        encodings: EncodingReader | None = None,
    ) -> None:
        self.token_ids = np.zeros((count, max_len + max_drafts), dtype=np.int32)
        self.lengths = [0] * count
        self.drafts = [0] * count
        self.limits = [0] * count
        self.capacities = [0] * count
        self.drafter_lengths = [0] * count
        self.undraftable = [False] * count
        self.media = RowMedia(count, whole_media, encodings, device)
        self.adapters = RowAdapters(count, device)
        self._rows: list[Row | None] = [None] * count
        self._drafts: list[Sequence[Draft]] = [()] * count
        self._counts: list[TokenCounts | None] = [None] * count
        self._layout = layout
        self._bidirectional = bidirectional
        self._device = device
        self._on_host = device.type == "cpu"
        self._tables = [np.zeros((count, group.blocks_for(max_len)), dtype=np.uint32) for group in layout.groups]
        self._gathered: dict[tuple[object, ...], Tensor] = {}
        self._positions = np.arange(max_len + max_drafts)
        self._places = [np.divmod(self._positions, group.block_tokens) for group in layout.groups]
        self._vectors = lru_cache(_SIZES)(self._make_vectors)

    def update(self, updates: Sequence[RowUpdate]) -> None:
        """Apply changes of rows, in order."""
        for update in updates:
            row = update.row
            if isinstance(update, RowEncoded):
                self.media.provide(update)
                continue
            if isinstance(update, RowAssigned):
                sampling = update.sampling
                self._rows[row] = Row(sampling, update.prompt_len, takes_best(sampling), allowed_mask(sampling))
                self.token_ids[row, : len(update.token_ids)] = update.token_ids
                self.lengths[row], self.limits[row] = len(update.token_ids), update.limit
                self.drafts[row], self._drafts[row] = 0, ()
                self._counts[row] = None
                self.drafter_lengths[row], self.undraftable[row] = update.drafter_len, False
                self.media.assign(update)
                self.adapters.assign(update)
            for table, slots in zip(self._tables, update.tables):
                table[row, : len(slots)] = slots
            self.capacities[row] = update.capacity
            self._gathered.clear()

    def form(self, chunks: Sequence[Chunk]) -> Inputs:
        """Form the inputs of a step. Tokens of rows whose request has ended are left out."""
        spans: list[Span] = []
        for chunk in chunks:
            row, start, count = chunk.row, chunk.start, chunk.length
            if chunk.follows:
                length = self.lengths[row]
                start, count = length - 1, min(count, 1 + self.drafts[row], self.limits[row] - length)
            spans.append((row, start, start + count))
        inputs = self.span(spans)
        if (adapters := self.adapters.of(spans)) is None:
            return inputs
        return replace(inputs, batch=replace(inputs.batch, adapters=adapters))

    def span(self, spans: Sequence[Span], comes_again: bool = False) -> Inputs:
        """Form the inputs for these tokens, without adapters. The result is valid until the next inputs are formed.

        Tokens after the context of a row are drafts, which a later step may take back.

        Args:
            comes_again: whether a later step also computes the newest token of each context again.
        """
        arrays, tensors = self._vectors(sum([end - start for _, start, end in spans]))
        tokens, positions, *placed = arrays
        ends, shifts = self.media.ends, self.media.shifts
        pieces, shifted = [], []
        begin, query_start = 0, [0]
        for row, start, end in spans:
            if start < ends[row]:
                pieces.append(MediaPiece(row, start, end, begin))
            if shifts[row]:
                shifted.append(MediaPiece(row, start, end, begin))
            chunk_tokens = slice(begin, begin := begin + end - start)
            query_start.append(begin)
            tokens[chunk_tokens] = self.token_ids[row, start:end]
            positions[chunk_tokens] = self._positions[start:end]
            for index, table in enumerate(self._tables):
                blocks, offsets = self._places[index]
                placed[2 * index][chunk_tokens] = table[row, blocks[start:end]]
                placed[2 * index + 1][chunk_tokens] = offsets[start:end]
        encoded = last_keys = None
        if pieces:
            encoded, last_keys = self.media.encoded(pieces), self.media.last_keys(pieces, positions)
        if shifted:
            self.media.shift_positions(shifted, positions)
        if self._bidirectional:
            lengths = [end - start for _, start, end in spans]
            last_keys = to_device(torch.from_numpy(np.repeat([end - 1 for _, _, end in spans], lengths)), self._device)
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
        final_len = tuple([min(end, self.lengths[row] - comes_again) for row, _, end in spans])
        context_len = tuple([end for _, _, end in spans])
        batch = AttentionBatch(tuple(query_start), context_len, tuple(groups), final_len=final_len, last_keys=last_keys)
        return Inputs(tensors[0], tensors[1], [start for _, start, _ in spans], batch, encoded)

    def _gather(self, index: int, spans: Sequence[Span]) -> Tensor:
        """Return a group's block tables for spans: int32 [spans, blocks]. They are reused if nothing has changed."""
        rows = [row for row, _, _ in spans]
        blocks = self._layout.groups[index].blocks_for(max((end for _, _, end in spans), default=0))
        key = (index, blocks, *rows)
        if key not in self._gathered:
            tables = self._tables[index][rows, :blocks].view(np.int32)  # Kernels read NO_SLOT as -1.
            self._gathered[key] = to_device(torch.from_numpy(tables), self._device)
        return self._gathered[key]

    def row(self, row: int) -> Row:
        fixed = self._rows[row]
        assert fixed is not None
        return fixed

    def context(self, row: int, length: int | None = None) -> np.ndarray:
        """Return the row's first `length` tokens: int32 [length], which may include drafts. By default, return the
        context alone.
        """
        return self.token_ids[row, : self.lengths[row] if length is None else length]

    def sampling_row(self, row: int, length: int, mask: np.ndarray | None) -> SamplingRow:
        """Return the data for sampling the token after the row's first `length` tokens, drafts included. The result is
        valid until the next call.

        Args:
            mask: tokens that the grammar allows, as `SamplingRow.mask`; None without a grammar.
        """
        fixed, settled, counts = self.row(row), self.lengths[row], self._counts[row]
        if fixed.sampling.needs_history:
            if counts is None:
                counts = self._counts[row] = TokenCounts(self.context(row), fixed.prompt_len)
            counts.follow(self.token_ids[row], settled, length)
        return SamplingRow(fixed.sampling, self.context(row, length), fixed.prompt_len, mask, counts)

    def drafts_of(self, row: int) -> Sequence[Draft]:
        """Return the drafts that follow the context of a row, in order."""
        return self._drafts[row][: self.drafts[row]]

    def room_for_drafts(self, row: int) -> int:
        """Return the largest number of drafts that a row may have. The drafts and the token after them must fit into
        the blocks.
        """
        return max(0, min(self.capacities[row], self.limits[row] - 1) - self.lengths[row])

    def append(self, row: int, token_ids: Sequence[int], ended: bool) -> None:
        """Append sampled tokens to a row, and drop its drafts. A row that has ended gets no more tokens."""
        length = self.lengths[row]
        self.token_ids[row, length : length + len(token_ids)] = token_ids
        self.lengths[row] = length + len(token_ids)
        self.drafts[row], self._drafts[row] = 0, ()
        # The draft model's KV of rejected drafts is not valid any more.
        self.drafter_lengths[row] = min(self.drafter_lengths[row], self.lengths[row] - 1)
        if ended:
            self.limits[row] = self.lengths[row]

    def has_ended(self, row: int) -> bool:
        return self.lengths[row] >= self.limits[row]

    def draft(self, row: int, drafts: Sequence[Draft]) -> None:
        """Put drafts after the context of a row."""
        length = self.lengths[row]
        self.token_ids[row, length : length + len(drafts)] = [draft.token for draft in drafts]
        self.drafts[row] = len(drafts)
        self._drafts[row] = drafts

    def _make_vectors(self, tokens: int) -> tuple[list[np.ndarray], list[Tensor]]:
        """Make vectors int64 [tokens] for token ids, positions, and the slots and offsets of each group.

        Return them as arrays, and as tensors in the same memory.
        """
        arrays = list(np.empty((2 + 2 * len(self._tables), tokens), dtype=np.int64))
        return arrays, [torch.from_numpy(array) for array in arrays]
