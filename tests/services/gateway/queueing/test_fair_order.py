"""Properties of the order, on requests that hypothesis makes up."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.queueing.fair_order import Expected, FairOrder, WaitingEntry

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
works = st.integers(1, 100).map(float)
entries = st.tuples(st.sampled_from("abc"), st.integers(0, 1), works)
steps = st.lists(st.one_of(entries, st.just("serve"), st.just("leave")), max_size=60)


def entry(owner: str, priority: int, work: float) -> WaitingEntry:
    return WaitingEntry(owner, WEIGHTS[owner], priority, work)


def serve_all(order: FairOrder[WaitingEntry]) -> list[WaitingEntry]:
    served = []
    while (head := order.first()) is not None:
        order.serve(head)
        served.append(head)
    return served


@given(steps)
def test_nobody_is_lost_and_a_key_keeps_its_order(wanted: list[object]) -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    waiting: list[WaitingEntry] = []
    for step in wanted:
        if isinstance(step, tuple):
            waiting.append(entry(*step))
            order.add(waiting[-1])
        elif step == "leave" and waiting:
            order.remove(waiting.pop(len(waiting) // 2))
        elif step == "serve":
            head = order.first()
            assert (head is None) == (not waiting)  # work conservation: somebody is next while anybody waits
            if head is None:
                continue
            assert head.priority == min(each.priority for each in waiting)
            lane = [each for each in waiting if (each.owner, each.priority) == (head.owner, head.priority)]
            assert head is lane[0]
            order.serve(head)
            waiting.remove(head)
        assert set(order) == set(waiting)
        assert len(order) == len(waiting)
    assert set(serve_all(order)) == set(waiting)


@given(st.lists(entries, min_size=1, max_size=60))
def test_what_keys_get_differs_by_one_request_of_each(wanted: list[tuple[str, int, float]]) -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    for owner, _, work in wanted:
        order.add(entry(owner, 0, work))
    left = {owner: sum(each.owner == owner for each in order) for owner in WEIGHTS}
    largest = {owner: max((each.work for each in order if each.owner == owner), default=0.0) for owner in WEIGHTS}
    got: dict[str, float] = defaultdict(float)
    for each in serve_all(order):
        got[each.owner] += each.work / each.weight
        left[each.owner] -= 1
        waiting = [owner for owner in WEIGHTS if left[owner]]
        for one in waiting:
            for other in waiting:
                bound = largest[one] / WEIGHTS[one] + largest[other] / WEIGHTS[other]
                assert abs(got[one] - got[other]) <= bound + 1e-6


@given(st.lists(works, min_size=1, max_size=80), works)
def test_a_key_that_floods_delays_others_by_one_request(flood: list[float], own: float) -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    for work in flood:
        order.add(entry("a", 0, work))
    half = len(flood) // 2
    for _ in range(half):
        order.serve(order.first() or entry("a", 0, 1))
    newcomer = entry("b", 0, own)
    order.add(newcomer)
    assert serve_all(order).index(newcomer) <= 1


def test_a_key_that_leaves_without_service_owes_nothing() -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    order.add(entry("a", 0, 1))
    gone = [entry("b", 0, 100) for _ in range(9)]
    for each in gone:
        order.add(each)
    for each in gone:
        order.remove(each)
    order.add(other := entry("b", 0, 1))
    order.add(entry("a", 0, 1))
    assert serve_all(order).index(other) == 1


def test_a_key_that_comes_back_does_not_forget_what_it_got() -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    for owner in "aac":
        order.add(entry(owner, 0, 10))
    order.serve(order.first() or entry("a", 0, 1))
    order.serve(order.first() or entry("a", 0, 1))
    order.add(late := entry("c", 0, 10))
    assert serve_all(order)[-1] is late


@given(st.lists(entries, max_size=30), entries)
def test_the_work_ahead_is_known_up_to_a_request_of_each_key(
    wanted: list[tuple[str, int, float]], newcomer: tuple[str, int, float]
) -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    for each in wanted:
        order.add(entry(*each))
    new = entry(*newcomer)
    before = order.ahead(new)
    order.add(new)
    assert order.ahead(new) == before
    largest = sum(max((e.work for e in order if e.owner == owner), default=0.0) for owner in WEIGHTS)
    served = serve_all(order)
    assert abs(before - sum(each.work for each in served[: served.index(new)])) <= largest + 1e-6


def test_expected_work_is_ahead_of_newcomers_of_its_key_only() -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    expected = {(0, "a"): Expected(100.0, 1.0)}
    assert order.ahead(entry("a", 0, 1), expected) == 100
    assert order.ahead(entry("b", 0, 1), expected) == 0
    assert order.ahead(entry("b", 1, 1), expected) == 100


@given(st.lists(entries, min_size=1, max_size=30))
def test_the_one_to_refuse_is_of_the_key_with_most_work_in_the_least_urgent_priority(
    wanted: list[tuple[str, int, float]],
) -> None:
    order: FairOrder[WaitingEntry] = FairOrder()
    for each in wanted:
        order.add(entry(*each))
    last = order.last()
    assert last is not None
    assert last.priority == max(each.priority for each in order)
    level = [each for each in order if each.priority == last.priority]
    ahead = {each: [e for e in level if e.owner == each.owner and e.ticket < each.ticket] for each in level}
    starts = {each: sum(e.work for e in before) / each.weight for each, before in ahead.items()}
    assert starts[last] == max(starts.values())
