"""The distribution from which a token is drawn, and the acceptance rule for drafts that preserves it.

All probabilities are fp64. A draw inverts the cumulative sum at a random number of 53 bits. In fp32, tokens of very low
probability could never be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import SamplingParams

_LIKELY = 1e-3
"""top_p first sorts only tokens with at least this share of the best token's probability, which are usually few."""


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """A distribution over token ids."""

    weights: Tensor
    """fp64 [n]: probabilities, all multiplied by the same factor."""
    tokens: Tensor | None = None
    """int64 [n]: token id of each weight, if some tokens were cut off; None if the weights are of all ids in order."""

    def draw(self, u: float) -> int:
        """Return the first token at which the cumulative distribution exceeds `u`, a number in [0, 1)."""
        cumulative = self.weights.cumsum(dim=-1)
        index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
        if index == len(self.weights):  # u times the sum was rounded up to the sum
            index = int(self.weights.nonzero()[-1])
        return index if self.tokens is None else int(self.tokens[index])

    def dense(self, vocab_size: int) -> Tensor:
        """Return the probabilities of all tokens: fp64 [vocab_size]."""
        shares = self.weights / self.weights.sum()
        if self.tokens is None:
            return shares
        return torch.zeros(vocab_size, dtype=shares.dtype, device=shares.device).scatter_(0, self.tokens, shares)

    def verify(self, draft: int, drawn_from: TokenDistribution | None, vocab_size: int, u: float, v: float) -> int:
        """Return a token drawn from this distribution, p. It is the draft as often as is possible without changing p.

        This is speculative sampling (Leviathan 2022). A draft x that was drawn from q is accepted with probability
        min(1, p(x) / q(x)). Otherwise a token is drawn from max(0, p - q). A draft that was looked up has q(x) = 1.

        Args:
            drawn_from: the distribution q; None if the draft was looked up.
            u, v: independent random numbers in [0, 1): `u` decides about the draft, `v` draws a token if it is refused.
        """
        wanted = self.dense(vocab_size)
        if drawn_from is None:
            drawn = torch.zeros_like(wanted)
            drawn[draft] = 1.0
        else:
            drawn = drawn_from.dense(vocab_size)
        if u * drawn[draft] < wanted[draft]:
            return draft
        missing = (wanted - drawn).clamp_(min=0.0)
        return TokenDistribution(missing).draw(v) if missing.any() else draft


def cut(logits: Tensor, params: SamplingParams) -> TokenDistribution:
    """Return the distribution of one row of logits, fp32 [vocab], after temperature, top_k, min_p and top_p."""
    tokens: Tensor | None = None
    values = logits.double() / params.temperature
    if 0 < params.top_k < values.numel():
        values, tokens = _best_values(values, params.top_k)
    probabilities = torch.softmax(values, dim=-1)
    if params.min_p > 0:
        probabilities = torch.where(probabilities < params.min_p * probabilities.max(), 0.0, probabilities)
        probabilities = probabilities / probabilities.sum()
    if params.top_p < 1:
        probabilities, order = _cut_top_p(probabilities, params.top_p)
        tokens = order if tokens is None else tokens[order]
    return TokenDistribution(probabilities, tokens)


def _best_values(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of values [n] in descending order, and their indices. Of equal values, the first comes
    first.
    """
    candidates = (~(values < values.topk(count).values[-1])).nonzero().squeeze(-1)
    best, places = values[candidates].sort(descending=True, stable=True)
    return best[:count], candidates[places[:count]]


def _cut_top_p(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the fewest most likely tokens that have at least top_p together: fp64 probabilities, and indices."""
    # All tokens that are less likely than the second floor have less than 1 - top_p together, so it always suffices.
    for floor in (_LIKELY * probabilities.max(), (1 - top_p) / probabilities.numel()):
        candidates = (probabilities >= floor).nonzero().squeeze(-1)
        best, places = probabilities[candidates].sort(descending=True, stable=True)
        if best.sum() >= top_p:
            break
    order = candidates[places]
    before = best.cumsum(dim=-1) - best
    keep = max(1, int((before < top_p).sum()))
    return best[:keep], order[:keep]
