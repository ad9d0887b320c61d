"""Shares of several gateways in the limits of a key. Pure logic.

Each gateway tells the others, in its heartbeat, how much a key wants and uses of each limit there. All compute the same
shares from this. What is wanted is shared in proportion, and what is left of a limit in equal parts. So a key that
stays below its limit can come to any gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.services.gateway.http.access.keys import KeyLimits
from paceline.services.gateway.http.access.minute_limit import Part

LEFT = 0.02
"""Part of a limit that is always shared equally, so that a gateway can serve the first requests that come to it."""


class Use(Protocol):
    """The report of a gateway about one key."""

    name: str
    wanted_requests: float
    """Requests per minute that came lately, refused ones included."""
    wanted_tokens: float
    """Tokens per minute that these requests would use."""
    wanted_running: float
    """Requests that run, or were refused because others run."""
    requests: int
    """Requests of the last minute."""
    tokens: int
    """Tokens of the last minute."""
    running: int
    """Requests that run or wait now."""


@dataclass(frozen=True, slots=True)
class KeyParts:
    """The parts of a key's limits that one gateway may use."""

    requests: Part = Part()
    tokens: Part = Part()
    places: int | None = None
    """Requests that may run here; None is no limit."""


def parts_of(limits: KeyLimits, own: str, uses: Mapping[str, Use | None], is_current: bool) -> KeyParts:
    """Return the parts of a key's limits for the gateway `own`.

    Args:
        uses: what each gateway tells about the key; None if the key does not come there.
        is_current: whether the gateways have told this lately; if not, they share equally.
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
    """Return the share of each gateway, by what each wants of a limit. The shares add up to 1."""
    total = sum(wanted)
    equal = 1 / len(wanted)
    if limit is None or total < LEFT * LEFT:
        return [equal] * len(wanted)
    in_proportion = min(total / limit, 1 - LEFT)
    return [in_proportion * each / total + (1 - in_proportion) * equal for each in wanted]


def _places(most: int | None, shares: Sequence[float], index: int) -> int | None:
    """Return how many of `most` requests may run at a gateway, so that the numbers of all add up to `most`."""
    if most is None:
        return None
    # Shares are fractions in floating point, whose sums may be a little off.
    ends = [int(end * most + 0.5 + 1e-9) for end in (0.0, *itertools.accumulate(shares))]
    return ends[index + 1] - ends[index]
