"""Noticing that something takes too long, where it usually does not and happens often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Calls `on_stall` once where a wait is longer than `seconds`. Must be closed.

    It looks now and then: a timer of its own for each wait would cost as much as what is waited for.
    """

    def __init__(self, seconds: float, on_stall: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._look_again: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._loop.time()
        if self._look_again is None:
            self._look_again = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """It is over."""
        self._since = None

    def close(self) -> None:
        self.end()
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited >= self._seconds:
            self._on_stall()
        else:
            self._look_again = self._loop.call_later(self._seconds - waited, self._look)
