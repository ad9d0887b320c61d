"""How several gateways share the limits of a key: pure logic.

Each gateway tells the others, in its heartbeat, how much a key wants and uses of it. All compute the same shares from
this. A gateway that nobody asks for a key keeps a small share, with which it serves the first requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.services.gateway.access.minute_limit import Part

IDLE_SHARE = 0.02
"""Share that all gateways together keep of a limit, whatever they are asked for."""
NEGLIGIBLE = 0.001
"""Requests per second that count as no demand."""


class Use(Protocol):
    """What a gateway tells about one key."""

    name: str
    demand: float
    """Requests per second that it is asked for, refused ones included."""
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
    before: float = 0.0
    """Shares of the gateways before this one, in the order of their names."""
    running_elsewhere: int = 0
    """Requests that other gateways run."""

    def places(self, most: int) -> int:
        """Return how many of `most` requests may run here; while none runs, all gateways together have `most`."""
        own = _rounded((self.before + self.requests.share) * most) - _rounded(self.before * most)
        # After the shares have changed, other gateways may still run more than their new part.
        return min(own, most - self.running_elsewhere)


ALL_PARTS = KeyParts()


def parts_of(key: str, own: str, gateways: Mapping[str, Sequence[Use]], is_current: bool) -> KeyParts:
    """Return the parts of a key's limits for the gateway `own`.

    Args:
        gateways: what each gateway tells about the keys that it is asked for, by its name.
        is_current: whether the gateways have told this lately; if not, they share equally.
    """
    names = sorted({*gateways, own})
    index = names.index(own)
    if not is_current:
        share = 1 / len(names)
        return KeyParts(Part(share, None), Part(share, None), index * share)
    uses = {name: next((use for use in gateways.get(name, ()) if use.name == key), None) for name in names}
    demands = [0.0 if use is None else max(0.0, use.demand) for use in uses.values()]
    total = sum(demands)
    if total < NEGLIGIBLE:
        shares = [1 / len(names) for _ in names]
    else:
        shares = [(1 - IDLE_SHARE) * demand / total + IDLE_SHARE / len(names) for demand in demands]
    others = [use for name, use in uses.items() if name != own and use is not None]
    return KeyParts(
        Part(shares[index], sum(use.requests for use in others)),
        Part(shares[index], sum(use.tokens for use in others)),
        sum(shares[:index]),
        sum(use.running for use in others),
    )


def _rounded(places: float) -> int:
    # Shares are fractions in floating point, whose sums may be a little off.
    return int(places + 0.5 + 1e-9)
