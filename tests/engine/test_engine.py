"""The engine's thread: it takes commands, sends events, and reports failures."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from paceline.core.turns import PAGE_BYTES, Turns
from paceline.core.types import Key
from paceline.engine.engine import Engine
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Computed, Event, Removed, Sampled, Step, StepResult
from tests.engine.toy_requests import ToyDevice, make_request

WAIT = 10.0


class BrokenRunner:
    def execute(self, step: Step) -> StepResult:
        raise RuntimeError("no such instruction")


class SlowRunner(ToyDevice):
    """A runner that computes a step only when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()
        self.steps = 0

    def execute(self, step: Step) -> StepResult:
        self.steps += 1
        self.began.set()
        self.go_on.wait(WAIT)
        return super().execute(step)


class Recorder(ToyDevice):
    """A device that records the request ids of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: queue.Queue[set[str]] = queue.Queue()

    def execute(self, step: Step) -> StepResult:
        self.steps.put({chunk.key.request_id for chunk in step.chunks})
        return super().execute(step)


class TurnsOfOthers:
    """Turns that go to other workers after each step, until the test ends these turns."""

    page, slot = memoryview(bytearray(PAGE_BYTES)), 0

    def __init__(self) -> None:
        self.began: queue.Queue[None] = queue.Queue()
        self.ended: queue.Queue[float] = queue.Queue()

    def begin(self) -> None:
        pass

    def end(self, hands_over: bool) -> bool:
        return True

    def end_piece(self) -> None:
        pass

    def wait(self, early: float) -> float:
        self.began.put(None)
        return self.ended.get(timeout=WAIT)

    def expecting(self) -> float:
        return 0.0

    def received(self) -> None:
        pass


class Expecting(TurnsOfOthers):
    """Turns without other workers. After the first request, another one is expected for some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.expected = [seconds, 0.0]

    def end(self, hands_over: bool) -> bool:
        return False

    def expecting(self) -> float:
        return self.expected.pop(0) if self.expected else 0.0


def start(
    runner: ToyDevice | BrokenRunner | SlowRunner, turns: Turns | None = None
) -> tuple[Engine, queue.Queue[Event], queue.Queue[BaseException]]:
    events: queue.Queue[Event] = queue.Queue()
    failures: queue.Queue[BaseException] = queue.Queue()
    engine = Engine(
        Scheduler(Limits(16, 4096, 16)),
        runner,
        lambda batch: [events.put(event) for event in batch] and None,
        failures.put,
        turns=turns,
    )
    engine.start()
    return engine, events, failures


def stop_amid_two_steps(engine: Engine, runner: SlowRunner) -> None:
    """Stop the engine while one step is computed and the next one waits after it."""
    assert runner.began.wait(WAIT)
    while engine.computing.launched.empty():
        time.sleep(0.001)
    assert not engine.stop(timeout=0)
    runner.go_on.set()
    assert engine.stop()


def test_requests_run_to_their_end_side_by_side() -> None:
    engine, events, _ = start(ToyDevice())
    for name in ("a", "b"):
        engine.add(make_request(name, list(range(40)), 12))
    ended = set()
    while ended != {"a", "b"}:
        event = events.get(timeout=WAIT)
        if isinstance(event, Sampled) and event.reason is not None:
            ended.add(event.key.request_id)
    engine.stop()
    assert engine.stats.sampled_tokens == 24


def test_who_comes_while_others_have_their_turn_is_in_the_next_step() -> None:
    runner, turns = Recorder(), TurnsOfOthers()
    engine, _, _ = start(runner, turns)
    there = {"a"}
    engine.add(make_request("a", list(range(4)), 40))
    turns.began.get(timeout=WAIT)
    assert runner.steps.get(timeout=WAIT) == there
    turns.ended.put(0.001)  # the second step was planned before the other requests were known
    turns.began.get(timeout=WAIT)
    assert runner.steps.get(timeout=WAIT) == there
    for name in ("b", "c", "d"):
        engine.add(make_request(name, list(range(4)), 40))
        there.add(name)
        turns.ended.put(0.001)
        turns.began.get(timeout=WAIT)
        assert runner.steps.get(timeout=WAIT) == there
    assert runner.steps.empty()
    assert engine.computing.launched.empty()
    engine.stop(timeout=0)
    turns.ended.put(0.001)
    assert engine.stop()


def test_a_request_that_was_expected_is_in_the_next_step() -> None:
    runner = SlowRunner()
    engine, _, _ = start(runner, Expecting(WAIT))
    engine.add(make_request("a", list(range(4)), 40))
    assert runner.began.wait(WAIT)
    engine.add(make_request("b", list(range(4)), 40))
    while engine.computing.launched.empty():
        time.sleep(0.001)
    next_step = engine.computing.launched.get().step
    assert {chunk.key.request_id for chunk in next_step.chunks} == {"a", "b"}
    runner.go_on.set()
    engine.stop()


