"""The time after a start in which workers of the previous, killed service report their leases in its arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.services.common.layout import difference
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.ledger.claim import Claim

RECONCILE_SECONDS = 3.0
"""Duration of the reconciliation. Workers come back within about a second. A live worker that has not come back by the
end has noticed that its session broke, and no longer touches its blocks, because the duration exceeds GRACE_SECONDS.
"""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A worker that has come back, with its claims."""

    worker_id: str
    layout: KVLayout
    claims: list[Claim]


class Reconciliation:
    """Owns the arena of the service that was killed, until the reconciliation is over.

    No blocks are given out meanwhile: all workers that attach wait for `over`.

    Args:
        now: time on the ledger's clock, in seconds.
    """

    def __init__(self, arena: Arena, now: float) -> None:
        self.arena = arena
        self.ends = now + RECONCILE_SECONDS
        self.over = asyncio.Event()
        self._claimants: dict[int, Claimant] = {}

    def add(self, session: int, claimant: Claimant) -> None:
        self._claimants[session] = claimant

    def remove(self, session: int) -> None:
        """Forget the claims of a worker that left again. If it is alive, it comes back with newer claims."""
        self._claimants.pop(session, None)

    def claims(self) -> Iterator[Claim]:
        for claimant in self._claimants.values():
            yield from claimant.claims

    def workers(self) -> dict[int, str]:
        """Return the ids of the workers that have come back, by the number of their session."""
        return {session: claimant.worker_id for session, claimant in self._claimants.items()}

    def layout(self) -> KVLayout | None:
        """Return the workers' layout; None if no worker came back. Raises ConfigError if their layouts differ."""
        layouts = [claimant.layout for claimant in self._claimants.values()]
        for other in layouts[1:]:
            if other != layouts[0]:
                raise ConfigError(f"its workers have different layouts: {difference(layouts[0], other)}")
        return layouts[0] if layouts else None
