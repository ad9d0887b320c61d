"""Full garbage collections at a time when they delay little."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK_SECONDS = 1.0
WORTHWHILE = 10
"""Collections of the middle generation after which a full one is worthwhile, as is Python's default."""
BUSY_SECONDS = 120.0
"""Least time between two full collections while requests run, in seconds."""
_NEVER = 1 << 30


async def collect_when_idle(running: Callable[[], int]) -> None:
    """Run full collections while no request runs, and rarely otherwise, until cancelled. Meanwhile Python runs none by
    itself.

    A full collection looks at all objects and stops the process meanwhile. With 1,000 open streams this takes 0.3 s,
    and Python would do it every few seconds. The younger generations are collected as usual, and most objects need no
    collection at all, because they are freed with their last reference.

    Args:
        running: returns the number of requests that run.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    last = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if is_due(gc.get_count()[2], time.monotonic() - last, running()):
                gc.collect()
                last = time.monotonic()
    finally:
        gc.set_threshold(*before)


def is_due(collections: int, seconds: float, running: int) -> bool:
    """Return whether a full collection should run now.

    Args:
        collections: number of collections of the middle generation since the last full collection.
        seconds: time since the last full collection.
        running: number of requests that run now.
    """
    return collections >= WORTHWHILE and (running == 0 or seconds >= BUSY_SECONDS)
