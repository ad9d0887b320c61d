"""Work that is done side by side on one core: while n pieces are under way, each takes n times as long."""

from __future__ import annotations

from collections.abc import Callable

from paceline.simulator.events import Events


class Sharing:
    """The pieces of work that share one core."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._left: dict[Callable[[], object], float] = {}
        """Seconds that each piece would still take alone, by the function to call at its end."""
        self._since = 0.0
        """Instant for which the numbers in `_left` hold."""
        self._version = 0
        """Incremented at every change of the next end, so that events of earlier ends are ignored."""

    def add(self, seconds: float, done: Callable[[], object]) -> None:
        """Begin a piece of work.

        Args:
            seconds: time that the piece takes if no other piece is under way.
            done: called at its end; a function of its own for each piece.
        """
        self._advance()
        self._left[done] = seconds
        self._schedule()

    def _advance(self) -> None:
        passed, self._since = self._events.now - self._since, self._events.now
        for done in self._left:
            self._left[done] -= passed / len(self._left)

    def _schedule(self) -> None:
        self._version += 1
        if self._left:
            seconds = max(0.0, min(self._left.values())) * len(self._left)
            self._events.after(seconds, self._end, self._version)

    def _end(self, version: int) -> None:
        if version == self._version:
            self._advance()
            first = min(self._left, key=self._left.__getitem__)
            del self._left[first]
            self._schedule()
            first()
