"""The newest wish for a sleep counts, at every gateway."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.fleet_pb2 import Sleep
from paceline.services.gateway.fleet.sleep_book import SleepBook, agree, is_sleep

wishes = st.builds(
    Sleep, weights=st.integers(0, 2), kv_cache=st.booleans(), by_itself=st.booleans(), changed=st.integers(1, 3)
)


@given(st.lists(wishes, max_size=6), st.randoms(use_true_random=False))
def test_all_gateways_come_to_the_same_wish_in_whatever_order_they_hear(told: list[Sleep], random: object) -> None:
    first, second = SleepBook(), SleepBook()
    for wish in told:
        first.merge([wish])
    random.shuffle(told)  # type: ignore[attr-defined]
    second.merge(told)
    assert first.wish == second.wish


def test_a_wish_is_newer_than_all_that_are_known() -> None:
    book = SleepBook()
    assert book.merge([Sleep(weights=1, changed=1 << 62)])  # from a machine whose clock is wrong
    awake = book.want(0, kv_cache=False)
    assert not is_sleep(awake)
    assert awake.changed > 1 << 62
    assert not book.merge([Sleep(weights=1, changed=1 << 62)])
    assert book.wish == awake


def test_a_sleep_that_is_half_done_is_not_the_same() -> None:
    wish = Sleep(weights=1, kv_cache=True, changed=7)
    assert agree(Sleep(weights=1, kv_cache=True, changed=3), wish)
    for other in (Sleep(weights=1), Sleep(kv_cache=True), Sleep(weights=2, kv_cache=True), Sleep()):
        assert not agree(other, wish)


def test_a_sleep_that_a_request_ends_is_not_the_same_as_one_of_an_operator() -> None:
    asleep = Sleep(weights=1, kv_cache=True, by_itself=True)
    assert not agree(asleep, Sleep(weights=1, kv_cache=True))


def test_the_state_of_a_worker_between_two_sleeps_is_no_wish() -> None:
    book = SleepBook()
    assert not book.merge([Sleep(weights=1), Sleep()])
    assert book.wish == Sleep()
