"""A limit of an amount per minute, and the shares of several gateways in it. Pure: instants are arguments, in seconds.

Two rules apply together. First, at most the limit is used in any minute: the charges of the last 60 seconds are
counted. Second, a token bucket paces a caller that uses its whole limit, so that its bursts do not delay other callers.
The bucket fills at the rate of the limit and holds the amount of ten seconds.

Each gateway reports in its heartbeat how much a key wants and uses of each limit there. All gateways compute the same
shares from these reports. A gateway gets the part that is wanted there, in proportion, and an equal part of the rest of
the limit. So a key that stays below its limit can send its requests to any gateway.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.services.gateway.http.access.keys import KeyLimits

MINUTE = 60.0
BURST_SECONDS = 10.0
"""Capacity of the bucket, as the time in which it fills, in seconds."""
LEAST_BURST = 10
"""Least capacity of the bucket, so that a small limit allows some requests at once."""
GRAIN = 0.1
"""Charges within this time share one entry of the log, which bounds the memory, in seconds."""


@dataclass(slots=True, eq=False)
class Charge:
    """The amount of a limit that was used within the same GRAIN of time."""

    at: float
    amount: int
    counts: bool = True
    """Whether the charge is less than a minute old."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a limit that one of several gateways may use."""

    share: float = 1.0
    """Share of the rate, from 0 to 1."""
    elsewhere: int | None = 0
    """Amount that the other gateways have used in the last minute; None if unknown."""

    def ceiling(self, limit: int) -> float:
        """Return the amount that may be used at this gateway in a minute."""
        return limit * self.share if self.elsewhere is None else limit - self.elsewhere


ALL = Part()


class MinuteLimit:
    """One limit and its use in the last minute. Decides when a further amount may be used."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._used = 0
        """Sum of the amounts in the log, which covers the last minute."""
        self._log: deque[Charge] = deque()
        self._level = self._burst(1.0)
        self._filled = now

    def wait(self, amount: int, now: float, part: Part = ALL) -> float:
        """Return the seconds until `amount` may be used; 0 if now. For an amount above the limit, use the limit."""
        self._advance(now, part.share)
        missing = min(amount, self._burst(part.share)) - self._level
        paced = missing * MINUTE / (self.per_minute * part.share) if missing > 0 else 0.0
        return max(paced, self._wait_for_room(amount, now, part))

    def take(self, amount: int, now: float) -> Charge:
        """Use an amount, and return the charge, which `correct` can change later."""
        self._level -= amount
        return self._note(amount, now)

    def correct(self, charge: Charge, more: int, now: float) -> Charge:
        """Change a charge by an amount. Returns the charge to pass to the next correction.

        Args:
            more: amount to add; negative to take an amount back.
        """
        self._expire(now)
        self._level -= more
        if not charge.counts:
            return self._note(more, now) if more > 0 else charge
        charge.amount += more
        self._used += more
        return charge

    def used(self, now: float) -> int:
        """Return the amount that was used at this gateway in the last minute."""
        self._expire(now)
        return self._used

    def remaining(self, now: float, part: Part = ALL) -> int:
        """Return the amount that may still be used in this minute."""
        return max(0, math.floor(part.ceiling(self.per_minute) - self.used(now)))

    def reset(self, now: float) -> float:
        """Return the seconds until the newest charge is a minute old, so that the whole limit is free."""
        self._expire(now)
        return self._log[-1].at + MINUTE - now if self._log else 0.0

    def _wait_for_room(self, amount: int, now: float, part: Part) -> float:
        elsewhere = part.elsewhere or 0
        excess = self._used + min(amount, part.ceiling(self.per_minute) + elsewhere) - part.ceiling(self.per_minute)
        if excess <= 0:
            return 0.0
        for charge in self._log:
            excess -= charge.amount
            if excess <= 0:
                return charge.at + MINUTE - now
        # The rest is what others used. It ends within a minute, at about the rate at which it was used.
        return MINUTE * min(1.0, excess / elsewhere) if elsewhere else MINUTE

    def _note(self, amount: int, now: float) -> Charge:
        at = math.ceil(now / GRAIN) * GRAIN
        if not self._log or self._log[-1].at < at:
            self._log.append(Charge(at, 0))
        self._log[-1].amount += amount
        self._used += amount
        return self._log[-1]

    def _advance(self, now: float, share: float) -> None:
        self._expire(now)
        gained = (now - self._filled) * self.per_minute * share / MINUTE
        self._level = min(self._burst(share), self._level + gained)
        self._filled = now

    def _expire(self, now: float) -> None:
        while self._log and self._log[0].at + MINUTE <= now:
            oldest = self._log.popleft()
            oldest.counts = False
            self._used -= oldest.amount

    def _burst(self, share: float) -> float:
        """Return the capacity of the bucket for a share of the limit."""
        most = max(self.per_minute * BURST_SECONDS / MINUTE, min(LEAST_BURST, self.per_minute))
        return max(1.0, most * share)


LEFT = 0.02
"""Share of a limit that is always divided equally, so that each gateway can serve the first requests of a key."""


class Use(Protocol):
    """The report of a gateway about one key."""

    name: str
    wanted_requests: float
    """Rate of requests that have arrived lately, including refused ones, in requests per minute."""
    wanted_tokens: float
    """Rate of tokens that these requests would use, in tokens per minute."""
    wanted_running: float
    """Number of requests that run, plus the number lately refused because too many run."""
    requests: int
    """Number of requests that were served in the last minute."""
    tokens: int
    """Number of tokens that were charged in the last minute."""
    running: int
    """Number of requests that run or wait now."""


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of a key's limits that one gateway may use."""

    requests: Part = Part()
    tokens: Part = Part()
    places: int | None = None
    """Largest number of requests that may run at this gateway; None for no limit."""


