"""Full garbage collections at times when they delay few requests."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK_SECONDS = 1.0
WORTHWHILE = 10
"""Number of collections of the middle generation after which a full collection is worthwhile; Python's default, too."""
BUSY_SECONDS = 120.0
"""Least time between two full collections while requests run, in seconds."""
_NEVER = 1 << 30


async def collect_when_idle(running: Callable[[], int]) -> None:
    """Run full collections while no request runs, and rarely otherwise, until cancelled. Python's own full collections
    are switched off meanwhile.

    A full collection visits all objects and stops the process while it does. With 1,000 open streams this takes 0.3 s,
    and Python would do it every few seconds. The younger generations are collected as usual. Nearly all objects need no
    collection, because they are freed with their last reference.

    Args:
        running: function that returns the number of requests that run.
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
        seconds: time since the last full collection, in seconds.
        running: number of requests that run now.
    """
    return collections >= WORTHWHILE and (running == 0 or seconds >= BUSY_SECONDS)
