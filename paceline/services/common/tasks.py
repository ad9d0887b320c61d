"""Ending background tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

_AGAIN_SECONDS = 0.2

log = logging.getLogger(__name__)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until they have ended, however they end.

    Once is not enough: up to Python 3.11, `asyncio.wait_for`, which the Redis client uses to send, loses a cancellation
    that comes together with what it waits for.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()):
            log.debug("%s ended with %r", task.get_name(), error)
