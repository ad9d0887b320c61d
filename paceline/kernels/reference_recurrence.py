"""Layers with a state in plain torch, and the bookkeeping of their states by the rules of `RecurrentState`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import RecurrentState

Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from the state before a token and fp32 [inputs] to the state after the token and the token's result."""


class ReferenceRecurrence:
    """`RecurrentKernels` in plain torch, token by token."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        out, taps = torch.empty_like(x), weight.float()
        for span in spans(batch, group):
            tokens = slice(span.first, span.first + span.end - span.start)
            seen = torch.cat((inputs_before(span, state, len(taps) - 1), x[tokens].float()))
            count = span.end - span.start
            total = torch.zeros_like(seen[:count]) if bias is None else bias.float().expand(count, -1).contiguous()
            for tap, factors in enumerate(taps):
                total = total + factors * seen[tap : tap + count]
            # Row by row, because torch computes the last few elements of a tensor in another way than the rest.
            out[tokens] = torch.stack([F.silu(row) for row in total]).to(x.dtype)
            keep_inputs(span, state, seen)
        return out

    def selective_scan(
        self,
        x: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        _, heads, head_dim, state_size = state.state.shape
        decay, bias, skip = rates

        def advance(now: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
            token_input, b, c, raw = torch.split(inputs, [heads * head_dim, state_size, state_size, heads])
            step, token_input = F.softplus(raw + bias), token_input.view(heads, head_dim)
            now = now * torch.exp(step * decay).view(-1, 1, 1) + (step.unsqueeze(1) * token_input).unsqueeze(2) * b
            return now, skip.unsqueeze(1) * token_input + (now * c).sum(-1)

        # Token by token, so that the order of all sums is the same wherever a chunk begins.
        results = run_recurrence(state, torch.cat((x, time_steps), 1).float(), batch, group, advance)
        return torch.stack(results).flatten(1).to(x.dtype) if results else x[:, : heads * head_dim].clone()

    def gated_delta_rule(
        self,
        x: Tensor,
        gates: Tensor,
        time_steps: Tensor,
        rates: Tensor,
        state: RecurrentState,
        batch: AttentionBatch,
        group: GroupTables,
    ) -> Tensor:
        _, heads, key_dim, value_dim = state.state.shape
        keys = (x.shape[1] - heads * value_dim) // 2
        repeats = heads * key_dim // keys
        decay, bias = rates

        def advance(now: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
            query, key, value, gate, raw = torch.split(inputs, [keys, keys, heads * value_dim, heads, heads])
            query, key = (_unit(vectors.view(-1, key_dim)).repeat_interleave(repeats, 0) for vectors in (query, key))
            now = now * torch.exp(F.softplus(raw + bias) * decay).view(-1, 1, 1)
            change = value.view(heads, value_dim) - (key.unsqueeze(2) * now).sum(1)
            now = now + key.unsqueeze(2) * (change * torch.sigmoid(gate).unsqueeze(1)).unsqueeze(1)
            return now, (query.unsqueeze(2) * now).sum(1) * key_dim**-0.5

        results = run_recurrence(state, torch.cat((x, gates, time_steps), 1).float(), batch, group, advance)
        return torch.stack(results).flatten(1).to(x.dtype) if results else x[:, 2 * keys :].clone()


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of a request that a step computes in one block, at positions [begin, end)."""

    slot: int
    begin: int
    end: int
    is_new: bool
    """Whether the first of these tokens is also the first token of the block."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one request in a step."""

    first: int
    """Index of the span's first token among the tokens of the step."""
    start: int
    """Position of the span's first token in its context."""
    final: int
    """Number of tokens of the context that no later step takes back."""
    read_slot: int | None
    """Slot of the block with the token before this span; None if the span begins the context."""
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
        seen: fp32 [count + tokens, channels]: the `count` inputs before the span, then the inputs of the span.
    """
    rows, count = state.shape[1], len(seen) - (span.end - span.start)
    for piece in span.pieces:
        begin = max(0, piece.begin - count * piece.is_new, piece.end - rows)
        places = [position % rows for position in range(begin, piece.end)]
        state[piece.slot, places] = seen[begin - span.start + count : piece.end - span.start + count]


def run_recurrence(
    state: RecurrentState, inputs: Tensor, batch: AttentionBatch, group: GroupTables, advance: Advance
) -> list[Tensor]:
    """Compute the tokens of a step one by one, and return the result of each.

    Args:
        inputs: fp32 [tokens, inputs]: the inputs of each token, which `advance` takes.
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
                token_inputs = inputs[span.first + position - span.start]
                if position == settled:
                    state.state[piece.slot] = now
                if position >= settled:
                    block[1 + position - settled] = token_inputs
                now, result = advance(now, token_inputs)
                results.append(result)
            if settled == piece.end:
                state.state[piece.slot] = now
            block[0, 0] = settled - piece.begin // size * size
    return results


def _unit(x: Tensor) -> Tensor:
    """Return x with each row scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
