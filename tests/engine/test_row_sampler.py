"""The places of a step's chunks among its tokens, its hidden states and its logits."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import Key
from paceline.engine.row_sampler import locate_chunks
from paceline.engine.step import Chunk


def chunk_of(row: int, length: int, follows: bool, samples: bool, scored: int = 0) -> Chunk:
    return Chunk(Key(str(row), 1, 1), row, 100, length, follows, samples, prefills=not follows, scored=scored)


def test_a_prompt_without_its_end_has_no_hidden_states() -> None:
    (span,) = locate_chunks([chunk_of(0, 5, follows=False, samples=False)], [10], [0, 5])
    assert (span.inputs, span.hidden, span.logits) == (range(5), range(0), range(0))


def test_the_end_of_a_prompt_samples_after_its_last_token() -> None:
    (span,) = locate_chunks([chunk_of(0, 5, follows=False, samples=True)], [10], [0, 5])
    assert (list(span.sampled_inputs), list(span.sampled_hidden), span.logits) == ([4], [0], range(1))
    assert span.length == 15


def test_a_scored_prompt_has_all_hidden_states_and_samples_after_its_last_token() -> None:
    (span,) = locate_chunks([chunk_of(0, 5, follows=False, samples=True, scored=4)], [10], [0, 5])
    assert (span.hidden, list(span.sampled_hidden), span.logits) == (range(5), [4], range(1))


def test_drafts_are_verified_after_each_of_their_tokens() -> None:
    (span,) = locate_chunks([chunk_of(0, 3, follows=True, samples=True)], [10], [0, 3])
    assert (list(span.sampled_inputs), list(span.sampled_hidden), span.logits) == ([0, 1, 2], [0, 1, 2], range(3))
    assert span.length == 11  # the first choice comes after the newest token, before any draft


def test_a_row_that_has_ended_has_nothing() -> None:
    ended, other = (chunk_of(row, 3, follows=True, samples=True) for row in range(2))
    spans = locate_chunks([ended, other], [10, 20], [0, 0, 3])
    assert [len(span.logits) for span in spans] == [0, 3]
    assert list(spans[0].sampled_hidden) == []


CHUNKS = st.lists(
    st.tuples(st.integers(0, 6), st.booleans(), st.booleans(), st.integers(0, 50), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(drawn=CHUNKS)
def test_places_follow_each_other_and_belong_to_the_same_tokens(
    drawn: list[tuple[int, bool, bool, int, bool]],
) -> None:
    chunks, starts, counts = [], [], []
    for row, (count, follows, samples, start, is_scored) in enumerate(drawn):
        count = count if follows else max(count, 1)  # only the row of a chunk that follows may have ended
        scored = count if is_scored and not follows else 0
        chunks.append(chunk_of(row, max(count, 1), follows, samples or follows, scored))
        starts.append(start)
        counts.append(count)
    spans = locate_chunks(chunks, starts, [0, *accumulate(counts)])
    for name, total in (("inputs", sum(counts)), ("hidden", None), ("logits", None)):
        places = [place for span in spans for place in getattr(span, name)]
        assert places == list(range(len(places) if total is None else total))
    for span in spans:
        assert len(span.logits) == len(span.sampled_inputs) == len(span.sampled_hidden) <= len(span.hidden)
        # Hidden states are those of the last tokens, so a place is as far from the end in both.
        for token, hidden in zip(span.sampled_inputs, span.sampled_hidden):
            assert span.inputs.stop - token == span.hidden.stop - hidden
        if span.logits:
            assert span.length == span.start + (span.sampled_inputs[0] - span.inputs.start) + 1
