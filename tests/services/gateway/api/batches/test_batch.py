"""The states of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api.batches.batch import ACTIVE, NEXT, STATUSES, Batch, TransitionError, window_seconds


def batch() -> Batch:
    return Batch(
        id="b",
        owner="",
        endpoint="/v1/completions",
        input_file_id="f",
        completion_window="24h",
        created=1.0,
        expires=2.0,
    )


@given(st.lists(st.sampled_from(STATUSES), max_size=8))
def test_a_batch_moves_along_its_states_and_notes_when(wanted: list[str]) -> None:
    state = batch()
    for now, status in enumerate(wanted):
        before = state
        if status in NEXT[state.status]:
            state = state.moved(status, now)  # type: ignore[arg-type]
            assert state.to_api()[f"{status}_at"] == now
        else:
            with pytest.raises(TransitionError):
                state.moved(status, now)  # type: ignore[arg-type]
            assert state == before
    assert state.is_active == (state.status in ACTIVE)


def test_each_state_leads_to_an_end() -> None:
    ends = {status for status in STATUSES if status not in ACTIVE}
    for status in ACTIVE:
        reached, new = {status}, {status}
        while new:
            new = {each for known in new for each in NEXT[known]} - reached
            reached |= new
        assert reached & ends


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("24h", 86400), ("90m", 5400), ("30d", 30 * 86400), ("31d", None), ("0h", None), ("24", None)],
)
def test_windows(window: str, seconds: int | None) -> None:
    assert window_seconds(window) == seconds
