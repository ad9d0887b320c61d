"""Shares of several gateways in the limits of a key. Pure logic.

Each gateway reports in its heartbeat how much a key wants and uses of each limit there. All gateways compute the same
shares from these reports. A gateway gets the part that is wanted there, in proportion, and an equal part of the rest of
the limit. So a key that stays below its limit can send its requests to any gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.services.gateway.http.access.keys import KeyLimits
from paceline.services.gateway.http.access.minute_limit import Part

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
