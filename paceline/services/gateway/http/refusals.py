"""Refusals for want of room: their reasons, and the header Retry-After."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from paceline.core.errors import BusyError

JITTER = 0.1
"""Share of the time by which clients that are refused at the same time are spread, in addition to one second."""
MOST_SECONDS = 3600
"""Longest time that is told."""

Reason = Literal["queue_full", "priority", "overload", "timeout", "deadline", "background", "limit"]
"""Why a request is refused. queue_full: --max-waiting requests wait. priority: more urgent ones took its place.
overload: the objective of its class would be missed. timeout: --queue-seconds. deadline: its client's own. background:
no worker is idle. limit: a limit of its key."""
CountRefusal: TypeAlias = Callable[[str, Reason], object]
"""A function that counts a refused request, by its class and the reason."""
REASONS: tuple[Reason, ...] = get_args(Reason)


class NoRoomError(BusyError):
    """A request is refused because the fleet has no room for it in time.

    Args:
        seconds: after which the client should come back.
    """

    def __init__(self, message: str, reason: Reason, seconds: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.seconds = seconds


def retry_after(seconds: float) -> int:
    """Return the whole seconds after which a client should come back, never less than `seconds`, up to MOST_SECONDS.

    Clients that are refused together are told different times, so that they do not come back together.
    """
    spread = seconds + random.uniform(0.0, 1.0 + JITTER * seconds)
    return min(MOST_SECONDS, max(1, math.ceil(seconds), math.floor(spread)))
