"""Decode workers that wait for their prompts: each gets its hold in the moment in which it is filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.core.errors import StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.hold import Hold, State
from paceline.services.kvtransfer.ledger import Ledger


class Adoptions:
    """Makes holds their owners' as soon as they are filled.

    Args:
        clock: that of the ledger, in seconds.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}
        """By request and attempt."""

    def note(self, key: Key) -> None:
        """This hold may have been filled, or have ended."""
        change = self._waiting.get(key[:2])
        if change is not None and not change.done():
            change.set_result(None)

    async def run(self, session: int, key: Key) -> Hold:
        """Waits until a hold is filled, and adopts it.

        Args:
            session: of the worker that reserved it.
            key: any of its generations since then.

        Raises:
            StaleError: the hold is not, or not any more, this worker's; or it got it before, or waits for it already.
        """
        if key[:2] in self._waiting:
            raise StaleError(f"hold {key} is being waited for already")
        try:
            while (hold := self._own(session, key)).state is not State.FILLED:
                change = self._waiting[key[:2]] = asyncio.get_running_loop().create_future()
                await change
            return self._ledger.adopt(session, hold.key, self._clock())
        finally:
            self._waiting.pop(key[:2], None)

    def _own(self, session: int, key: Key) -> Hold:
        hold = self._ledger.find(key, self._clock())
        if hold.owner != session:
            raise StaleError(f"hold {key} belongs to another worker")
        if hold.state is State.ACTIVE:
            raise StaleError(f"hold {key} was adopted already")
        return hold
