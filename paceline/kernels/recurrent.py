"""The parts of layers with a state that do not depend on the layer's formula, in plain torch. See `RecurrentState`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.interface import AttentionBatch, GroupTables, RecurrentState

Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from the state before a token and fp32 [inputs] to the state after the token and the token's result."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of a request that a step computes in one block, at positions [begin, end)."""

    slot: int
    begin: int
    end: int
    is_new: bool
    """Whether the block begins with the first of these tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one request in a step."""

    first: int
    """Index of the first token in the step."""
    start: int
    """Position of the first token."""
    final: int
    """Number of tokens of the context that no later step takes back."""
    read_slot: int | None
    """Slot of the block of the token before the first; None at the beginning of the context."""
    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        return self.pieces[-1].end


def spans(batch: AttentionBatch, group: GroupTables) -> Iterator[Span]:
    """Yield the span of each request that has tokens in the step."""
    size = group.block_tokens
    requests = zip(group.tables.tolist(), batch.context_len, batch.final_lengths(), pairwise(batch.query_start))
    for table, context_len, final, (first, end) in requests:
        if first == end:
            continue
        start = context_len - (end - first)
        pieces = tuple(
            Piece(table[block], max(start, block * size), min(context_len, (block + 1) * size), block * size >= start)
            for block in range(start // size, (context_len - 1) // size + 1)
        )
        yield Span(first, start, final, table[(start - 1) // size] if start else None, pieces)


def inputs_before(span: Span, state: Tensor, count: int) -> Tensor:
    """Return the last `count` inputs before a span, from the state of a convolution: fp32 [count, channels]."""
    before = torch.zeros(count, state.shape[2], device=state.device)
    known = min(count, span.start)
    if known:
        rows = [position % state.shape[1] for position in range(span.start - known, span.start)]
        before[count - known :] = state[span.read_slot, rows]
    return before


def keep_inputs(span: Span, state: Tensor, seen: Tensor) -> None:
    """Put the inputs of a span into the state of a convolution.

    Args:
        seen: fp32 [count + tokens, channels]: the `count` inputs before the span, then its own.
    """
    rows, count = state.shape[1], len(seen) - (span.end - span.start)
    for piece in span.pieces:
        begin = max(0, piece.begin - count * piece.is_new, piece.end - rows)
        own = [position % rows for position in range(begin, piece.end)]
        state[piece.slot, own] = seen[begin - span.start + count : piece.end - span.start + count]


def run_recurrence(
    state: RecurrentState, inputs: Tensor, batch: AttentionBatch, group: GroupTables, advance: Advance
) -> list[Tensor]:
    """Compute the tokens of a step one by one, and return the result of each.

    Args:
        inputs: fp32 [tokens, inputs].
    """
    kept, size = state.pending.shape[1] - 1, group.block_tokens
    results = []
    for span in spans(batch, group):
        now, included = torch.zeros_like(state.state[0]), 0
        if span.read_slot is not None:
            now, pending = state.state[span.read_slot], state.pending[span.read_slot]
            included = (span.start - 1) // size * size + int(pending[0, 0])
            if not 0 <= span.start - included <= kept:
                raise ValueError(f"the state includes {included} tokens, so the step cannot begin after {span.start}")
            for row in pending[1 : 1 + span.start - included]:
                now, _ = advance(now, row)
        for piece in span.pieces:
            stays = span.final < span.start and not piece.is_new
            settled = included if stays else min(max(span.final, piece.begin), piece.end)
            if piece.end - settled > kept:
                raise ValueError(f"{piece.end - settled} tokens may be taken back, but a block keeps {kept} inputs")
            block = state.pending[piece.slot]
            for position in range(piece.begin, piece.end):
                own = inputs[span.first + position - span.start]
                if position == settled:
                    state.state[piece.slot] = now
                if position >= settled:
                    block[1 + position - settled] = own
                now, result = advance(now, own)
                results.append(result)
            if settled == piece.end:
                state.state[piece.slot] = now
            block[0, 0] = settled - piece.begin // size * size
    return results
