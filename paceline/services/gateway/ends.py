"""When members of the fleet ended, as evidence about the failures of requests."""

from __future__ import annotations

import time
from collections.abc import Collection

MEMBERS_KEPT = 1000
"""Members whose last end is remembered."""


class Ends:
    """The last time that each member ended or stopped answering. Instants are of time.monotonic()."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        """By id, the oldest first."""

    def note(self, worker_id: str) -> None:
        """Record that a member has ended, or does not answer."""
        self._ended.pop(worker_id, None)
        self._ended[worker_id] = time.monotonic()
        if len(self._ended) > MEMBERS_KEPT:
            del self._ended[next(iter(self._ended))]

    def any_since(self, instant: float, others_than: Collection[str]) -> bool:
        """Return whether a member has ended after an instant. Members in `others_than` do not count."""
        return any(at > instant and worker_id not in others_than for worker_id, at in self._ended.items())
