"""The clock of a simulation: events in the order of their instants."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """A queue of calls, each at an instant in seconds. Calls at the same instant come in the order of `at`."""

    def __init__(self) -> None:
        self.now = 0.0
        """The simulated instant of the event under way, in seconds."""
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, instant: float, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call of a function for an instant, or for now if the instant has passed."""
        self._count += 1
        heapq.heappush(self._queue, (max(instant, self.now), self._count, call, arguments))

    def after(self, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call of a function `seconds` from now."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Carry out events in order, until none is left or `is_over` returns True after an event."""
        while self._queue:
            self.now, _, call, arguments = heapq.heappop(self._queue)
            call(*arguments)
            if is_over():
                return
