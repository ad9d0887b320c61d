"""Small parts for asyncio: ending background tasks, timeouts, waiting until no operation runs, and cancellations.

gRPC drops some cancellations, and sometimes raises CancelledError although the task was not cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

_AGAIN_SECONDS = 0.2

log = logging.getLogger(__name__)

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, with or without an error.

    Cancelling once is not enough: up to Python 3.11, `asyncio.wait_for`, which the Redis client uses to send, loses a
    cancellation that comes together with the awaited result.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            log.debug("%s ended with %r", task.get_name(), error)


async def to_the_end(work: Awaitable[T]) -> T:
    """Return the result of work that a cancellation cannot end, such as that of a thread.

    If this task is cancelled meanwhile, it ends after the work, so that it keeps the locks that the work needs.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        if not task.cancelled() and (error := task.exception()):
            log.debug("work that was cancelled ended with %r", error)
        raise


class StallWatch:
    """A cheap timeout for waits that are frequent and rarely time out. Call `close` at the end.

    One timer serves many waits and checks from time to time, because a timer for each wait would cost as much as the
    awaited work itself.

    Args:
        seconds: longest wait, in seconds.
        on_stall: called once when a wait takes longer.
    """

    def __init__(self, seconds: float, on_stall: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._look_again: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start to measure a wait. If a wait is being measured already, it starts again."""
        self._since = self._loop.time()
        if self._look_again is None:
            self._look_again = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Stop measuring, because the wait is over."""
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


class InUse:
    """A count of operations that run now, with a way to wait until none runs."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        self.count += 1
        self._idle.clear()

    def end(self) -> None:
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count an operation as running while the context is open."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()


async def heeding_cancellation(operation: Awaitable[T]) -> T:
    """Await an operation of a gRPC call, so that a cancellation of the current task is never lost.

    gRPC drops a cancellation that comes at the same time as the call's status, and returns the status instead. Without
    this function, a timeout around the operation might never end, and a cancelled task would go on.
    """
    try:
        return await operation
    finally:
        if is_cancelled():
            raise asyncio.CancelledError


@contextlib.contextmanager
def own_cancellation(error: Callable[[], Exception]) -> Iterator[None]:
    """Raise `error()` in place of a CancelledError of the body, unless the current task was cancelled.

    gRPC raises a CancelledError when a call or its channel was closed, and so does a future that was cancelled. A task
    that ends with a CancelledError counts as cancelled, so its failure would go unnoticed, and a task that awaits its
    result could wait for ever.
    """
    try:
        yield
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise error() from None


def is_cancelled() -> bool:
    """Return whether the current task was cancelled. A CancelledError alone does not show this, because gRPC also
    raises one when a call was cancelled.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
