"""Counts the bytes of media that are in memory, so that requests together stay within --media-memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paceline.core.errors import BusyError
from paceline.services.gateway.http.errors import MediaError


class MemoryBudget:
    """The memory for media of all requests.

    Args:
        total: size of the memory, in bytes.
        decoders: number of items that are decoded at the same time. Together they take at most half of the memory.
    """

    def __init__(self, total: int, decoders: int) -> None:
        self.total = total
        self._decoders = decoders
        self.used = 0

    @property
    def of_request(self) -> int:
        """Largest number of bytes that one request may have in memory."""
        return self.total // 2

    @property
    def of_item(self) -> int:
        """Largest size of one decoded item in bytes: at most half of a request's share, to leave room for others."""
        return self.total // (2 * max(2, self._decoders))

    @contextlib.contextmanager
    def request(self) -> Iterator[RequestBudget]:
        """Yield the budget of one request. When the block ends, the budget's bytes count as free again."""
        budget = RequestBudget(self)
        try:
            yield budget
        finally:
            budget.give(budget.used)

    @contextlib.contextmanager
    def hold(self, count: int) -> Iterator[None]:
        """Count bytes of one request while the block runs. Raises the errors of `RequestBudget.take`."""
        with self.request() as budget:
            budget.take(count)
            yield


class RequestBudget:
    """One request's share of the memory for media: how much it has taken, and how much more it may take."""

    def __init__(self, memory: MemoryBudget) -> None:
        self.memory = memory
        self.used = 0

    @property
    def of_next_item(self) -> int:
        """Largest size that the next decoded item may have, in bytes."""
        return min(self.memory.of_item, self.memory.of_request - self.used)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Callable[[int], None]]:
        """Yield a function like `take`. When the block ends, the bytes that the function counted are given back."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            self.take(count)
            taken += count

        try:
            yield take
        finally:
            self.give(taken)

    def take(self, count: int) -> None:
        """Count bytes of the request's media that came into memory.

        Raises:
            MediaError: the request has too many bytes.
            BusyError: all requests together have too many bytes.
        """
        if self.used + count > self.memory.of_request:
            raise MediaError(
                f"the media of this request need more than {self.memory.of_request} bytes of memory, half of "
                "--media-memory; send fewer or smaller ones"
            )
        if self.memory.used + count > self.memory.total:
            raise BusyError("the memory for images, videos and audio is full; try again later")
        self.used += count
        self.memory.used += count

    def give(self, count: int) -> None:
        """Count bytes of the request's media that have left memory."""
        self.used -= count
        self.memory.used -= count
