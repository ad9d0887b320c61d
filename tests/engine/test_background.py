"""Requests of the background are computed in time that others leave."""

from __future__ import annotations

import pytest

from paceline.core.turns import PAGE_BYTES
from paceline.engine.background import ALL, LEAST_CLAIM, LEAST_PAUSE, PAUSE_STEPS, BackgroundTurns
from paceline.engine.limits import Limits
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Chunk, Preempted, Step, StepResult
from tests.engine.toy_requests import make_request


class Host:
    """Workers of one host, and its clock in nanoseconds."""

    def __init__(self) -> None:
        self.now = 0
        self.page = memoryview(bytearray(PAGE_BYTES))

    def worker(self, itl_target: float | None = None) -> BackgroundTurns:
        return BackgroundTurns(self.page, itl_target, lambda: self.now)


def step(urgent: int, background: int) -> Step:
    def chunk(is_background: bool) -> Chunk:
        key = make_request("x", [1], 1).key
        return Chunk(key, 0, 0, 1, follows=True, samples=True, prefills=False, background=is_background)

    return Step(tuple(chunk(index >= urgent) for index in range(urgent + background)))


def test_a_host_without_urgent_requests_computes_all() -> None:
    assert Host().worker().rows(is_urgent=False) == ALL


def test_the_background_of_all_workers_waits_for_one_that_is_urgent() -> None:
    host = Host()
    one, other = host.worker(), host.worker()
    assert (one.rows(is_urgent=True), other.rows(is_urgent=False)) == (0, 0)
    host.now += LEAST_CLAIM + 1
    assert other.rows(is_urgent=False) == ALL


def test_one_step_in_many_takes_the_background_so_that_it_does_not_starve() -> None:
    host = Host()
    worker = host.worker()
    length = LEAST_PAUSE // 100
    taken = 0
    for _ in range(20 * PAUSE_STEPS):
        rows = worker.rows(is_urgent=True)
        taken += rows == ALL
        worker.note(step(1, 1 if rows else 0), StepResult([], length / 1e9))
        host.now += length
    assert 10 <= taken <= 20


def test_a_target_leaves_room_for_some_rows() -> None:
    host = Host()
    worker = host.worker(itl_target=0.010)
    for _ in range(2000):
        rows = min(worker.rows(is_urgent=True), 50)
        worker.note(step(1, rows), StepResult([], 0.002 + 0.001 * rows))
    assert 4 <= worker.rows(is_urgent=True) <= 8


def scheduler() -> Scheduler:
    scheduler = Scheduler(Limits(64, 256, 8))
    for name, background in (("b0", True), ("u0", False), ("b1", True), ("u1", False)):
        scheduler.add(make_request(name, [1, 2, 3], 4, background=background))
    return scheduler


@pytest.mark.parametrize(("background", "names"), [(0, ["u0", "u1"]), (ALL, ["u0", "u1", "b0", "b1"])])
def test_a_step_takes_the_background_last(background: int, names: list[str]) -> None:
    planned = scheduler().plan(background)
    assert planned is not None
    assert [chunk.key.request_id for chunk in planned.chunks] == names


def test_the_newest_of_the_background_gives_up_its_blocks_first() -> None:
    own = scheduler()
    own.starve(make_request("u1", [1], 1).key)
    assert [event.key.request_id for event in own.take_events() if isinstance(event, Preempted)] == ["b1"]
    assert own.classes() == (True, True)
