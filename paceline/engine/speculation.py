"""The choice of the number of tokens to draft: a draft must save more time than it costs, by measured times. Pure.

Let `a` be the share of this request's recent drafts that were accepted. The j-th draft of a step is accepted only if
all drafts before it are, so its probability is a^j. If it is accepted, it saves the present time per token. It always
costs the time that one more token adds to a step, and the drafter's time for one token. If even the first draft costs
more than it saves, there are no drafts, except for a rare probe, which keeps the measurements up to date and costs next
to nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_KEPT = 0.95
"""Weight of earlier measurements in an average when a new one comes."""
_PROBE_SHARE = 0.005
"""Largest share of the time that probes may take."""
_LEAST_PRICE = 0.05
"""Least cost of a draft, as a share of the time per token. Every draft costs something, even if noise hides it."""
_HOPE = 0.6
"""Acceptance rate that is assumed before any drafts were verified, from 0 to 1."""


@dataclass(slots=True)
class Acceptance:
    """The acceptance rate of drafts. Older drafts count less."""

    accepted: float
    refused: float

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.refused)

    def observe(self, drafted: int, accepted: int) -> None:
        """Count the first `accepted` of `drafted` drafts as accepted, and the next draft as refused. Ignore later
        drafts.
        """
        self.accepted = self.accepted * _KEPT + accepted
        self.refused = self.refused * _KEPT + (accepted < drafted)


class StepCost:
    """The time that one more token adds to a step. Each step is compared with the step before it, if their numbers of
    tokens differ, and the median of these comparisons counts. So other programs that slow the machine down for a while
    hardly matter.
    """

    def __init__(self) -> None:
        self._slopes: deque[float] = deque(maxlen=31)
        self._last = (0, 0.0)

    @property
    def slope(self) -> float:
        """Seconds per token; 0 before the first measurement, so that drafts are tried."""
        return max(0.0, statistics.median(self._slopes)) if self._slopes else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        before, took = self._last
        if before not in (0, tokens):
            self._slopes.append((seconds - took) / (tokens - before))
        self._last = (tokens, seconds)


class Speculation:
    """Chooses the number of tokens to draft for each request of one worker, by measured times.

    Args:
        most: largest number of drafts of one request in one step; 0 turns drafting off.
        adaptive: choose the number of drafts by measurements; otherwise draft `most` tokens always.
    """

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most = most
        self._adaptive = adaptive
        self._cost = StepCost()
        self._token_seconds = 0.0
        self._draft_seconds = 0.0
        """The drafter's time for one token of one request."""
        self._typical = Acceptance(_HOPE, 1.0 - _HOPE)
        self._steps = 0
        self._next_probe = 0

    def newcomer(self) -> Acceptance:
        """Return the acceptance with which a new request begins: the average rate of all requests."""
        rate = self._typical.rate
        return Acceptance(rate, 1.0 - rate)

    def observe_step(self, tokens: int, given: int, drafted: int, seconds: float, draft_seconds: float) -> None:
        """Measure a step without prompts.

        Args:
            tokens: number of tokens that the step computed, verified drafts included.
            given: number of tokens that requests have got from the step.
            drafted: number of tokens drafted for the next step.
            seconds: duration of the whole step, `draft_seconds` included.
        """
        self._steps += 1
        self._cost.observe(tokens, seconds - draft_seconds)
        if given:
            self._token_seconds = _blend(self._token_seconds, seconds / given)
        if drafted:
            self._draft_seconds = _blend(self._draft_seconds, draft_seconds / drafted)

    def observe_drafts(self, request: Acceptance, drafted: int, accepted: int) -> None:
        """Count a request's drafts. The first `accepted` of them were accepted."""
        if drafted:
            request.observe(drafted, accepted)
            self._typical.observe(drafted, accepted)

    def choose(self, request: Acceptance) -> int:
        """Return the number of tokens to draft for a request."""
        if self.most == 0 or not self._adaptive:
            return self.most
        if self._token_seconds == 0.0:
            return 1
        price = max(_LEAST_PRICE, (self._cost.slope + self._draft_seconds) / self._token_seconds)
        worth = request.rate
        if worth > price:
            # the largest j with worth^j > price
            return self.most if worth >= 1.0 else min(self.most, int(math.log(price) / math.log(worth)))
        if self._steps < self._next_probe:
            return 0
        self._next_probe = self._steps + math.ceil(price / _PROBE_SHARE)
        return 1


def _blend(before: float, now: float) -> float:
    return now if before == 0.0 else before * _KEPT + now * (1.0 - _KEPT)
