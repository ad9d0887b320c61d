"""Which request sits in which row of the device's state, and what the device has to be told of that."""

from __future__ import annotations

from paceline.engine.request import Request
from paceline.engine.step import Grown, Joined


class Seats:
    """Owns the rows.

    Args:
        rows: requests that run at the same time.
        max_model_len: tokens of the longest context.
    """

    def __init__(self, rows: int, max_model_len: int) -> None:
        self._free = list(range(rows))
        self._max_model_len = max_model_len
        self._updates: list[Joined | Grown] = []

    def seat(self, request: Request) -> bool:
        """Whether the request, which is in the pool, has a row; it gets one where one is free."""
        if request.row is None and self._free:
            assert request.pool_tables is not None
            request.row = self._free.pop()
            self._updates.append(
                Joined(
                    request.row,
                    list(request.token_ids),
                    request.prompt_len,
                    request.drafter_len,
                    request.sampling,
                    request.limit(self._max_model_len),
                    _copied(request.pool_tables),
                    request.pool_capacity,
                    request.matcher,
                )
            )
        return request.row is not None

    def grow(self, request: Request) -> None:
        """The request has more blocks in the pool."""
        if request.row is not None and request.pool_tables is not None:
            self._updates.append(Grown(request.row, _copied(request.pool_tables), request.pool_capacity))

    def give_back(self, request: Request) -> None:
        """No step includes the request."""
        if request.row is not None:
            self._free.append(request.row)
            request.row, request.drafts = None, 0

    def take_updates(self) -> tuple[Joined | Grown, ...]:
        """What the device has to know with the next step, in order."""
        updates, self._updates = tuple(self._updates), []
        return updates


def _copied(tables: list[list[int]]) -> list[list[int]]:
    """As they are now: the host goes on changing its own."""
    return [list(table) for table in tables]
