"""Metrics of fetching and decoding media."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter

from paceline.core.errors import BusyError, InvalidRequestError
from paceline.services.gateway.planning.media.items import ItemKind

Phase = Literal["fetch", "decode"]


class MediaMetrics:
    """Counts of items by kind, phase and outcome.

    Args:
        registry: where the metrics are shown; None shows them nowhere.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        help = "Images, videos and audio clips; refused: not allowed, broken, too large or not there; busy: no room"
        self._items = Counter("paceline:media_items", help, ["kind", "phase", "outcome"], registry=registry)
        help = "Seconds in which items were fetched, or waited for a process and were decoded"
        self._seconds = Counter("paceline:media_seconds", help, ["kind", "phase"], registry=registry)
        help = "Bytes of files that were fetched"
        self._bytes = Counter("paceline:media_bytes", help, ["kind"], registry=registry)
        for kind in get_args(ItemKind):
            for phase in get_args(Phase):  # creates the series, so that rates include the first item
                self._items.labels(kind, phase, "ok")

    @contextlib.contextmanager
    def counted(self, kind: ItemKind, phase: Phase) -> Iterator[None]:
        """Count an item, its time and its outcome, which is how the `with` block ends."""
        began, outcome = time.monotonic(), "failed"
        try:
            yield
            outcome = "ok"
        except InvalidRequestError:
            outcome = "refused"
            raise
        except BusyError:
            outcome = "busy"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._items.labels(kind, phase, outcome).inc()
            self._seconds.labels(kind, phase).inc(time.monotonic() - began)

    def count_bytes(self, kind: ItemKind, size: int) -> None:
        """Count the bytes of a file that was read."""
        self._bytes.labels(kind).inc(size)
