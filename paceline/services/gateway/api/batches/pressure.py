"""Decides which lines of batches may run now, so that they use only idle places of workers, and which ones wait."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from math import ceil
from typing import Any, NamedTuple, TypeVar

from paceline.services.gateway.routing.candidates import Candidate

T = TypeVar("T")

RESERVE = 0.25
"""Fraction of the workers' places that batches leave free, so that a client's request finds a place at once."""
FIRST_LINES = 8
"""Number of lines that may run at once until a line has ended."""
BUSY_SECONDS = 1.0
"""Shortest time between the starts of two lines while requests of clients run, in seconds."""


class LinePlaces(NamedTuple):
    """Numbers of places of workers that lines may use. A place holds one sequence."""

    most: int
    """Number of places without the reserve."""
    free: int
    """Number of places among `most` that no sequence occupies, as far as this gateway knows."""


def places_of(fleet: Iterable[Candidate], decodes: bool = True) -> LinePlaces:
    """Return the places for lines. A line needs a place at a worker of each role that computes, if there is any.

    Args:
        decodes: whether the model generates, so that each line needs a decode worker.
    """
    found: list[LinePlaces] = []
    for role in ("decode", "prefill", "pool"):
        ready = [each for each in fleet if each.member.role == role and each.member.state == "ready"]
        if ready:
            places = sum(each.member.max_seqs for each in ready)
            used = sum(each.member.load.running + each.member.load.waiting + each.unreported for each in ready)
            most = max(1, places - ceil(RESERVE * places))  # the only place is for both
            found.append(LinePlaces(most, max(0, most - used)))
        elif role == "decode" and decodes:
            return LinePlaces(0, 0)
    if not found:
        return LinePlaces(0, 0)
    return LinePlaces(min(each.most for each in found), min(each.free for each in found))


class LineGate:
    """The gate through which each line goes before it runs.

    The gate lets lines in while places are free, at a lower rate while requests of clients run, and not at all while
    such requests wait. The gate's own limit of running lines grows by 1 with each line that ends, and is halved if
    workers turn out to have no room, for example because their KV memory is full.

    Args:
        has_workers: returns whether a worker is ready that every line needs.
        places: returns the places for lines.
        waiting: returns the number of requests of clients, of all gateways, that wait for a worker.
        clients: returns the number of requests of clients that run here.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        has_workers: Callable[[], bool],
        places: Callable[[], LinePlaces],
        waiting: Callable[[], int],
        clients: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._has_workers = has_workers
        self._places = places
        self._waiting = waiting
        self._clients = clients
        self._clock = clock
        self._limit = float(FIRST_LINES)
        self._running: dict[asyncio.Task[Any], bool] = {}
        """Lines that run, the newest last, and whether each has been stopped."""
        self._queue: deque[asyncio.Future[None]] = deque()
        self._entering = 0
        """Number of lines that were let in and have not begun to run."""
        self._opened = -BUSY_SECONDS

    def __len__(self) -> int:
        """Return the number of lines that run or were let in and are about to run."""
        return len(self._running) + self._entering

    @property
    def is_shut(self) -> bool:
        """Whether no further line can run before another worker is ready."""
        return not self._has_workers() and len(self) >= self._places().most

    async def run(
        self, work: Callable[[], Coroutine[Any, Any, T]], *, first: bool, on_enter: Callable[[], object]
    ) -> T | None:
        """Wait until a line may run, run it, and return its result; None if it was stopped for waiting clients.

        Args:
            first: whether the line goes before new lines, because it has run before.
            on_enter: called when the line begins to run.
        """
        await self._enter(first)
        on_enter()
        task = asyncio.create_task(work())
        self._running[task] = False
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._running[task]
        self._limit += 1
        self.open()
        return None if task.cancelled() else task.result()

    def note_busy(self) -> None:
        """Halve the limit of running lines, because workers had no room for a line."""
        self._limit = max(1.0, min(self._limit, len(self)) / 2)

    def open(self) -> None:
        """Let waiting lines in, as many as may run now. If requests of clients wait, stop the newest lines instead."""
        if (waiting := self._waiting()) > 0:
            wanted = waiting - sum(self._running.values())
            staying = [task for task, is_stopped in self._running.items() if not is_stopped]
            for task in staying[len(staying) - max(0, min(wanted, len(staying))) :]:
                self._running[task] = task.cancel()
            return
        while self._queue and len(self) < self._limit:
            most, free = self._places()
            now = self._clock()
            is_slow = self._clients() > 0 and now < self._opened + BUSY_SECONDS
            # Lines that have just begun may not be known to any worker yet.
            if len(self) >= most or free <= self._entering or is_slow:
                return
            if (turn := self._queue.popleft()).cancelled():
                continue  # Its line was given up and has not run since.
            self._opened = now
            turn.set_result(None)
            self._entering += 1

    async def _enter(self, first: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if first:
            self._queue.appendleft(turn)
        else:
            self._queue.append(turn)
        try:
            self.open()
            await turn
        finally:
            if not turn.cancelled():
                self._entering -= 1
            elif turn in self._queue:
                self._queue.remove(turn)


class RefusedLines:
    """Lines of a batch that were refused because their key has used up a limit, and that wait for another try.

    A line is tried again after the time that its refusal names, or earlier if another line of the batch has ended. Its
    end may have freed one of the key's concurrent requests. While a line waits, no further line should be read, because
    it would be refused, too.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        """Numbers of the lines whose last try was refused."""
        self._turns: deque[asyncio.Future[None]] = deque()
        self._none = asyncio.Event()
        self._none.set()

    async def wait(self, number: int, seconds: float) -> None:
        """Wait until a line that was refused may be tried again.

        Args:
            seconds: time that the refusal names.
        """
        self._numbers.add(number)
        self._none.clear()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * random.uniform(1.0, 1.5)):
                    await turn
        finally:
            if turn in self._turns:
                self._turns.remove(turn)

    def note_end(self, number: int) -> None:
        """Note that a line was tried and not refused. Let a waiting line try again."""
        self._numbers.discard(number)
        if not self._numbers:
            self._none.set()
        while self._turns:
            if not (turn := self._turns.popleft()).done():
                turn.set_result(None)
                return

    async def wait_for_none(self) -> None:
        """Wait until no line is refused any more."""
        await self._none.wait()
