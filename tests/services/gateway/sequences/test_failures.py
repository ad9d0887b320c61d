"""The rule when a request is given up."""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.sequences.progress import MOST_EXCUSED, Cause, Failure, Failures, ProgressStep

STEPS = st.builds(ProgressStep, st.integers(0, 3), st.integers(0, 3))
FAILURES = st.builds(Failure, STEPS, st.sampled_from(Cause), st.booleans(), st.booleans())
HISTORIES = st.lists(FAILURES, max_size=12)


def after(*history: Failure) -> Failures:
    return reduce(Failures.after, history, Failures())


def ended(**fields: bool) -> Failure:
    return Failure(ProgressStep(), Cause.WORKER_ENDED, **fields)


def test_errors_of_a_worker_that_goes_on_count_at_one_step() -> None:
    error = Failure(ProgressStep(4, 9), Cause.REQUEST)
    assert after(error, error, error).count == 3
    assert after(error, error, Failure(ProgressStep(5, 9), Cause.REQUEST)).count == 1


def test_a_request_at_which_workers_end_while_others_go_on_is_the_reason() -> None:
    assert after(ended(), ended(), ended()).count == 3


def test_the_end_of_a_worker_elsewhere_clears_the_request() -> None:
    assert after(ended(), ended(), ended(others_ended=True)).count == 0
    error = Failure(ProgressStep(), Cause.REQUEST)
    assert after(error, ended(), ended(others_ended=True)).count == 1


def test_an_end_counts_only_if_others_went_on() -> None:
    assert after(*[ended(others_went_on=False)] * 9).count == 0


def test_requests_that_end_their_workers_at_the_same_time_do_not_excuse_each_other_for_ever() -> None:
    ends = [ended(others_ended=True, others_went_on=False)] * MOST_EXCUSED
    assert after(*ends).count == 0
    assert after(*ends, *ends[:3]).count == 3
    assert after(*ends, Failure(ProgressStep(1), Cause.WORKER_ENDED, others_ended=True)).count == 0


def test_progress_in_the_prompt_is_progress() -> None:
    chunks = [Failure(ProgressStep(0, 512 * chunk), Cause.WORKER_ENDED) for chunk in range(1, 9)]
    assert after(*chunks).count == 1


@given(HISTORIES)
def test_nothing_counts_that_happened_elsewhere(history: list[Failure]) -> None:
    others = [failure for failure in history if failure.cause is not Cause.ELSEWHERE]
    steps = {failure.step for failure in history if failure.cause is Cause.ELSEWHERE}
    if all(step == ProgressStep() for step in steps):
        assert after(*history) == after(*others)


@given(HISTORIES)
def test_no_more_failures_count_than_there_were_since_the_last_progress(history: list[Failure]) -> None:
    now, since = Failures(), 0
    for failure in history:
        since = 1 if failure.step > now.step else since + 1
        now = now.after(failure)
        assert now.count <= since
        assert now.step >= failure.step


@given(HISTORIES, st.data())
def test_a_request_without_progress_is_given_up_whatever_else_happens(
    history: list[Failure], data: st.DataObject
) -> None:
    now = after(*history)
    ends = st.builds(Failure, st.just(now.step), st.just(Cause.WORKER_ENDED), st.booleans(), st.booleans())
    most = 2 * (MOST_EXCUSED + 1)
    counts = [each.count for each in accumulate(data.draw(st.lists(ends, min_size=most)), Failures.after, initial=now)]
    assert max(counts) >= 2


@given(HISTORIES, st.integers(1, 6))
def test_a_request_that_always_fails_by_itself_is_given_up(history: list[Failure], limit: int) -> None:
    step = after(*history).step
    assert after(*history, *[Failure(step, Cause.REQUEST)] * limit).count >= limit
    assert after(*history, *[Failure(step, Cause.WORKER_ENDED)] * limit).count >= limit
