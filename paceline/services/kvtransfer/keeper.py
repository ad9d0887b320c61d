"""The periodic work on a ledger: end expired leases, and check the ledger's consistency."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from paceline.services.kvtransfer.sessions import Sessions

_TICK_SECONDS = 0.5
_CHECK_SECONDS = 5.0
"""Longest time between two checks of a ledger that changes all the time, in seconds. After a tick without changes, it
is checked at once.
"""

log = logging.getLogger(__name__)


class Keeper:
    """A task that expires leases and checks the ledger of a host, from `start` to `stop`.

    Args:
        clock: the ledger's clock, in seconds.
    """

    def __init__(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        self.healthy = True
        """False after the ledger was found inconsistent, which only a restart can repair."""
        self._sessions = sessions
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._changed = False
        """Whether the ledger has changed since the last tick."""
        self._unchecked = False
        self._checked_at = clock()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="ledger keeper")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def note_change(self) -> None:
        """Note that the ledger has changed, so that it is checked again soon."""
        self._changed = True

    def check_balance(self) -> bool:
        """Check the ledger now and return whether it is consistent. If it is not, log the faults."""
        self._unchecked = False
        self._checked_at = self._clock()
        memory = self._sessions.memory
        wrong = memory.ledger.check() if memory is not None else []
        if wrong:
            self.healthy = False
            log.error("THE KV LEDGER IS OUT OF BALANCE, restart this host's services: %s", "; ".join(wrong[:10]))
        return not wrong

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                await self._tick()
                if (memory := self._sessions.memory) is not None:
                    await memory.sweep()
            except Exception:
                log.exception("unexpected error while keeping the ledger")
                self.healthy = False

    async def _tick(self) -> None:
        now = self._clock()
        self._sessions.end_reconciliation(now)
        memory = self._sessions.memory
        if memory is None:
            return
        memory.ledger.expire(now)
        overdue = memory.ledger.take_overdue()
        for key in overdue:
            log.warning(
                "lease %s ended: it was not renewed, or its worker is gone", key, extra={"request_id": key.request_id}
            )
            memory.adoptions.note(key)
        busy, self._changed = self._changed, False
        self._unchecked = self._unchecked or busy or bool(overdue)
        if self._unchecked and (not busy or now - self._checked_at >= _CHECK_SECONDS):
            self.check_balance()
        await self._sessions.settle()  # for example, the last worker that was awake has ended
