"""How many requests a worker takes, and who among them waits for blocks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from paceline.core.errors import BusyError, UnavailableError
from paceline.core.types import Key


class Admission:
    """The places of one worker.

    Args:
        places: requests at a time.
    """

    def __init__(self, places: int) -> None:
        self.active = 0
        """Requests that were admitted and have not ended."""
        self.draining = False
        """Whether new requests are refused."""
        self._places = places
        self._preempted: list[Key] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request. Raises BusyError or UnavailableError."""
        if self._preempted:
            raise BusyError(f"{len(self._preempted)} requests that were preempted wait for blocks, and they come first")
        if self.draining:
            raise UnavailableError("this worker is draining")
        if self.active >= self._places:
            raise BusyError(f"this worker runs {self.active} requests, as many as it may")
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self._idle.set()

    @contextlib.contextmanager
    def waiting_for_blocks(self, key: Key) -> Iterator[Callable[[], bool]]:
        """A place in the line of preempted requests, before all newcomers; yields what says whether it is the first."""
        self._preempted.append(key)
        try:
            yield lambda: self._preempted[0] == key
        finally:
            self._preempted.remove(key)

    @property
    def waiting(self) -> int:
        """Requests that were preempted and wait for blocks."""
        return len(self._preempted)

    async def drain(self, seconds: float) -> None:
        """Waits so long at most for what runs. Set `draining` before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
