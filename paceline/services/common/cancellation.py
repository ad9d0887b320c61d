"""Cancellations around calls of gRPC, which loses some cancellations and raises others that nobody asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


async def heeding_cancellation(operation: Awaitable[T]) -> T:
    """Await an operation of a gRPC call, so that a cancellation of the current task is never lost.

    gRPC drops a cancellation that comes together with the call's status, and returns the status instead. Without this
    function, a timeout around the operation would never end, and a cancelled task would go on.
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
    that ends with it counts as cancelled, so its failure would go unnoticed, and a waiter for its result could wait for
    ever.
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
