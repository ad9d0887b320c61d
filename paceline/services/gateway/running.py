"""The requests that run now, by the ids that their clients know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class RunningRequests:
    """The running requests of one gateway. Several may have one id, because clients choose ids."""

    def __init__(self) -> None:
        self._aborts: dict[str, list[Callable[[], None]]] = {}

    @contextlib.contextmanager
    def running(self, request_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """Make a request known while the context is open.

        Args:
            abort: ends the request; does nothing if it has ended.
        """
        aborts = self._aborts.setdefault(request_id, [])
        aborts.append(abort)
        try:
            yield
        finally:
            aborts.remove(abort)
            if not aborts:
                del self._aborts[request_id]

    def abort(self, request_id: str) -> None:
        """End all requests with this id; there may be none."""
        for abort in self._aborts.get(request_id, ()):
            abort()
