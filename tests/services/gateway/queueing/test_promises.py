from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.http.refusals import MOST_SECONDS, retry_after
from paceline.services.gateway.queueing.fair_order import Expected, WaitingEntry
from paceline.services.gateway.queueing.promises import Promises


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
