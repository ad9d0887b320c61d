"""The thread that copies blocks between the device's pool and the host's arena, one batch at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.engine.compute_pool import LAST, CopyBatch
from paceline.engine.pool_directory import PeerPools
from paceline.kernels.block_copies import BlockCopies

LOOK_SECONDS = 1.0
"""Longest time between two checks for peers that have ended, in seconds."""

Done = Callable[[CopyBatch, float, float, int], None]
"""A function that is called with a copied batch, seconds of copying, seconds in the queue, and blocks from other
pools.
"""


class _CopyTask(NamedTuple):
    """A batch in the queue. The lowest rank is copied first, and within a rank the lowest number."""

    rank: int
    number: int
    copies: CopyBatch | None
    """The batch; None ends the thread."""
    asked: float
    """Instant of submission, on time.perf_counter(), in seconds."""


class Copier:
    """Copies batches of blocks. `run` needs a thread of its own, and returns after a call of `end`.

    Args:
        peers: pools that are asked for a block before it is loaded from the arena.
        on_done: called on the copying thread after each batch.
    """

    def __init__(self, block_copies: BlockCopies, peers: PeerPools | None, on_done: Done) -> None:
        self._block_copies = block_copies
        self._peers = peers
        self._on_done = on_done
        self._tasks: queue.PriorityQueue[_CopyTask] = queue.PriorityQueue()
        self._numbers = itertools.count()

    def submit(self, copies: CopyBatch) -> None:
        self._tasks.put(_CopyTask(copies.rank, next(self._numbers), copies, time.perf_counter()))

    def end(self) -> None:
        """End `run` after all batches that were submitted before."""
        self._tasks.put(_CopyTask(LAST + 1, next(self._numbers), None, 0.0))

    def run(self) -> None:
        # The thread works for a few milliseconds in a second, and requests wait for it. So it gets a higher priority
        # than threads that compute.
        with contextlib.suppress(OSError):  # only root may raise a priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) - 10)
        while (task := self._next()).copies is not None:
            copies, began = task.copies, time.perf_counter()
            loads = copies.loads
            if loads and self._peers is not None:
                loads = self._peers.load(loads)
            if loads:
                pool_slots, arena_slots, *_ = zip(*loads)
                self._block_copies.load(arena_slots, pool_slots).wait()
            if copies.stores:
                pool_slots, arena_slots, *_ = zip(*copies.stores)
                self._block_copies.store(pool_slots, arena_slots).wait()
            seconds = time.perf_counter() - began
            self._on_done(copies, seconds, began - task.asked, len(copies.loads) - len(loads))

    def _next(self) -> _CopyTask:
        if self._peers is None:
            return self._tasks.get()
        while True:
            self._peers.drop_ended()
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=LOOK_SECONDS)
