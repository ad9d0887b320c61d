"""Overload in a small world with a clock of its own: who is admitted, when, and who comes back for nothing."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.errors import MOST_SECONDS, NoRoomError, retry_after
from paceline.services.gateway.queueing.fair_order import Demand, Expected, FairOrder, WaitingEntry
from paceline.services.gateway.queueing.shedding import LoadShedder, Promises

RATE = 1000.0
"""Tokens per second that the world's only worker computes."""
TTFT = 2.0


def test_a_request_is_recognised_once_and_not_before_its_time() -> None:
    promises, entry = Promises(), WaitingEntry("a", 2.0, 1, 10.0)
    promises.add(entry, 7, 0.0, 5.0)
    assert promises.expected(1.0, share=1.0) == {(1, "a"): Expected(10.0, 2.0)}
    assert promises.expected(1.0, share=0.0) == {}
    assert promises.early(8, 1.0) is None
    assert promises.early(7, 1.0) == 4.0
    assert promises.early(7, 4.9) == 0.0
    assert promises.keep(7) == entry.ticket
    assert promises.early(7, 4.9) is None
    assert promises.expected(4.9) == {}


def test_promised_work_counts_as_far_as_requests_come_back() -> None:
    promises, now = Promises(), 0.0
    for number in range(200):
        promises.add(WaitingEntry(work=10.0), number, now, 1.0)
        now += 1.0
        if number % 2:
            assert promises.keep(number) is not None
    promises.add(WaitingEntry(work=100.0), 1000, now + 100, 1.0)
    (expected,) = promises.expected(now + 100).values()
    assert 30 < expected.work < 70
    assert len(promises) == 1


@given(st.floats(0, 2 * MOST_SECONDS), st.integers(0, 1000))
def test_a_client_is_never_told_to_come_too_early(seconds: float, seed: int) -> None:
    random.seed(seed)
    told = retry_after(seconds)
    assert min(seconds, MOST_SECONDS) <= told <= min(MOST_SECONDS, 1.1 * seconds + 2)
    assert told >= 1


@dataclass(eq=False, kw_only=True)
class Request(WaitingEntry):
    demand: Demand
    arrived: float
    gives_up: float = 0.0
    came_back: bool = False


@dataclass
class World:
    """A worker, and a queue whose clients come back when they were told with probability `return_rate`."""

    return_rate: float = 1.0
    limit: float = TTFT
    seed: int = 0
    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)
    refused: int = 0
    came_back: int = 0
    turned_away: int = 0
    """Requests that came back as they were told, and were refused again."""

    def __post_init__(self) -> None:
        self.shedder = LoadShedder(60.0)
        self.order: FairOrder[Request] = FairOrder()
        self.random = random.Random(self.seed)
        random.seed(self.seed)
        self.ids = itertools.count(1)
        self.coming: list[tuple[float, int, Request]] = []
        self.free_at = 0.0

    def send(self, at: float, owner: str = "", priority: int = 0, weight: float = 1.0) -> None:
        work = float(self.random.randint(100, 300))
        demand = Demand(work=work, prompt_seconds=work / RATE, fingerprint=next(self.ids))
        request = Request(owner=owner, priority=priority, weight=weight, work=work, demand=demand, arrived=at)
        heapq.heappush(self.coming, (at, demand.fingerprint, request))

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += 0.01
            while self.coming and self.coming[0][0] <= self.now:
                self._arrive(heapq.heappop(self.coming)[2])
            for each in [each for each in self.order if self.now >= each.gives_up]:
                self.order.remove(each)
                self._refuse(each, self.shedder.refusal(self.order, each, each.demand, self._limit(each), self.now))
            while self.free_at <= self.now and (head := self.order.first()) is not None:
                self.shedder.rate.admit(head.work, self.now)
                self.order.serve(head)
                self._start(head, max(self.free_at, self.now - 0.01))
            self.shedder.rate.set_waiting(len(self.order) > 0, self.now)

    def _arrive(self, request: Request) -> None:
        request.arrived = self.now
        self.came_back += request.came_back
        by = self.now + self.limit
        request.demand = Demand(**{**_fields(request.demand), "first_token_by": by})
        if not len(self.order) and self.free_at <= self.now:
            self._start(request, self.now)
            return
        try:
            self.shedder.check(self.order, request, request.demand, self.now)
        except NoRoomError as refusal:
            self._refuse(request, refusal)
            return
        request.gives_up = self.now + self._limit(request).seconds
        self.order.add(request)
        self.shedder.rate.set_waiting(True, self.now)

    def _limit(self, request: Request):
        return self.shedder.wait_limit(request.demand, self.now)

    def _start(self, request: Request, at: float) -> None:
        self.free_at = at + request.work / RATE
        first_token = self.free_at - request.arrived
        self.waits.append(first_token)
        self.shedder.first_tokens.note(self.free_at - at, request.demand.prompt_seconds, self.now)
        self.done[request.owner] = self.done.get(request.owner, 0.0) + request.work

    def _refuse(self, request: Request, refusal: NoRoomError) -> None:
        self.refused += 1
        self.turned_away += request.came_back
        assert refusal.seconds >= 1
        if self.random.random() < self.return_rate:
            request.came_back = True
            heapq.heappush(self.coming, (self.now + refusal.seconds, request.demand.fingerprint, request))

    def percentile(self, share: float) -> float:
        return sorted(self.waits)[int(share * len(self.waits))]


