"""A place in a stack, and the process that fills it: another one when it ends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from paceline.core.errors import PacelineError, UnavailableError
from paceline.services.serve.child import Child

SETTLED_SECONDS = 5.0
"""Who ends sooner after its start is likely to do so again."""
MOST_FAILURES = 5
"""Ends in a row, each soon after a start; then the stack ends."""
_PAUSES = (0.25, 10.0)
"""Seconds before the first of several starts in a row, and at most."""


class Post:
    """Owns one process at a time, from `fill` on.

    Args:
        start: starts a process. It gets the address at which the one before it listened, or "".
        ready: returns a process's address as soon as it serves. Raises PacelineError where it does not.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[Child]],
        ready: Callable[[Child], Awaitable[str]],
        tell: Callable[[str], None],
    ) -> None:
        self._start = start
        self._ready = ready
        self._tell = tell
        self._address = ""
        self._child: Child | None = None

    async def fill(self) -> Child:
        """Starts a process."""
        starting = asyncio.ensure_future(self._start(self._address))
        try:
            self._child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._child = await starting  # somebody has to stop it
            raise
        return self._child

    async def ready(self) -> str:
        """The address of its process, once that serves. Raises PacelineError where it does not."""
        assert self._child is not None
        self._address = await self._ready(self._child)
        return self._address

    async def keep(self, stack_serves: Callable[[], bool]) -> None:
        """Fills the post again whenever its process ends.

        Raises:
            PacelineError: it ended before the stack served, or again and again soon after it was started.
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
            await self._fill_again()

    async def _fill_again(self) -> None:
        """Returns when the new process serves, or has ended."""
        child = await self.fill()
        try:
            await self.ready()
        except PacelineError as error:
            if not child.exited.done():
                self._tell(str(error))
                await child.stop(0.0, asyncio.Event())

    async def clear(self, grace: float, hurry: asyncio.Event) -> None:
        """Stops the process, if there is one; `keep` must have been cancelled."""
        if self._child is not None and not self._child.exited.done():
            await self._child.stop(grace, hurry)


def pause_before_start(failures: int) -> float:
    """Seconds, drawn at random around a figure that doubles with each failure: those that failed together should not
    start together."""
    first, longest = _PAUSES
    pause: float = min(longest, first * 2**failures)
    return pause * random.uniform(0.5, 1.5)
