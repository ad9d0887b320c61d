"""Choosing tokens from logits.

The order of operations is that of the field: raw logprobs are taken first; then a grammar's mask, allowed tokens,
minimum length, bias and penalties change the logits; greedy takes the best of them; otherwise temperature, min_p, top_k
and top_p cut the distribution, from which one uniform number draws. That number is a pure function of (seed, position),
so that the same request gives the same tokens in any batch, on any worker, at any attempt. It has 53 bits and meets
fp64 cumulative sums: fp32 would cut off the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Logprob, SamplingParams, Token

_MASK64 = (1 << 64) - 1
_COLDEST = 1e-5
"""Below this temperature the best token has all of the probability, as far as numbers can tell."""
_TOP_CANDIDATES = 1024
"""top_p looks at this many tokens first; a full sort of the vocabulary is seldom needed."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits and what it is for."""

    params: SamplingParams
    token_ids: Sequence[int] | np.ndarray
    """The context so far; the token to choose stands at position len(token_ids)."""
    prompt_len: int
    mask: np.ndarray | None = None
    """Where a grammar rules: uint8 [bytes], one bit a token from the lowest on; at least one is set. What it forbids is
    never chosen."""


def sample(logits: Tensor, row: SamplingRow) -> Token:
    """Chooses a token, and reports on it where that is asked for.

    Args:
        logits: fp32 [vocab]; overwritten.
    """
    top = row.params.logprobs
    report = raw_logprobs(logits, top) if top is not None else None
    token = choose(logits, row)
    return Token(token, report.of(token) if report else ())


def choose(logits: Tensor, row: SamplingRow) -> int:
    """Chooses a token from fp32 [vocab], which is overwritten."""
    _shape_logits(logits, row)
    if row.params.temperature < _COLDEST:
        return int(logits.argmax())
    return _draw(logits, row.params, uniform(row.params.seed, len(row.token_ids)))


def score(logits: Tensor, token_ids: Sequence[int], top: int) -> list[Token]:
    """Reports on given tokens, one a row of logits fp32 [rows, vocab]."""
    return [Token(token, raw_logprobs(row, top).of(token)) for row, token in zip(logits, token_ids)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64's finalizer over (seed, position)."""
    state = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK64
    for _ in range(2):  # twice, so that neighbouring seeds at neighbouring positions have nothing in common
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """The logprobs of one row of raw logits."""

    logprobs: Tensor
    """fp32 [vocab]"""
    top: tuple[Logprob, ...]

    def of(self, token_id: int) -> tuple[Logprob, ...]:
        """The chosen token first, then the most likely ones."""
        logprob = self.logprobs[token_id]
        rank = int((self.logprobs > logprob).sum()) + 1
        return (Logprob(token_id, float(logprob), rank), *self.top)


def raw_logprobs(logits: Tensor, top: int) -> LogprobReport:
    """Takes the logprobs of one row, fp32 [vocab], before anything changes it."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values, indices = logprobs.topk(min(top, logprobs.numel()))
    entries = enumerate(zip(indices.tolist(), values.tolist()), start=1)
    return LogprobReport(logprobs, tuple(Logprob(token, value, rank) for rank, (token, value) in entries))


def _shape_logits(logits: Tensor, row: SamplingRow) -> None:
    """Applies everything that forbids or favours tokens, in place, to one row fp32 [vocab]."""
    params = row.params
    if row.mask is not None:
        allowed = np.unpackbits(row.mask, count=logits.numel(), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
    if params.allowed_token_ids:
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        logits[forbidden] = -torch.inf
    if unwanted := list(params.unwanted_ends(len(row.token_ids) - row.prompt_len)):
        before = logits[unwanted]
        logits[unwanted] = -torch.inf
        if row.mask is not None and logits.max() == -torch.inf:
            logits[unwanted] = before  # the grammar wins
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[list(params.logit_bias)] += bias
    if params.needs_history:
        _penalise(logits, row)


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    context = torch.tensor(row.token_ids, device=logits.device)
    seen: Tensor = torch.unique(context)
    values = logits[seen]
    penalty = params.repetition_penalty
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = torch.bincount(context[row.prompt_len :], minlength=logits.numel())
    output = counts.nonzero().squeeze(-1)
    logits[output] -= params.presence_penalty + params.frequency_penalty * counts[output]


def _draw(logits: Tensor, params: SamplingParams, u: float) -> int:
    """Draws from one row fp32 [vocab] by inverting the cumulative distribution at u in [0, 1)."""
    candidates: Tensor | None = None  # ids where the row was cut to its best; None is all, in order of id
    values = logits.double() / params.temperature
    if 0 < params.top_k < values.numel():
        values, candidates = values.topk(params.top_k)
    probabilities = torch.softmax(values, dim=-1)
    if params.min_p > 0:
        probabilities = torch.where(probabilities < params.min_p * probabilities.max(), 0.0, probabilities)
        probabilities = probabilities / probabilities.sum()
    if params.top_p < 1:
        probabilities, order = _cut_top_p(probabilities, params.top_p)
        candidates = order if candidates is None else candidates[order]
    cumulative = probabilities.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    index = min(index, int(probabilities.nonzero()[-1]))  # rounding at the very end must not pick an impossible token
    return index if candidates is None else int(candidates[index])


def _cut_top_p(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely tokens that together have at least top_p: their probabilities, fp64, and their indices."""
    best, order = probabilities.topk(min(_TOP_CANDIDATES, probabilities.numel()))
    if best.sum() < top_p:
        best, order = probabilities.sort(descending=True, stable=True)
    before = best.cumsum(dim=-1) - best
    keep = max(1, int((before < top_p).sum()))
    return best[:keep], order[:keep]
