"""The requests that run now, by their owners and the ids that their clients know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class RunningRequests:
    """The running requests of one gateway. Several may have one id, because clients choose ids."""

    def __init__(self) -> None:
        self._running: dict[str, list[tuple[str, Callable[[], None]]]] = {}
        """For each id the owner of each request, and the function that ends it."""

    @contextlib.contextmanager
    def running(self, request_id: str, owner: str, abort: Callable[[], None]) -> Iterator[None]:
        """Make a request known while the context is open.

        Args:
            owner: the digest of the caller's key; "" if the caller has none.
            abort: ends the request; does nothing if it has ended.
        """
        own = owner, abort
        requests = self._running.setdefault(request_id, [])
        requests.append(own)
        try:
            yield
        finally:
            requests.remove(own)
            if not requests:
                del self._running[request_id]

    def abort(self, request_id: str, may_end: Callable[[str], bool]) -> None:
        """End all requests with this id whose owner `may_end` accepts; there may be none."""
        for owner, abort in self._running.get(request_id, ()):
            if may_end(owner):
                abort()