def _fields(demand: Demand) -> dict[str, object]:
    return {name: getattr(demand, name) for name in Demand.__slots__}


def overload(world: World, factor: float, seconds: float, **of: object) -> None:
    """Send requests at `factor` times what the worker can do; a request has 200 tokens on the average."""
    at = 0.0
    while at < seconds:
        at += world.random.expovariate(factor * RATE / 200)
        world.send(at, **of)


@pytest.mark.parametrize("return_rate", [0.0, 0.5, 1.0])
def test_under_overload_the_worker_is_busy_and_the_admitted_are_in_time(return_rate: float) -> None:
    world = World(return_rate)
    overload(world, 3, 60)
    world.run(60)
    assert sum(world.done.values()) >= 0.97 * RATE * 60
    assert world.percentile(0.99) <= TTFT
    assert world.refused > 0


@pytest.mark.parametrize("return_rate", [0.5, 1.0])
def test_who_comes_back_as_told_is_admitted(return_rate: float) -> None:
    world = World(return_rate)
    overload(world, 3, 60)
    world.run(120)
    assert world.came_back > 50
    assert world.turned_away <= 0.06 * world.came_back


def test_a_worker_that_is_not_overloaded_refuses_nobody() -> None:
    world = World()
    overload(world, 0.7, 60)
    world.run(60)
    assert world.refused == 0


def test_a_key_that_floods_is_refused_and_others_are_not() -> None:
    world = World()
    overload(world, 5, 60, owner="flood")
    overload(world, 0.3, 60, owner="small")
    world.run(60)
    small = sum(1 for _, _, each in world.coming if each.owner == "small")
    assert small <= 3
    assert world.done["small"] >= 0.28 * RATE * 60
    assert sum(world.done.values()) >= 0.95 * RATE * 60


def test_keys_share_by_their_weights() -> None:
    world = World()
    overload(world, 2, 60, owner="one")
    overload(world, 2, 60, owner="three", weight=3.0)
    world.run(60)
    assert world.done["three"] / world.done["one"] == pytest.approx(3, rel=0.2)


def test_urgent_requests_are_refused_last() -> None:
    world = World()
    overload(world, 0.6, 60, priority=-1, owner="urgent")
    overload(world, 2, 60, owner="usual")
    world.run(60)
    assert world.done["urgent"] >= 0.55 * RATE * 60


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    shedder, order = LoadShedder(60.0), FairOrder[WaitingEntry]()
    demand = Demand(prompt_seconds=3.0, deadline=102.0)
    with pytest.raises(NoRoomError, match="the deadline of this request") as caught:
        shedder.check(order, WaitingEntry(), demand, 100.0)
    assert caught.value.reason == "deadline"
    shedder.check(order, WaitingEntry(), Demand(prompt_seconds=1.0, deadline=102.0), 100.0)


def test_without_an_objective_a_request_waits_whatever_the_forecast_says() -> None:
    shedder, order = LoadShedder(60.0), FairOrder[WaitingEntry]()
    order.add(WaitingEntry(work=1e6))
    shedder.rate.set_waiting(True, 0.0)
    for at in range(8):
        shedder.rate.admit(1.0, float(at))
    with pytest.raises(NoRoomError):
        shedder.check(order, WaitingEntry(), Demand(first_token_by=50.0), 8.0)
    shedder.check(order, WaitingEntry(), Demand(), 8.0)
