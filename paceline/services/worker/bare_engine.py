"""An engine without requests, for workers whose device runs only encoders or pools inputs whole."""

from __future__ import annotations

import asyncio

from paceline.core.errors import UnavailableError
from paceline.core.turns import Turns
from paceline.engine.engine import Engine
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Step, StepResult
from paceline.services.worker.event_stream import ALIVE_SECONDS


class BareEngine:
    """An engine that only runs the pieces of `Engine.encode`.

    Args:
        turns: the worker's time slices; None if it shares its cores with no other worker.
    """

    def __init__(self, turns: Turns | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """A future that gets an exception if the engine fails, and never a result."""
        self.engine = Engine(
            Scheduler(Limits(max_batched_tokens=1, max_model_len=1, max_seqs=1)),
            _NoModel(),
            on_events=lambda events: None,
            on_failure=self._pass_failure,
            turns=turns,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the engine is idle or its piece under way began less than ALIVE_SECONDS ago."""
        return self.engine.step_seconds < ALIVE_SECONDS

    def _pass_failure(self, error: BaseException) -> None:
        """Pass the engine's error on to the event loop. Called on the engine's threads."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(UnavailableError(f"the engine failed: {error}"))


class _NoModel:
    """The runner of an engine without requests."""

    def execute(self, step: Step) -> StepResult:
        raise AssertionError("this worker has no steps of a scheduler")
