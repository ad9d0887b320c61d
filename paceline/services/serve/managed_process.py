"""One service of a stack and the process that runs it. A process that ends is started again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from paceline.core.errors import PacelineError, UnavailableError
from paceline.services.serve.child import Child

SETTLED_SECONDS = 5.0
"""If a process ends within this many seconds of its start, that is a failure, and is likely to happen again."""
MOST_FAILURES = 5
"""Number of failures in a row after which the service is given up."""
_PAUSES = (0.25, 10.0)
"""Shortest and longest mean of the random pause before a new start, in seconds."""


class ManagedProcess:
    """The owner of one process at a time, from `start` to `stop`.

    Args:
        launch: starts a process. Its argument is the address of the previous process; "" for the first one.
        wait_ready: waits until a process serves and returns its address. Raises PacelineError if it takes too long.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        launch: Callable[[str], Awaitable[Child]],
        wait_ready: Callable[[Child], Awaitable[str]],
        tell: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._wait_ready = wait_ready
        self._tell = tell
        self._address = ""
        self._child: Child | None = None

    async def start(self) -> Child:
        """Launch the process, at the address of its predecessor if there was one, and return it."""
        launching = asyncio.ensure_future(self._launch(self._address))
        try:
            self._child = await asyncio.shield(launching)
        except asyncio.CancelledError:
            self._child = await launching  # `stop` has to find it
            raise
        return self._child

    async def ready(self) -> str:
        """Wait until the process serves and return its address. Raises PacelineError if it does not serve in time."""
        assert self._child is not None
        self._address = await self._wait_ready(self._child)
        return self._address

    @property
    def address(self) -> str:
        """Address at which the process or its predecessor serves; empty before `ready`."""
        return self._address

    @property
    def is_ready(self) -> bool:
        """Whether the process runs and has announced that it serves."""
        return self._child is not None and self._child.is_ready and not self._child.exited.done()

    async def supervise(self, stack_serves: Callable[[], bool]) -> None:
        """Start a new process whenever the process ends.

        Raises:
            PacelineError: the process ended before the stack served, or again and again soon after a start.
        """
        failures = 0
        while True:
            child, since = self._child, time.monotonic()
            assert child is not None
            await asyncio.wait({child.exited})
            if not stack_serves():
                raise child.failure()
            soon = not child.is_ready or time.monotonic() < since + SETTLED_SECONDS
            failures = failures + 1 if soon else 0
            if failures == MOST_FAILURES:
                raise UnavailableError(f"{child.failure()}; {failures} times in a row now, soon after its start")
            self._tell(f"{child.failure()}; starting it again")
            await asyncio.sleep(pause_before_start(failures))
            await self.start()
            await self.ready_or_stopped()

    async def ready_or_stopped(self) -> None:
        """Wait until the process serves. Stop it if it does not serve in time."""
        child = self._child
        assert child is not None
        try:
            await self.ready()
        except PacelineError as error:
            if not child.exited.done():
                self._tell(str(error))
                await child.stop(0.0, asyncio.Event())

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Stop the process, if one runs. `supervise` must have been cancelled before.

        Args:
            grace: seconds from SIGTERM until the process is killed.
            hurry: when this is set, the process is killed at once.
        """
        if self._child is not None and not self._child.exited.done():
            await self._child.stop(grace, hurry)


def pause_before_start(failures: int) -> float:
    """Return seconds to wait before a start: random, around a value that doubles with each failure.

    Processes that failed together should not start together.
    """
    first, longest = _PAUSES
    pause: float = min(longest, first * 2**failures)
    return pause * random.uniform(0.5, 1.5)
