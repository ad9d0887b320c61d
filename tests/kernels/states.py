"""A pool of blocks with states, for tests of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import view_states

SLOTS = 40

Piece = tuple[int, int, int]
"""Context, begin and end of the tokens that a step computes."""


class StatePool:
    """Blocks of NaN with the states of two layers, the second of which is computed, for some contexts.

    Args:
        parts: the shape of each part of a layer's state.
        lengths: tokens of each context.
    """

    def __init__(self, parts: Sequence[tuple[int, ...]], lengths: Sequence[int], block_tokens: int) -> None:
        slot_bytes = 4 * (2 * sum(map(math.prod, parts)) + 8)  # with padding after the block
        self._elements = torch.full((SLOTS * slot_bytes // 4,), float("nan"))
        self.parts = view_states(self._elements, slot_bytes, 2, parts)[1].parts
        self._block_tokens = block_tokens
        free = iter(torch.randperm(SLOTS, generator=torch.Generator("cpu").manual_seed(1), device="cpu").tolist())
        self.tables = [[next(free) for _ in range(0, length, block_tokens)] for length in lengths]

    def batch(self, pieces: Sequence[Piece], final: tuple[int, ...] = ()) -> AttentionBatch:
        """Return the batch of a step. Block tables have only the blocks that the step may touch."""
        size, width = self._block_tokens, max(map(len, self.tables))
        tables = torch.full((len(pieces), width), 2**31 - 1, dtype=torch.int32)
        for row, (context, begin, end) in enumerate(pieces):
            first, last = max(0, begin - 1) // size, (end - 1) // size
            tables[row, first : last + 1] = torch.tensor(self.tables[context][first : last + 1], dtype=torch.int32)
        counts = [end - begin for _, begin, end in pieces]
        nowhere = torch.zeros(sum(counts), dtype=torch.int64)
        starts = (0, *torch.tensor(counts, device="cpu").cumsum(0).tolist())
        group = GroupTables(size, 2, tables, nowhere, nowhere)
        return AttentionBatch(starts, tuple(end for _, _, end in pieces), (group,), final_len=final)

    def keep_only(self, context: int, first: int, last: int) -> None:
        """Fill all blocks of a context with NaN, except the blocks of the tokens at positions first to last."""
        size, slots = self._block_tokens, self.tables[context]
        lost = [slot for i, slot in enumerate(slots) if not first // size <= i <= last // size]
        self._elements.view(SLOTS, -1)[lost] = torch.nan

    def bits(self) -> Tensor:
        """Return a copy of the pool as integers, in which NaN is equal to itself."""
        return self._elements.view(torch.int32).clone()


def pieces_of(own: Sequence[Tensor], pieces: Sequence[Piece]) -> Tensor:
    """Return the rows of these tokens, given the rows of each context."""
    return torch.cat([own[context][begin:end] for context, begin, end in pieces])


def sizes_of(pieces: Sequence[Piece]) -> list[int]:
    return [end - begin for _, begin, end in pieces]
