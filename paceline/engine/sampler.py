"""Sampling of tokens from logits.

The order of operations is the usual one. First, raw logprobs are taken. Then a grammar's mask, allowed tokens, bad
words, minimum length, bias and penalties change the logits. Greedy sampling takes the best token. Otherwise
temperature, top_k, min_p and top_p cut the distribution, and one uniform random number draws a token. This number is a
pure function of (seed, position), so the same request gives the same tokens in any batch, on any worker, in any
attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from paceline.core.types import Logprob, SamplingParams, Token
from paceline.engine.distribution import TokenDistribution, cut
from paceline.engine.token_counts import TokenCounts
from paceline.kernels.choosing import Draw, TokenChooser
from paceline.kernels.transfer import to_device

_MASK64 = (1 << 64) - 1
_COLDEST = 1e-5
"""Temperature below which sampling is greedy, because the best token's probability would be rounded to 1 anyway."""


class Purpose(IntEnum):
    """The purpose of a random number. Numbers for different purposes at one position are independent."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    REDRAW = 3


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The data that sampling needs besides one row of logits."""

    params: SamplingParams
    token_ids: Sequence[int] | np.ndarray
    """The context so far. The token that is to be chosen has position len(token_ids)."""
    prompt_len: int
    mask: np.ndarray | None = None
    """Tokens that a grammar or the request allows: uint8 [bytes], one bit a token from the lowest bit on. At least one
    bit is set."""
    counts: TokenCounts | None = None
    """Counts of the context's tokens; if None, `sample` counts the tokens when penalties need the counts."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted token, and the distribution from which it was drawn. The distribution is None if the token was not
    drawn at random.
    """

    token: int
    drawn_from: TokenDistribution | None = None


def sample(logits: Tensor, row: SamplingRow, draft: Draft | None = None, chooser: TokenChooser | None = None) -> Token:
    """Choose a token. Include its logprobs if the request wants them.

    Args:
        logits: fp32 [vocab]; overwritten.
        draft: a draft to be accepted as often as the distribution allows. Without it, the token depends only on `row`.
        chooser: draws the token if `draft` is None. The token is the same as without a chooser.
    """
    top = row.params.logprobs
    report = raw_logprobs(logits, top, row.params.logprob_token_ids) if top is not None else None
    token = _choose(logits, row, draft, chooser)
    return Token(token, report.of(token) if report else ())


def propose(logits: Tensor, row: SamplingRow, draws: bool, chooser: TokenChooser | None = None) -> Draft:
    """Draft a token from logits fp32 [vocab], which are overwritten.

    Args:
        draws: draw with a random number for drafts, and keep the distribution for `sample`. Otherwise draw with the
            number that will choose the token, so that two models with the same distribution choose the same token.
        chooser: draws the token unless `draws` is set. The token is the same as without a chooser.
    """
    if not draws or _is_greedy(row.params):
        return Draft(_choose(logits, row, None, chooser))
    _shape_logits(logits, row)
    distribution = cut(logits, row.params)
    return Draft(distribution.draw(_uniform_of(row, Purpose.DRAFT)), distribution)


def as_draw(params: SamplingParams, position: int, prompt_len: int) -> Draw | None:
    """Return the parameters for a chooser of the token at `position`; None if more than the logits decides the token,
    or if the request wants logprobs.
    """
    if not _logits_decide(params) or params.unwanted_ends(position - prompt_len):
        return None
    return _draw_at(params, position)


def _draw_at(params: SamplingParams, position: int) -> Draw:
    temperature = 0.0 if _is_greedy(params) else params.temperature
    return Draw(temperature, params.top_k, params.min_p, params.top_p, params.seed, position)


def allowed_mask(params: SamplingParams) -> np.ndarray | None:
    """Return the mask of the tokens that a request allows, as `SamplingRow.mask`; None if it allows all tokens.

    Callers make the mask once for each request, because reading a list of a large vocabulary takes longer than a step.
    """
    if not params.allowed_token_ids:
        return None
    token_ids = np.array(params.allowed_token_ids)
    allowed = np.zeros(int(token_ids.max()) + 1, dtype=bool)
    allowed[token_ids] = True
    return np.packbits(allowed, bitorder="little")


def takes_best(params: SamplingParams) -> bool:
    """Return whether the request always takes the token with the largest logit, and wants no logprobs."""
    # Tokens are unwanted only before min_tokens, so checking the first position is enough: there is no constraint here.
    return _is_greedy(params) and _logits_decide(params) and not params.unwanted_ends(0)


def best_of(logits: Tensor) -> list[int]:
    """Return the token with the largest logit in each row of fp32 [rows, vocab]. Of equal logits, the lowest token id
    wins.
    """
    # On a CPU, torch compares one number at a time, NumPy sixteen.
    best = logits.numpy().argmax(axis=1) if logits.device.type == "cpu" else logits.argmax(dim=1)
    return [int(token) for token in best.tolist()]


