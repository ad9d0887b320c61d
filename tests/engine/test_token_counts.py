"""Counts that are kept from token to token are those of the whole context."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import SamplingParams
from paceline.engine import rows as rows_module
from paceline.engine.rows import Rows
from paceline.engine.sampler import SamplingRow, sample
from paceline.engine.step import RowAssigned
from paceline.engine.token_counts import TokenCounts

TOKENS = st.lists(st.integers(0, 40), max_size=12)


@given(prompt=TOKENS, before=TOKENS, steps=st.lists(st.tuples(TOKENS, st.integers(0, 12)), max_size=8))
def test_counts_follow_tokens_and_drafts(
    prompt: list[int], before: list[int], steps: list[tuple[list[int], int]]
) -> None:
    """Each step counts some drafts one by one, of which the first ones then stay."""
    context = [*prompt, *before]
    counts = TokenCounts(np.array(context, dtype=np.int32), len(prompt))
    for drafts, accepted in steps:
        for count in range(len(drafts) + 1):
            whole = [*context, *drafts[:count]]
            counts.follow(np.array([*context, *drafts, 99], dtype=np.int32), len(context), len(whole))
            assert sorted(counts.context.tolist()) == sorted(set(whole))
            ids, times = counts.output
            assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(whole[len(prompt) :])
        context += drafts[:accepted]


def test_a_row_counts_its_context_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(TokenCounts):
        def __init__(self, context: np.ndarray, prompt_len: int) -> None:
            made.append(len(context))
            super().__init__(context, prompt_len)

    monkeypatch.setattr(rows_module, "TokenCounts", Counted)
    layout = make_layout((GroupShape("all", (0,), 1, 16),), 1, "test")
    rows = Rows(1, 64, 8, layout, torch.device("cpu"))
    table = [list(range(layout.groups[0].blocks_for(64)))]
    penalties = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, temperature=1.0, seed=3)
    for prompt in ([1, 2, 3], [4, 5, 5, 6]):  # another request gets the row
        rows.update([RowAssigned(0, prompt, len(prompt), 0, penalties, 64, table, 64)])
        for _ in range(6):
            logits = torch.linspace(2, -2, 8)
            length = rows.lengths[0]
            expected = SamplingRow(penalties, rows.context(0).tolist(), len(prompt))
            token = sample(logits.clone(), rows.sampling_row(0, length, None))
            assert token == sample(logits.clone(), expected)
            rows.append(0, [token.id], ended=False)
    assert made == [3, 4]
