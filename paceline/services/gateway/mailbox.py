"""From who may not wait to the one task that does."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, as many as come. An asyncio.Queue would take more calls, and this is for every token."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def is_empty(self) -> bool:
        return not self._items

    async def get(self) -> T:
        while not self._items:
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._items.popleft()
