"""The distribution from which a token is drawn, and the rule that keeps it while drafts are verified.

All probabilities are fp64, and draws invert their cumulative sums at numbers of 53 bits: fp32 would cut off the tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import SamplingParams

_LIKELY = 1e-3
"""top_p looks first at tokens that are so likely beside the best one; there are seldom many of them."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a token may become."""

    weights: Tensor
    """fp64 [n]: probabilities, but for a common factor."""
    tokens: Tensor | None = None
    """int64 [n]: whose they are, where some were cut away; None is all, in order of id."""

    def draw(self, u: float) -> int:
        """The token at u in [0, 1) of the cumulative distribution."""
        cumulative = self.weights.cumsum(dim=-1)
        index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
        if index == len(self.weights):  # u times the sum was rounded up to the sum
            index = int(self.weights.nonzero()[-1])
        return index if self.tokens is None else int(self.tokens[index])

    def dense(self, vocab_size: int) -> Tensor:
        """Probabilities of all tokens: fp64 [vocab_size]."""
        shares = self.weights / self.weights.sum()
        if self.tokens is None:
            return shares
        return torch.zeros(vocab_size, dtype=shares.dtype, device=shares.device).scatter_(0, self.tokens, shares)

    def verify(self, draft: int, drawn_from: Distribution | None, vocab_size: int, u: float, v: float) -> int:
        """A token of this distribution that is the draft as often as can be (speculative sampling, Leviathan 2022).

        A draft x that was drawn from q is accepted with min(1, p(x) / q(x)); otherwise max(0, p - q) has its turn. A
        draft that was not drawn but looked up is one that was certain: q(x) = 1.

        Args:
            u, v: in [0, 1), independent of each other and of what drew the draft: one accepts, the other draws anew.
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
        return Distribution(missing).draw(v) if missing.any() else draft


def cut(logits: Tensor, params: SamplingParams) -> Distribution:
    """What temperature, top_k, min_p and top_p leave of one row of logits fp32 [vocab]."""
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
    return Distribution(probabilities, tokens)


def _best_values(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of values [n] in descending order, of equal ones the first, and their indices."""
    candidates = (~(values < values.topk(count).values[-1])).nonzero().squeeze(-1)
    best, places = values[candidates].sort(descending=True, stable=True)
    return best[:count], candidates[places[:count]]


def _cut_top_p(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely tokens that together have at least top_p: their probabilities, fp64, and their indices."""
    # All tokens that are less likely than the second floor have less than 1 - top_p together.
    for floor in (_LIKELY * probabilities.max(), (1 - top_p) / probabilities.numel()):
        candidates = (probabilities >= floor).nonzero().squeeze(-1)
        best, places = probabilities[candidates].sort(descending=True, stable=True)
        if best.sum() >= top_p:
            break
    order = candidates[places]
    before = best.cumsum(dim=-1) - best
    keep = max(1, int((before < top_p).sum()))
    return best[:keep], order[:keep]
