"""The last actions of a host before its memory is freed: when its last worker leaves, and when the service ends."""

from __future__ import annotations

import asyncio
import contextlib

from paceline.services.common.tasks import InUse
from paceline.services.kvtransfer.evacuation import Evacuation, FindHosts
from paceline.services.kvtransfer.sessions import Sessions

READERS_SECONDS = 1.0
"""Time for gateways to begin the next attempts of requests whose worker has left, in seconds."""


class Departure:
    """The departure of a host's workers and of its service.

    Args:
        find_hosts: finds the hosts that get the hot prefixes of this host.
        address: address at which services of other hosts reach this one.
    """

    def __init__(self, sessions: Sessions, find_hosts: FindHosts, address: str) -> None:
        self.readers = InUse()
        """Calls in which other hosts read blocks of this one."""
        self._sessions = sessions
        self._evacuation = Evacuation(find_hosts, address)

    async def leave(self, session: int) -> int:
        """Note that a worker leaves soon. If no other worker stays, copy the hot prefixes to other hosts.

        Returns the number of copied blocks. Raises PacelineError if the session has ended.
        """
        memory = self._sessions.check(session)
        return await self._evacuation.run(memory) if self._sessions.is_last_to_leave(session) else 0

    async def close(self) -> None:
        """Stop copying blocks to other hosts, because the service ends."""
        await self._evacuation.close()

    async def drain(self, seconds: float) -> None:
        """Tell the workers to drain, and wait up to `seconds` until they and the readers of other hosts have gone.

        The next attempts of the workers' requests read their blocks from here, so the service stays a moment longer
        than the workers.
        """
        had_workers = bool(self._sessions.workers)
        self._sessions.leaving.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sessions.wait_until_left()
                if had_workers and self._sessions.memory is not None:
                    await self._evacuation.run(self._sessions.memory)
                if had_workers and self._evacuation.has_readers:
                    await asyncio.sleep(READERS_SECONDS)
                await self.readers.wait_until_idle()