def test_a_prompt_that_comes_during_a_long_step_is_in_the_next_one() -> None:
    runner = SlowRunner()
    engine, events, _ = start(runner)
    engine.stats.prefill_tokens_per_second = 100.0  # a step of more than two tokens is long
    engine.add(make_request("long", list(range(60)), 1))
    assert runner.began.wait(WAIT)
    engine.add(make_request("short", list(range(5)), 1))
    runner.go_on.set()
    computed = []
    while "short" not in computed:
        event = events.get(timeout=WAIT)
        if isinstance(event, Computed):
            computed.append(event.key.request_id)
    assert computed == ["long", "short"]
    engine.stop()


def test_who_is_expected_in_vain_keeps_nobody_waiting() -> None:
    runner = SlowRunner()
    engine, _, _ = start(runner, Expecting(0.05))
    engine.add(make_request("a", list(range(4)), 40))
    stop_amid_two_steps(engine, runner)


def test_when_others_want_no_more_two_steps_are_in_flight_again() -> None:
    runner, turns = SlowRunner(), TurnsOfOthers()
    engine, _, _ = start(runner, turns)
    engine.add(make_request("a", list(range(4)), 40))
    runner.go_on.set()
    for left in (0.001, 0.001, 0.0):
        turns.began.get(timeout=WAIT)
        runner.began.clear()
        if left == 0:
            runner.go_on.clear()
        turns.ended.put(left)
    stop_amid_two_steps(engine, runner)


def test_a_turn_of_others_behind_the_last_token_is_no_obstacle_to_the_next_request() -> None:
    runner, turns = SlowRunner(), TurnsOfOthers()
    engine, events, _ = start(runner, turns)
    runner.go_on.set()
    engine.add(make_request("a", list(range(4)), 2))
    for _ in range(2):
        turns.began.get(timeout=WAIT)
        turns.ended.put(0.001)
    while not (isinstance(event := events.get(timeout=WAIT), Sampled) and event.reason is not None):
        pass
    while not engine._idle:
        time.sleep(0.001)
    runner.go_on.clear()
    runner.began.clear()
    engine.add(make_request("b", list(range(4)), 40))
    stop_amid_two_steps(engine, runner)


@pytest.mark.slow
def test_time_without_work_is_no_bubble() -> None:
    engine, events, _ = start(ToyDevice())
    for name in ("a", "b"):
        time.sleep(1)
        engine.add(make_request(name, list(range(4)), 2))
        while not (isinstance(event := events.get(timeout=WAIT), Sampled) and event.reason is not None):
            pass
    assert engine.stop()
    assert engine.computing.bubble_seconds < 1


def test_an_idle_engine_obeys_commands() -> None:
    engine, events, _ = start(ToyDevice())
    engine.remove(Key("nobody", 1, 1))
    assert events.get(timeout=WAIT) == Removed(Key("nobody", 1, 1))
    engine.stop()


def test_what_was_commanded_before_the_stop_is_obeyed_and_told() -> None:
    told: queue.Queue[Event] = queue.Queue()
    go_on = threading.Event()

    def on_events(batch: list[Event]) -> None:
        for event in batch:
            told.put(event)
        go_on.wait(WAIT)

    engine = Engine(Scheduler(Limits(16, 4096, 16)), ToyDevice(), on_events, on_failure=pytest.fail)
    engine.start()
    first, second = Key("first", 1, 1), Key("second", 1, 1)
    engine.remove(first)
    assert told.get(timeout=WAIT) == Removed(first)
    engine.remove(second)
    engine.stop(timeout=0)  # both commands wait for the host thread, which is busy with events
    go_on.set()
    assert engine.stop()
    assert told.get_nowait() == Removed(second)


def test_stopping_says_whether_the_step_under_way_has_ended() -> None:
    runner = SlowRunner()
    engine, _, _ = start(runner)
    engine.add(make_request("a", list(range(4)), 4))
    assert runner.began.wait(WAIT)
    assert not engine.stop(timeout=0.05)
    runner.go_on.set()
    assert engine.stop()


def test_a_step_that_waits_behind_the_one_under_way_is_not_begun_after_the_stop() -> None:
    runner = SlowRunner()
    engine, _, _ = start(runner)
    engine.add(make_request("a", list(range(40)), 4))  # more than one step takes
    stop_amid_two_steps(engine, runner)
    assert runner.steps == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told() -> None:
    engine, _, failures = start(BrokenRunner())
    engine.add(make_request("a", list(range(4)), 4))
    assert "no such instruction" in str(failures.get(timeout=WAIT))
    engine.stop()
