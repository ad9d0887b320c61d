"""The header Retry-After of every refusal."""

from __future__ import annotations

import math
import random

JITTER = 0.1
"""Share of the time by which clients that are refused at the same time are spread, in addition to one second."""
MOST_SECONDS = 3600
"""Longest time that is told."""


def retry_after(seconds: float) -> int:
    """Return the whole seconds after which a client should come back, never less than `seconds`, up to MOST_SECONDS.

    Clients that are refused together are told different times, so that they do not come back together.
    """
    spread = seconds + random.uniform(0.0, 1.0 + JITTER * seconds)
    return min(MOST_SECONDS, max(1, math.ceil(seconds), math.floor(spread)))
