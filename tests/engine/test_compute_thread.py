"""The compute thread: encoders share it with steps, by turns that are about equally long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.turns import PAGE_BYTES, DecodeTurns, Turns
from paceline.engine.compute_thread import ComputeThread, EncodeJob, EncodingStoppedError, Launch
from paceline.engine.step import Step, StepResult
from paceline.kernels.encoding import Between


class Bench:
    """A compute thread with a clock of its own, and a record of what it does.

    Args:
        step_seconds: time that each step takes.
        turns: the turns of the worker, if it shares its cores.
    """

    def __init__(self, step_seconds: float = 3.0, turns: Turns | None = None) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.errors: list[Exception | None] = []
        self.step_seconds = step_seconds
        self.thread = ComputeThread(self, turns, self._take_result, lambda _: None, clock=lambda: self.now)

    def execute(self, step: Step) -> StepResult:
        if self.step_seconds < 0:
            raise RuntimeError("no such instruction")
        self.now += self.step_seconds
        self.log.append("step")
        return StepResult([])

    def _take_result(self, step: Step, result: StepResult, yields: bool) -> None:
        pass

    def launch_steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.thread.launched.put(Launch(Step(()), None))

    def launch_job(self, run: Callable[[Between], None]) -> None:
        self.thread.launched.put(EncodeJob(run, self.errors.append))

    def pieces(self, count: int) -> Callable[[Between], None]:
        """Return the work of an encoder with this many pieces of one second."""

        def run(between: Between) -> None:
            for index in range(count):
                if index:
                    between()
                self.now += 1
                self.log.append("piece")

        return run

    def run(self) -> list[str]:
        self.thread.launched.put(None)
        self.thread.run()
        return self.log


def test_an_encoder_and_steps_have_the_thread_for_equal_times() -> None:
    bench = Bench(step_seconds=3)
    bench.launch_job(bench.pieces(7))
    bench.launch_steps(3)
    # How long steps take is not known before the first one.
    assert bench.run() == ["piece", "step", *["piece"] * 3, "step", *["piece"] * 3, "step"]
    assert bench.errors == [None]
    assert (bench.thread.busy_seconds, bench.thread.encode_seconds) == (9, 7)


def test_steps_that_are_shorter_than_a_piece_wait_for_one_piece() -> None:
    bench = Bench(step_seconds=0.25)
    bench.launch_job(bench.pieces(3))
    bench.launch_steps(4)
    assert bench.run() == ["piece", "step", "piece", "step", "piece", "step", "step"]


class Calls(DecodeTurns):
    """Turns that note how each piece and each step ends."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(PAGE_BYTES)), 0, None)
        self.ends: list[str] = []

    def end(self, hands_over: bool = False) -> bool:
        self.ends.append("step")
        return super().end(hands_over)

    def end_piece(self) -> None:
        self.ends.append("piece")
        super().end_piece()


def test_pieces_do_not_end_as_steps() -> None:
    bench = Bench(turns=(turns := Calls()))
    bench.launch_job(bench.pieces(3))
    bench.launch_steps(1)
    assert bench.run() == turns.ends == ["piece", "step", "piece", "piece"]


def test_an_error_of_an_encoder_is_its_own() -> None:
    bench = Bench()

    def fail(between: Between) -> None:
        between()
        raise ValueError("no image")

    bench.launch_job(fail)
    bench.launch_steps(1)
    assert bench.run() == ["step"]
    assert [str(error) for error in bench.errors] == ["no image"]


def test_an_error_of_a_step_between_two_pieces_is_the_engines() -> None:
    bench = Bench(step_seconds=-1)
    bench.launch_job(bench.pieces(2))
    bench.launch_steps(1)
    with pytest.raises(RuntimeError, match="no such instruction"):
        bench.run()
    assert len(bench.errors) == 1


def test_who_stops_does_not_wait_for_an_encoder() -> None:
    bench = Bench()

    def stop(between: Between) -> None:
        bench.thread.stopping = True
        between()
        raise AssertionError("it went on")

    bench.launch_job(stop)
    bench.launch_steps(1)
    bench.launch_job(bench.pieces(1))
    assert bench.run() == []
    assert [type(error) for error in bench.errors] == [EncodingStoppedError, EncodingStoppedError]
