"""The engine: one thread that plans, computes and reports, until it is stopped.

It knows neither sockets nor event loops: commands come through a thread-safe queue, events leave through a callback.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.types import Key
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, SchedulerStats
from paceline.engine.step import ChunkResult, Event, Step

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a step."""

    def execute(self, step: Step) -> list[ChunkResult]:
        """One result for each chunk, in order."""


class Engine:
    """Drives a scheduler and a runner on a thread of its own.

    Args:
        on_events: called on the engine's thread after each step; must return at once.
        on_failure: called on the engine's thread when computing failed; the engine has stopped then.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._on_events = on_events
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.busy_seconds = 0.0
        """Time spent computing, since the start."""
        self._step_began: float | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the thread after the step under way."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def add(self, request: Request) -> None:
        self._inbox.put(lambda: self._scheduler.add(request))

    def remove(self, key: Key) -> None:
        """Confirmed by a `Removed` event, after which the request's blocks are touched no more."""
        self._inbox.put(lambda: self._scheduler.remove(key))

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        self._inbox.put(lambda: self._scheduler.grow(key, tables))

    def starve(self, key: Key) -> None:
        self._inbox.put(lambda: self._scheduler.starve(key))

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken so far; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def _run(self) -> None:
        try:
            idle = False
            while self._obey_commands(wait=idle):
                step = self._scheduler.plan()
                self._report()  # what commands and plan have caused need not wait for the step
                idle = step is None
                if step is not None:
                    self._step_began = began = time.perf_counter()
                    self._scheduler.apply(step, self._runner.execute(step))
                    self.busy_seconds += time.perf_counter() - began
                    self._step_began = None
                    self._report()
        except BaseException as error:
            log.exception("the engine failed")
            self._on_failure(error)

    def _report(self) -> None:
        if events := self._scheduler.take_events():
            self._on_events(events)

    def _obey_commands(self, wait: bool) -> bool:
        """Carries out what is in the inbox; with `wait`, sleeps until there is something. False means stop."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False
