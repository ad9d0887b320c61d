"""Rows of the device's state: the request in each row, and changes of rows that the next step must tell the device."""

from __future__ import annotations

from collections.abc import Collection

from paceline.engine.request import Request
from paceline.engine.step import RowAssigned, RowEncoded, RowExtended, RowUpdate


class RowAllocator:
    """Assigns rows of the device's state to requests, and collects the changes that the device does not know yet.

    Args:
        rows: largest number of requests that run at the same time.
        max_model_len: tokens of the longest context.
    """

    def __init__(self, rows: int, max_model_len: int) -> None:
        self._count = rows
        self._free = list(range(rows))
        self._max_model_len = max_model_len
        self._updates: list[RowUpdate] = []

    def assign(self, request: Request, tables: list[list[int]]) -> bool:
        """Give a request a row. Return False if no row is free.

        Args:
            tables: the request's tables in the pool.
        """
        if self._free:
            request.row = self._free.pop()
            self._updates.append(
                RowAssigned(
                    request.row,
                    list(request.token_ids),
                    request.prompt_len,
                    request.drafter_len,
                    request.sampling,
                    request.limit(self._max_model_len),
                    _copied(tables),
                    request.capacity_of(tables),
                    request.context.media,
                    request.context.adapter,
                )
            )
            for span in request.encodings:
                self.encode(request, span)
        return request.row is not None

    def encode(self, request: Request, span: int) -> None:
        """Note that a span's encoding is available, so that the next step tells the device its slots."""
        if request.row is not None:
            self._updates.append(RowEncoded(request.row, span, request.encodings[span]))

    def extend(self, request: Request, tables: list[list[int]]) -> None:
        """Note that a request's tables in the pool have grown."""
        if request.row is not None:
            self._updates.append(RowExtended(request.row, _copied(tables), request.capacity_of(tables)))

    def release(self, request: Request) -> None:
        """Take back the row of a request that no step in flight includes."""
        if request.row is not None:
            self._free.append(request.row)
            request.row, request.drafts = None, 0

    def take_updates(self) -> tuple[RowUpdate, ...]:
        """Return the changes since the last call, in order, for the next step."""
        updates, self._updates = tuple(self._updates), []
        return updates

    def check(self, requests: Collection[Request]) -> list[str]:
        """Return errors in the rows, as sentences, given all requests."""
        rows = [*self._free, *(request.row for request in requests if request.row is not None)]
        return [] if sorted(rows) == list(range(self._count)) else [f"the free and the used rows are {sorted(rows)}"]


def _copied(tables: list[list[int]]) -> list[list[int]]:
    # The scheduler changes its own tables while the step is on its way.
    return [list(table) for table in tables]
