"""The steps of a pool worker: they run one after the other on the compute thread, and pass results on to the calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.metrics import Family, Sample
from paceline.core.pooling import PoolWish
from paceline.core.step_loads import StepLoads
from paceline.engine.compute_thread import EncodeJob
from paceline.kernels.encoding import Between
from paceline.models.pooling.model import PoolResult, TextRow
from paceline.proto import worker_pb2
from paceline.services.pool.pool_calls import PoolCall, PoolPiece, StepPlanner
from paceline.services.worker.pool_counts import PoolCounts
from paceline.services.worker.pool_messages import to_messages

POOL_STEPS = Family("pool_steps", "Steps that computed inputs of one or several requests together")
POOL_WAITING = Family("pool_waiting_tokens", "Tokens of inputs that no step computes yet", "gauge")

MEASURED_TOKENS = 128
"""Least number of tokens of a step from which the speed is measured."""
WEIGHT = 0.2
"""Weight of the newest step in the measured speed."""

log = logging.getLogger(__name__)


class RunsInputs(Protocol):
    """The part of a `PoolingModel` that steps need."""

    def run(self, inputs: Sequence[TextRow], wish: PoolWish) -> list[PoolResult]:
        """Compute inputs in one pass. Raises InvalidRequestError if the model cannot compute them."""


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call with the queue of its results. An error in the queue ends the call."""

    call: PoolCall
    results: asyncio.Queue[tuple[list[worker_pb2.Pooled], worker_pb2.Report] | PacelineError]


class PoolSteps:
    """Plans and launches steps while there are inputs.

    While a step is computed, the next one is launched already if it would be full. Otherwise it waits for the end, so
    that inputs which arrive meanwhile are part of it.

    Args:
        launch: runs a job on the compute thread. Jobs run in the order of the calls.
    """

    def __init__(self, model: RunsInputs, planner: StepPlanner, launch: Callable[[EncodeJob], None]) -> None:
        self.model: RunsInputs | None = model
        """The model; None while it is not loaded. It changes only while there are no calls."""
        self._planner = planner
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._calls: dict[PoolCall, RunningCall] = {}
        self._in_flight = 0
        self.tokens_per_second = 0.0
        """Measured speed; 0 before the first step that is large enough."""
        self._counts = PoolCounts()
        self._steps = 0
        self.loads = StepLoads()
        """Times of steps by their tokens, for the planner."""

    @property
    def waiting_tokens(self) -> int:
        """Number of tokens that no step computes yet."""
        return sum(call.left_len for call in self._calls)

    @property
    def waiting_calls(self) -> int:
        """Number of calls of which no input has been planned."""
        return sum(call.ranges == deque([(0, len(call.inputs))]) for call in self._calls)

    def add(self, call: PoolCall) -> RunningCall:
        """Begin to compute the inputs of a call. Call `remove` at its end in any case."""
        running = self._calls[call] = RunningCall(call, asyncio.Queue())
        self._launch_steps()
        return running

    def remove(self, call: PoolCall) -> None:
        """Forget a call. Inputs that a step computes already are computed to the end, and their results dropped."""
        self._calls.pop(call, None)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics."""
        yield from self._counts.samples()
        yield Sample("steps", self._steps, POOL_STEPS)
        yield Sample("pool_waiting_tokens", self.waiting_tokens, POOL_WAITING)

    def _launch_steps(self) -> None:
        while self._in_flight < 2 and (not self._in_flight or self.waiting_tokens >= self._planner.step_tokens):
            pieces = self._planner.plan(self._calls, self.tokens_per_second, time.monotonic())
            if not pieces:
                return
            self._in_flight += 1
            self._launch(self._job(pieces))

    def _job(self, pieces: list[PoolPiece]) -> EncodeJob:
        messages: list[list[worker_pb2.Pooled]] = []
        seconds = 0.0

        def run(between: Between) -> None:
            nonlocal seconds
            began = time.perf_counter()
            # A call that was removed may have been planned already. Its inputs are few, at most a step.
            inputs = [row for piece in pieces for row in piece.inputs]
            assert self.model is not None
            results = iter(self.model.run(inputs, pieces[0].call.wish))
            for piece in pieces:
                own = [next(results) for _ in piece.inputs]
                messages.append(list(to_messages(piece.first, own)))
            seconds = time.perf_counter() - began

        def end(error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(self._take, pieces, messages, seconds, error)

        return EncodeJob(run, end)

    def _take(
        self, pieces: list[PoolPiece], messages: list[list[worker_pb2.Pooled]], seconds: float, error: Exception | None
    ) -> None:
        """Pass the results of a step on to its calls, and launch the next one."""
        self._in_flight -= 1
        self._steps += 1
        if error is not None:
            self._note_failure(pieces, error)
        else:
            tokens = sum(piece.tokens for piece in pieces)
            self._note_speed(tokens, seconds)
            self.loads.count(tokens, 0, seconds)
            for piece, own in zip(pieces, messages, strict=True):
                if (running := self._calls.get(piece.call)) is not None:
                    report = worker_pb2.Report()
                    report.chunks.add(first=piece.first, tokens=piece.tokens, step_ms=1000 * seconds)
                    running.results.put_nowait((own, report))
                self._counts.add(len(piece.inputs), piece.tokens)
        self._launch_steps()

    def _note_speed(self, tokens: int, seconds: float) -> None:
        if tokens >= MEASURED_TOKENS and seconds > 0:
            rate = tokens / seconds
            before = self.tokens_per_second
            self.tokens_per_second = rate if not before else before + WEIGHT * (rate - before)

    def _note_failure(self, pieces: list[PoolPiece], error: Exception) -> None:
        """End the call of a step that failed. If the step had several calls, each is computed alone, because it is not
        known which of them is at fault."""
        if len(pieces) == 1:
            if (running := self._calls.get(pieces[0].call)) is not None:
                running.results.put_nowait(_told(error))
            return
        for piece in pieces:
            piece.call.put_back(piece)


def _told(error: Exception) -> PacelineError:
    if isinstance(error, InvalidRequestError):
        return error
    log.error("a step failed", exc_info=error)
    return UnavailableError(f"the model failed: {type(error).__name__}: {error}")
