"""The places of requests: which moves there are, what each event changes, and what the check finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.engine.compute_pool import ArenaPool, ComputePool
from paceline.engine.device_pool import DevicePool
from paceline.engine.request import Request, Residence
from paceline.engine.residents import TRANSITIONS, Residents
from paceline.engine.row_allocator import RowAllocator
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import Event, NeedsBlocks, Preempted, Removed
from tests.engine.toy_requests import FULL, make_request


class House:
    """Residents of a pool, and their events."""

    def __init__(self, pool: ComputePool | None = None) -> None:
        self.pool = pool or ArenaPool()
        self.events: list[Event] = []
        self.stats = SchedulerStats()
        self.residents = Residents(self.pool, RowAllocator(2, 4096), self.stats, self.events.append)

    def add(self, name: str, computed: int = 0, capacity: int = 64) -> Request:
        request = make_request(name, list(range(41)), 8, capacity=capacity, computed_len=computed)
        self.residents.add(request)
        return request

    def run(self, request: Request) -> None:
        """Let a request be in a step."""
        assert self.residents.can_run(request)
        self.residents.launch(request, 1)

    def finish_copies(self) -> None:
        for copies in self.pool.take_copies():
            self.residents.finish_copies(copies, 0.001)


def test_a_request_can_go_from_each_place_but_the_last_and_comes_to_each_place() -> None:
    assert set(TRANSITIONS) == set(Residence)
    assert [place for place, after in TRANSITIONS.items() if not after] == [Residence.GONE]
    assert set().union(*TRANSITIONS.values()) == set(Residence)


def test_only_a_request_that_leaves_is_gone_and_none_comes_back_from_leaving() -> None:
    leaving = {Residence.PREEMPTED, Residence.ENDED, Residence.REMOVED}
    assert {place for place, after in TRANSITIONS.items() if Residence.GONE in after} == leaving
    assert all(TRANSITIONS[place] <= {*leaving, Residence.GONE} for place in leaving)


def test_a_move_that_is_not_in_the_table_is_refused() -> None:
    house = House()
    request = house.add("waits")
    with pytest.raises(RuntimeError, match="cannot move from WAITING to ENDED"):
        house.residents.end(request)


def test_in_the_arena_a_request_runs_at_once_and_is_gone_after_its_last_step() -> None:
    house = House()
    request = house.add("r")
    assert request.place is Residence.WAITING
    house.residents.begin_plan()
    assert request.place is Residence.RUNNING
    house.run(request)
    house.run(request)
    house.residents.end(request)
    house.residents.land(request)
    assert (request.place, request.row is None) == (Residence.ENDED, False)
    house.residents.land(request)
    assert (request.place, request.row, house.events) == (Residence.GONE, None, [])


def test_a_request_is_in_no_step_before_its_blocks_are_in_the_pool() -> None:
    house = House(DevicePool(FULL, 8))
    request = house.add("r", computed=40)
    house.residents.begin_plan()
    assert request.place is Residence.LOADING
    assert not house.residents.can_run(request)
    house.finish_copies()
    assert request.place is Residence.RUNNING
    assert house.residents.can_run(request)


def outgrown() -> tuple[House, Request, Request]:
    """Return two requests in steps whose older one has outgrown the pool, so that the newer one leaves it."""
    house = House(DevicePool(FULL, 8))
    old, new = house.add("old", computed=40), house.add("new", computed=40)
    house.residents.begin_plan()
    house.finish_copies()
    for request in (old, new):
        house.run(request)
    house.residents.grow(old.key, [list(range(5))])
    house.residents.begin_plan()
    return house, old, new


def test_the_newest_request_is_swapped_out_after_its_steps_and_copies_and_comes_back() -> None:
    house, old, new = outgrown()
    assert (old.place, new.place) == (Residence.RUNNING, Residence.SWAPPING_OUT)
    house.residents.land(new)
    assert (new.place, new.row) == (Residence.SWAPPING_OUT, None)  # its last block is being stored
    house.finish_copies()
    assert (new.place, house.stats.swap_outs) == (Residence.WAITING, 1)
    house.residents.land(old)
    house.residents.remove(old.key)
    house.residents.admit()
    assert new.place is Residence.LOADING
    assert house.residents.check() == []


def test_a_request_that_is_swapped_out_and_removed_stores_nothing_any_more() -> None:
    house, _, new = outgrown()
    house.residents.remove(new.key)
    house.residents.land(new)
    assert (new.place, house.events) == (Residence.GONE, [Removed(new.key)])
    assert house.pool.take_copies() == []


def test_a_preempted_request_that_is_removed_is_told_of_once() -> None:
    house = House()
    old, new = house.add("old"), house.add("new")
    house.residents.begin_plan()
    house.run(new)
    house.residents.starve(old.key)
    assert new.place is Residence.PREEMPTED
    for _ in range(2):
        house.residents.remove(new.key)
    house.residents.land(new)
    assert house.events == [Removed(new.key)]


def test_who_starves_may_ask_again_when_the_preempted_request_is_gone() -> None:
    house = House()
    old, new = house.add("old"), house.add("new")
    house.residents.begin_plan()
    house.run(new)
    house.residents.ask_for_blocks(old, 99)
    house.residents.starve(old.key)
    assert old.growing
    house.residents.land(new)
    assert not old.growing
    assert house.events == [NeedsBlocks(old.key, 99), Preempted(new.key)]


@pytest.mark.parametrize(
    ("tamper", "fault"),
    [
        (lambda request: setattr(request, "place", Residence.WAITING), "is WAITING and is in steps"),
        (lambda request: setattr(request, "place", Residence.ENDED), "is among those that stay"),
        (lambda request: setattr(request, "row", None), "is in steps without a row"),
        (lambda request: setattr(request, "row", 0), "the free and the used rows are"),
        (lambda request: setattr(request, "planned_len", 39), "has impossible lengths"),
        (lambda request: setattr(request, "place", Residence.LOADING), "is LOADING and has no copies"),
    ],
)
def test_the_check_finds_what_does_not_add_up(tamper: Callable[[Request], None], fault: str) -> None:
    house = House(DevicePool(FULL, 8))
    request = house.add("r", computed=40)
    house.residents.begin_plan()
    house.finish_copies()
    house.run(request)
    assert house.residents.check() == []
    tamper(request)
    assert any(fault in sentence for sentence in house.residents.check())


def test_the_check_finds_blocks_that_their_request_does_not_hold() -> None:
    house = House(DevicePool(FULL, 8))
    request = house.add("r", computed=40)
    house.residents.begin_plan()
    house.finish_copies()
    house.pool.tables(request)[0].pop()
    assert any("its leases have 0" in sentence for sentence in house.residents.check())