def _logits_decide(params: SamplingParams) -> bool:
    """Return whether tokens depend only on logits and, before min_tokens, on the position, and need no logprobs."""
    listed = params.logit_bias or params.allowed_token_ids or params.bad_words
    return not listed and not params.needs_history and params.constraint is None and params.logprobs is None


def _choose(logits: Tensor, row: SamplingRow, draft: Draft | None, chooser: TokenChooser | None = None) -> int:
    _shape_logits(logits, row)
    if chooser is not None and draft is None:
        return int(chooser.choose(logits[None], [0], [_draw_at(row.params, len(row.token_ids))]))
    if _is_greedy(row.params):
        return best_of(logits[None])[0]
    distribution = cut(logits, row.params)
    if draft is None:
        return distribution.draw(_uniform_of(row, Purpose.TOKEN))
    u, v = _uniform_of(row, Purpose.ACCEPT), _uniform_of(row, Purpose.REDRAW)
    return distribution.verify(draft.token, draft.drawn_from, logits.numel(), u, v)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _COLDEST


def _uniform_of(row: SamplingRow, purpose: Purpose) -> float:
    return uniform(row.params.seed, len(row.token_ids), purpose)


def score(logits: Tensor, token_ids: Sequence[int], top: int) -> list[Token]:
    """Return the given tokens with their logprobs, one token for each row of logits fp32 [rows, vocab]."""
    return [Token(token, raw_logprobs(row, top).of(token)) for row, token in zip(logits, token_ids)]


def uniform(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """Return a pseudorandom number in [0, 1) with 53 bits: SplitMix64's finalizer over (seed, position, purpose)."""
    state = (seed + 0x9E3779B97F4A7C15 * (position + 1) + 0xD1B54A32D192ED03 * purpose) & _MASK64
    for _ in range(2):  # applied twice, so that neighbouring seeds and positions give unrelated numbers
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """The logprobs of one row of raw logits."""

    logprobs: Tensor
    """fp32 [vocab]: logprob of each token."""
    top: tuple[Logprob, ...]
    """The most likely tokens in order, or the tokens that the request names."""

    def of(self, token_id: int) -> tuple[Logprob, ...]:
        """Return the entry of the chosen token, then the entries of `top`."""
        logprob = self.logprobs[token_id]
        rank = int((self.logprobs > logprob).sum()) + 1
        return (Logprob(token_id, float(logprob), rank), *self.top)


def raw_logprobs(logits: Tensor, top: int, named: Sequence[int] = ()) -> LogprobReport:
    """Return the logprobs of one row of raw logits, fp32 [vocab], which nothing may have changed yet.

    Args:
        top: number of the most likely tokens to report.
        named: tokens to report instead of the most likely ones.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if named:
        named_logprobs = logprobs[list(named)]
        ranks = (logprobs[None] > named_logprobs[:, None]).sum(dim=1) + 1
        return LogprobReport(logprobs, tuple(map(Logprob, named, named_logprobs.tolist(), ranks.tolist())))
    values, indices = logprobs.topk(min(top, logprobs.numel()))
    entries = enumerate(zip(indices.tolist(), values.tolist()), start=1)
    return LogprobReport(logprobs, tuple(Logprob(token, value, rank) for rank, (token, value) in entries))


def _shape_logits(logits: Tensor, row: SamplingRow) -> None:
    """Apply masks, bias and penalties to one row of logits, fp32 [vocab], in place."""
    params = row.params
    if row.mask is not None:
        allowed = np.unpackbits(row.mask, count=logits.numel(), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
    if params.bad_words:
        _forbid(logits, _ends_of_bad_words(row))
    _forbid(logits, list(params.unwanted_ends(len(row.token_ids) - row.prompt_len)))
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[list(params.logit_bias)] += bias
    if params.needs_history:
        _penalise(logits, row)


def _forbid(logits: Tensor, tokens: list[int]) -> None:
    """Forbid tokens, unless a grammar or the allowed tokens leave no other token."""
    if tokens:
        before = logits[tokens]
        logits[tokens] = -torch.inf
        if logits.max() == -torch.inf:
            logits[tokens] = before


def _ends_of_bad_words(row: SamplingRow) -> list[int]:
    """Return the tokens that would complete a bad word in the output."""
    words = row.params.bad_words
    longest = max(map(len, words)) - 1
    end = np.asarray(row.token_ids[max(row.prompt_len, len(row.token_ids) - longest) :]).tolist()
    # A word that is longer than the output and its next token cannot be complete.
    return [word[-1] for word in words if len(word) <= len(end) + 1 and end[len(end) + 1 - len(word) :] == [*word[:-1]]]


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    counts = row.counts or TokenCounts(np.asarray(row.token_ids), row.prompt_len)
    if (penalty := params.repetition_penalty) != 1.0:
        seen = to_device(counts.context, logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output, times = (to_device(tensor, logits.device) for tensor in counts.output)
        logits[output] -= params.presence_penalty + params.frequency_penalty * times
