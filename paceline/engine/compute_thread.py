"""The thread that computes steps and, between them, encoders.

An encoder runs a piece at a time. Between two pieces, a waiting step is computed if the encoder has used the thread for
at least as long as the last step. So on CPUs, encoding makes steps at most about twice as slow, and neither steps nor
encoders starve. On a GPU the times are those of launches, because the end of a piece does not wait for the device.
There a step may have to wait for all pieces of one encoding.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.metrics import Family, Sample
from paceline.core.turns import Turns
from paceline.engine.step import Step, StepResult
from paceline.kernels.encoding import Between

PLAN_SECONDS = 0.003
"""Time before this worker's turn at which planning of the next step begins. If planning takes longer, the turn of other
workers becomes longer.
"""

STEP_SECONDS = Family(
    "worker_step_seconds",
    "busy: computing steps; encode: computing encodings; bubble: idle although there was work; yielded: idle while "
    "other workers had their turn; plan and output: work of the host thread at the same time",
)


class EncodingStoppedError(Exception):
    """The engine stops, so the encoder must not go on. `Between` raises this error."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """The work of an encoder for one input, to be done on the compute thread.

    Args:
        run: encodes the input and stores the result. It calls its argument between pieces of some milliseconds.
        on_end: called on the compute thread when `run` has returned, or with the error that it has raised.
    """

    run: Callable[[Between], None]
    on_end: Callable[[Exception | None], None]


class Runner(Protocol):
    """The computing side of the engine. Each step begins with the state that the previous step has left on the
    device.
    """

    def execute(self, step: Step) -> StepResult:
        """Compute a step. Calls must not overlap."""


class Launch(NamedTuple):
    """A step on its way to the compute thread."""

    step: Step
    idle_until: float | None
    """Instant at which the first work after an idle time came, on time.perf_counter(); None if the engine was not
    idle.
    """


class ComputeThread:
    """The loop of the compute thread, and counters of its time.

    Args:
        turns: the turns of this worker, if other workers use the same cores.
        on_result: called after each step, with its result and whether it is the turn of other workers now.
        on_turn: called a little before this worker's next turn, with whether other workers will want another turn.
    """

    def __init__(
        self,
        runner: Runner,
        turns: Turns | None,
        on_result: Callable[[Step, StepResult, bool], None],
        on_turn: Callable[[bool], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.launched: queue.SimpleQueue[Launch | EncodeJob | Callable[[], None] | None] = queue.SimpleQueue()
        """Work in the order of its computation, and functions to call between two steps; None ends the thread."""
        self.stopping = False
        """Set when the thread stops: it then drops work that has not begun."""
        self.busy_seconds = 0.0
        """Time spent on steps, since the start."""
        self.encode_seconds = 0.0
        """Time spent on encoders, without the steps between their pieces."""
        self.bubble_seconds = 0.0
        """Time that the thread waited although a step could be planned. A wait for blocks counts as idle time instead.
        """
        self.yielded_seconds = 0.0
        """Time that the thread left to other workers in their turns."""
        self._turns = turns
        self._on_result = on_result
        self._on_turn = on_turn
        self._clock = clock
        self._began: float | None = None
        self._ended = 0.0
        self._last_step_seconds = 0.0
        self._piece_seconds = 0.0
        """Time that the encoder has had the thread since the last step."""
        self._failed_step: BaseException | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step, or the current piece of an encoder, began; 0 while there is none."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def samples(self) -> Iterator[Sample]:
        """Yield the figures for metrics. Any thread may call this."""
        for kind in ("busy", "encode", "bubble", "yielded"):
            figure = f"{kind}_seconds"
            yield Sample(figure, getattr(self, figure), STEP_SECONDS, {"kind": kind})

    def run(self) -> None:
        """Compute steps and encoders until the thread is told to end. Raises the error of a step that failed."""
        self._ended = self._clock()
        while (launched := self.launched.get()) is not None:
            if isinstance(launched, EncodeJob):
                self._encode(launched)
            elif not isinstance(launched, Launch):
                launched()
            elif not self.stopping:
                self._execute(launched)

    def _execute(self, launch: Launch) -> None:
        began = self._began = self._clock()
        # Time without any work does not count as bubble. It ends with the command that brought work.
        self.bubble_seconds += max(0.0, began - max(self._ended, launch.idle_until or self._ended))
        if self._turns is not None:
            self._turns.begin()
            asked, began = max(began, self._ended), self._clock()
            self.yielded_seconds += max(0.0, began - asked)
        result = self.runner.execute(launch.step)
        hands_over = any(chunk.hands_over for chunk in launch.step.chunks)
        yields = self._turns is not None and self._turns.end(hands_over)
        self._began, self._ended = None, self._clock()
        self._last_step_seconds = self._ended - began
        self.busy_seconds += self._last_step_seconds
        self._on_result(launch.step, result, yields)
        if self._turns is not None and yields and not self.stopping:
            left = self._turns.wait(PLAN_SECONDS)
            self._on_turn(left > 0)
            # Time of planning counts as time of the others until their turn ends.
            asked, self._ended = self._ended, self._clock() + left
            self.yielded_seconds += self._ended - asked

    # ---- encoders

    def _encode(self, job: EncodeJob) -> None:
        """Run a job. An error of the job is passed to the job's owner. An error of a step between its pieces ends the
        thread.
        """
        error: Exception | None = EncodingStoppedError() if self.stopping else None
        if error is None:
            self._piece_seconds = 0.0
            self._begin_piece()
            try:
                job.run(self._between)
            except Exception as own:
                error = own
            if self._began is not None:
                self._end_piece()
        job.on_end(error)
        if self._failed_step is not None:
            raise self._failed_step

    def _between(self) -> None:
        """Compute a step between two pieces of an encoder, if a step waits and it is the step's turn.

        Raises EncodingStoppedError if the engine stops.
        """
        self._end_piece()
        if self.stopping:
            raise EncodingStoppedError
        if self._piece_seconds >= self._last_step_seconds and not self.launched.empty():
            launched = self.launched.get()
            if isinstance(launched, EncodeJob):
                raise RuntimeError("a second encoder was launched before the first one had ended")
            if launched is None:
                self.launched.put(None)
                raise EncodingStoppedError
            self._piece_seconds = 0.0
            try:
                self._execute(launched) if isinstance(launched, Launch) else launched()
            except BaseException as error:
                self._failed_step = error
                raise
        self._begin_piece()

    def _begin_piece(self) -> None:
        if self._turns is not None:
            self._turns.begin()
        self._began = self._clock()

    def _end_piece(self) -> None:
        assert self._began is not None
        self._ended = self._clock()
        self._piece_seconds += self._ended - self._began
        self.encode_seconds += self._ended - self._began
        self._began = None
        if self._turns is not None:
            self._turns.end_piece()
