"""How many tokens to draft: as many as are worth what they cost, by what was measured. Pure.

A draft at place j is accepted if those before it were, so with probability a^j, where a is how often this request's
drafts came true lately. It then saves the time that a token takes now; it costs what one more token adds to a step, and
what the drafter takes to think of it. Where even the first draft does not pay, none is made, but for a rare probe that
keeps the figures fresh, so rare that its cost does not show.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

_KEPT = 0.95
"""Of what was measured before, with every new step."""
_PROBE_SHARE = 0.005
"""Of the time, at most, goes into probes."""
_LEAST_PRICE = 0.05
"""Of a token's time: a draft always costs something, even where that is lost in the noise."""
_HOPE = 0.6
"""How a drafter is judged before it has been seen."""


@dataclass(slots=True)
class Acceptance:
    """How often drafts came true; old drafts count less and less."""

    accepted: float
    refused: float

    @property
    def rate(self) -> float:
        return self.accepted / (self.accepted + self.refused)

    def observe(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` came true; those behind a refused one tell nothing."""
        self.accepted = self.accepted * _KEPT + accepted
        self.refused = self.refused * _KEPT + (accepted < drafted)


class StepCost:
    """What one more token adds to a step: the median of what steps of different size have shown, each beside the one
    before it, so that a machine that others slow down for a while misleads nobody."""

    def __init__(self) -> None:
        self._slopes: deque[float] = deque(maxlen=31)
        self._last = (0, 0.0)

    @property
    def slope(self) -> float:
        """Seconds a token; nothing at first, so that drafts are tried."""
        return max(0.0, statistics.median(self._slopes)) if self._slopes else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        before, took = self._last
        if before not in (0, tokens):
            self._slopes.append((seconds - took) / (tokens - before))
        self._last = (tokens, seconds)


class Speculation:
    """Chooses the number of drafts for requests of one worker.

    Args:
        most: drafts of one request in one step; 0 is never.
        adaptive: whether measurements decide; otherwise it is always `most`.
    """

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most = most
        self._adaptive = adaptive
        self._cost = StepCost()
        self._token_seconds = 0.0
        self._draft_seconds = 0.0
        """What the drafter takes for one token of one request."""
        self._typical = Acceptance(_HOPE, 1.0 - _HOPE)
        self._steps = 0
        self._next_probe = 0

    def newcomer(self) -> Acceptance:
        """What to expect of a request of which nothing is known: what others have shown."""
        rate = self._typical.rate
        return Acceptance(rate, 1.0 - rate)

    def observe_step(self, tokens: int, given: int, drafted: int, seconds: float, draft_seconds: float) -> None:
        """A step without prompts.

        Args:
            tokens: computed.
            given: tokens that requests have got from it.
            drafted: tokens drafted for the next step.
            seconds: of the whole step, `draft_seconds` among them.
        """
        self._steps += 1
        self._cost.observe(tokens, seconds - draft_seconds)
        if given:
            self._token_seconds = _blend(self._token_seconds, seconds / given)
        if drafted:
            self._draft_seconds = _blend(self._draft_seconds, draft_seconds / drafted)

    def observe_drafts(self, request: Acceptance, drafted: int, accepted: int) -> None:
        """What became of a request's drafts."""
        if drafted:
            request.observe(drafted, accepted)
            self._typical.observe(drafted, accepted)

    def choose(self, request: Acceptance) -> int:
        """Tokens to draft for a request."""
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
