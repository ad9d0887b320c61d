"""The time after a start in which workers of a service that ended say what they hold in its arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.services.common.layout import difference
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.claim import Claim

RECONCILE_SECONDS = 3.0
"""Workers come back within about a second of our start. Who has not done so by then, and lives, has noticed that its
session broke, and stops before it could see others in its blocks: this is longer than the grace of a lost session."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A worker that has come back."""

    worker_id: str
    layout: KVLayout
    claims: list[Claim]


class Reconciliation:
    """Owns the arena of a service that ended, until it is over.

    Nobody gets a block meanwhile: all who come wait for `over`.
    """

    def __init__(self, arena: Arena, now: float) -> None:
        self.arena = arena
        self.ends = now + RECONCILE_SECONDS
        self.over = asyncio.Event()
        self._claimants: dict[int, Claimant] = {}

    def add(self, session: int, claimant: Claimant) -> None:
        self._claimants[session] = claimant

    def remove(self, session: int) -> None:
        """It went away again; where it lives, it comes back with newer claims."""
        self._claimants.pop(session, None)

    def claims(self) -> Iterator[Claim]:
        for claimant in self._claimants.values():
            yield from claimant.claims

    def workers(self) -> dict[int, str]:
        """Worker ids by session."""
        return {session: claimant.worker_id for session, claimant in self._claimants.items()}

    def layout(self) -> KVLayout | None:
        """What the workers agree on; None where nobody came. Raises ConfigError where they do not."""
        layouts = [claimant.layout for claimant in self._claimants.values()]
        for other in layouts[1:]:
            if other != layouts[0]:
                raise ConfigError(f"its workers have different layouts: {difference(layouts[0], other)}")
        return layouts[0] if layouts else None
