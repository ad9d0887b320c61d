"""The threads for work on bodies. They are shared: callers take turns, so that no caller occupies all of them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

WAITING_THREADS, MOST_THREADS = 4, 16
"""Number of threads in addition to one for each core, because a thread waits while a long text is tokenized; and the
largest number of threads in all."""


ALONE_SECONDS, ALONE_SHARE = 0.008, 0.02
"""CPU time of work that holds the interpreter for about as long as a token takes, in seconds; and the part of the time
that what exceeds it may take for one owner. So no more than one of a hundred tokens of others waits for such work."""


@dataclass(slots=True)
class _Pace:
    """The large bodies of one owner, which are parsed one after the other."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    next: float = 0.0
    """Instant before which the next one is not parsed, on time.monotonic()."""

    def measure(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` on this thread and set `next` by the time that it takes."""
        begun = time.thread_time()
        try:
            return work(*args)
        finally:
            spent = time.thread_time() - begun
            self.next = time.monotonic() + max(0.0, spent - ALONE_SECONDS) / ALONE_SHARE


class FairPool:
    """A pool of threads that serves the owners of waiting work in turn.

    Args:
        threads: number of threads. If there are several, one owner never occupies all of them.
        name: prefix of the threads' names.
    """

    def __init__(
        self, threads: int = min(MOST_THREADS, WAITING_THREADS + (os.cpu_count() or 1)), name: str = "body"
    ) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._turns = OwnerTurns(threads)
        self._turns_alone = OwnerTurns(1)
        self._paces: dict[str, _Pace] = {}

    async def run(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """Wait for the owner's turn, run `work` on a thread, and return its result.

        Raises the errors of `work`. If this call is cancelled, work that has begun runs to its end.
        """
        loop = asyncio.get_running_loop()
        await self._turns.take(owner)
        begun = self._executor.submit(contextvars.copy_context().run, work, *args)
        begun.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.give_back, owner))
        try:
            return await asyncio.wrap_future(begun)
        finally:
            del begun  # it has the error, whose traceback has this frame: a cycle that only a collection would free

    async def run_alone(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """Run `work` as `run` does, but only one such work at a time, and one owner's for a small part of the time.

        This is for work that holds the interpreter, such as parsing a large body. More threads would not make it
        faster, and the event loop would wait for each of them in turn. After work of more than ALONE_SECONDS, the next
        work of its owner waits. Callers without an API key do not wait.
        """
        pace = self._pace(owner)
        async with pace.lock:
            await asyncio.sleep(pace.next - time.monotonic())
            await self._turns_alone.take(owner)
            try:
                return await self.run(owner, pace.measure, work, *args)
            finally:
                self._turns_alone.give_back(owner)

    def _pace(self, owner: str) -> _Pace:
        if not owner:
            return _Pace()
        for each, pace in list(self._paces.items()):
            if not pace.lock.locked() and pace.next < time.monotonic():
                del self._paces[each]
        return self._paces.setdefault(owner, _Pace())

    def close(self, last: Callable[[], object] = lambda: None) -> None:
        """Let all work that has begun end, then call `last` on a thread, and wait until it has returned."""
        self._executor.submit(last)
        self._executor.shutdown()


class OwnerTurns:
    """A small number of places, such as threads. If several owners wait for a free place, they get places in turn.

    If there are several places, one owner never has all of them. Callers without an API key are the owner "". They may
    have all places, because a gateway that asks for no key has no other owners.

    Args:
        count: number of places.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: Counter[str] = Counter()
        """Number of places that each owner has taken."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Calls of `take` that wait, by owner. The first owner in the dict gets the next free place."""

    def waiting(self, owner: str) -> int:
        """Return how many calls of `take` wait for an owner's place."""
        return sum(not turn.done() for turn in self._waiting.get(owner, ()))

    async def take(self, owner: str) -> None:
        """Wait for the owner's turn and take a place. If this call is cancelled, no place is taken."""
        if self._has_place(owner):
            self._taken[owner] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)  # the turn came just now
            raise

    def give_back(self, owner: str) -> None:
        """Give a place back, and assign free places to the owners whose turn it is."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        for each in list(self._waiting):
            turns = self._waiting[each]
            while turns and turns[0].done():
                turns.popleft()  # it waits no longer
            if turns and self._has_place(each):
                self._taken[each] += 1
                turns.popleft().set_result(None)
                self._waiting[each] = self._waiting.pop(each)  # the others are next
            if not turns:
                del self._waiting[each]

    def _has_place(self, owner: str) -> bool:
        most = max(1, self._count - 1) if owner else self._count
        return self._taken.total() < self._count and self._taken[owner] < most