def parts_of(limits: KeyLimits, own: str, uses: Mapping[str, Use | None], is_current: bool) -> KeyParts:
    """Return the parts of a key's limits for the gateway `own`.

    Args:
        uses: the report of each gateway about the key, by the gateway's name; None if the key is not used there.
        is_current: whether the reports are recent. If not, the gateways share the limits equally.
    """
    names = sorted({*uses, own})
    told = [uses.get(name) for name in names]
    others = [use for name, use in zip(names, told, strict=True) if name != own and use is not None]
    index = names.index(own)
    if not is_current:
        equal = [1 / len(names)] * len(names)
        part = Part(equal[0], None)
        return KeyParts(part, part, _places(limits.max_concurrent, equal, index))
    wanted = [(use.wanted_requests, use.wanted_tokens, use.wanted_running) if use else (0, 0, 0) for use in told]
    per_request, per_token, per_place = zip(*wanted, strict=True)
    places = _places(limits.max_concurrent, shares_of(per_place, limits.max_concurrent), index)
    if places is not None and limits.max_concurrent is not None:
        # After the shares have changed, other gateways may still run more than their new part.
        places = min(places, limits.max_concurrent - sum(use.running for use in others))
    return KeyParts(
        Part(shares_of(per_request, limits.requests_per_minute)[index], sum(use.requests for use in others)),
        Part(shares_of(per_token, limits.tokens_per_minute)[index], sum(use.tokens for use in others)),
        places,
    )


def shares_of(wanted: Sequence[float], limit: int | None) -> list[float]:
    """Return the share of each gateway in a limit. The shares add up to 1.

    Args:
        wanted: the amount that each gateway wants.
        limit: the limit; None for no limit.
    """
    total = sum(wanted)
    equal = 1 / len(wanted)
    if limit is None or total < LEFT * LEFT:
        return [equal] * len(wanted)
    in_proportion = min(total / limit, 1 - LEFT)
    return [in_proportion * each / total + (1 - in_proportion) * equal for each in wanted]


def _places(most: int | None, shares: Sequence[float], index: int) -> int | None:
    """Return how many requests may run at a gateway. The numbers of all gateways add up to `most`.

    Args:
        most: largest number of running requests at all gateways together; None for no limit.
        index: index of the gateway in `shares`.
    """
    if most is None:
        return None
    # Shares are fractions in floating point, whose sums may be a little off.
    ends = [int(end * most + 0.5 + 1e-9) for end in (0.0, *itertools.accumulate(shares))]
    return ends[index + 1] - ends[index]
