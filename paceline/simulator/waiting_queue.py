"""The requests for which no worker has room. The real queue also knows priorities and fair shares of keys."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from paceline.simulator.sequence import Sequence


class WaitingQueue:
    """Requests that wait: first those that lost their worker, then all others, each in order of arrival."""

    def __init__(self) -> None:
        self.waiting: dict[Sequence, None] = {}
        """The requests, in the order in which they began to wait."""
        self._queue: list[tuple[bool, int, Sequence]] = []
        """A heap, in which requests that have left stay until it is their turn."""
        self._tickets = 0

    def add(self, sequence: Sequence, first: bool) -> None:
        """Let a request wait.

        Args:
            first: whether it lost its worker, and so goes before requests that never had one.
        """
        self._tickets += 1
        self.waiting[sequence] = None
        heapq.heappush(self._queue, (not first, self._tickets, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a request, if it waits."""
        self.waiting.pop(sequence, None)

    def serve(self, place: Callable[[Sequence], bool]) -> None:
        """Place waiting requests in order.

        Args:
            place: a function that places or refuses a request. It returns False if there is no room, which ends the
                call.
        """
        while self._queue:
            sequence = self._queue[0][2]
            if sequence in self.waiting:
                if not place(sequence):
                    return
                self.remove(sequence)
            heapq.heappop(self._queue)
