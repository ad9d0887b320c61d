"""Comparison of sampling with naive formulas and with expected frequencies."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import Constraint, ConstraintKind, SamplingParams
from paceline.engine.distribution import cut
from paceline.engine.sampler import SamplingRow, allowed_mask, best_of, sample, score, takes_best, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 0.5])


def draw(params: SamplingParams, context: list[int] | None = None, logits: torch.Tensor = LOGITS, **row: int) -> int:
    context = [0] if context is None else context
    return sample(logits.clone(), SamplingRow(params, context, row.get("prompt_len", 1), allowed_mask(params))).id


def frequencies(params: SamplingParams, n: int = 4000) -> list[float]:
    mask = allowed_mask(params)
    rows = [SamplingRow(params, range(position), 1, mask) for position in range(1, n + 1)]  # type: ignore[arg-type]
    tokens = Counter(sample(LOGITS.clone(), row).id for row in rows)
    return [tokens[index] / n for index in range(len(LOGITS))]


def test_greedy_takes_the_first_of_the_best() -> None:
    assert draw(SamplingParams()) == 0
    assert draw(SamplingParams(), logits=torch.tensor([1.0, 3.0, 3.0])) == 1


GREEDY = SamplingParams(stop_token_ids=frozenset({0}))
CONSTRAINT = Constraint(ConstraintKind.REGEX, "a*", frozenset({0}))
SHAPED = [
    {"temperature": 1.0},
    {"logprobs": 1},
    {"min_tokens": 2},
    {"logit_bias": {1: 9.0}},
    {"allowed_token_ids": (1,)},
    {"bad_words": ((1, 0),)},
    {"repetition_penalty": 9.0},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"constraint": CONSTRAINT},
]


def test_the_best_of_many_rows_is_what_each_would_take() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0), torch.tensor([1.0, 3.0, 3.0, -9.0, 3.0, 0.0]), LOGITS * 0])
    assert takes_best(GREEDY)
    assert best_of(logits) == [draw(GREEDY, logits=row) for row in logits]


@pytest.mark.parametrize("shaped", SHAPED, ids=lambda shaped: next(iter(shaped)))
def test_where_anything_else_has_a_say_the_best_is_not_just_taken(shaped: dict[str, object]) -> None:
    assert not takes_best(dataclasses.replace(GREEDY, **shaped))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1).tolist()
    assert frequencies(SamplingParams(temperature=temperature, seed=7)) == pytest.approx(expected, abs=0.025)


@pytest.mark.slow
def test_top_k_top_p_and_min_p_cut_the_right_tokens() -> None:
    def support(**cut: float) -> set[int]:
        shares = frequencies(SamplingParams(temperature=1.0, seed=3, **cut), 2000)  # type: ignore[arg-type]
        return {token for token, share in enumerate(shares) if share > 0}

    # probabilities: 0 .56, 1 .20, 5 .12, 2 .075, 3 .028, 4 .010
    assert support(top_k=2) == {0, 1}
    assert support(top_p=0.5) == {0}
    assert support(top_p=0.8) == {0, 1, 5}
    assert support(min_p=0.2) == {0, 1, 5}
    assert support(top_k=3, top_p=0.7) == {0, 1}
    assert support(top_k=100) == {0, 1, 2, 3, 4, 5}


def test_a_nucleus_wider_than_the_candidates_is_sorted_whole() -> None:
    flat = torch.zeros(5000)
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_p=0.9, seed=seed), [0], 1) for seed in range(300)]
    tokens = {sample(flat.clone(), row).id for row in rows}
    assert len(tokens) > 250
    assert max(tokens) > 1024


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniform_is_in_its_interval_and_fixed(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0 <= u < 1
    assert u == uniform(seed, position)


def test_uniform_keeps_the_tail() -> None:
    hits = sum(uniform(seed, position) < 2**-12 for seed in range(200) for position in range(1000))
    assert 25 < hits < 80  # 48.8 expected
    assert any(uniform(seed, 0) * 2**32 % 1 != 0 for seed in range(4))  # finer than fp32


def test_penalties_match_the_formulas() -> None:
    context, prompt_len = [0, 1, 5, 5, 2], 2  # output: 5, 5, 2
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logprobs=6, max_tokens=9
    )
    # expected logits: 0: 2/2, 1: 1/2, 2: 0/2-.25-.5, 5: .5/2-.25-1.0
    assert draw(params, context, prompt_len=prompt_len) == 0
    forbid_zero = SamplingParams(**{**_fields(params), "logit_bias": {0: -0.6}})
    # bias comes before the penalties: (2 - 0.6) / 2 = 0.7 still beats 0.5
    assert draw(forbid_zero, context, prompt_len=prompt_len) == 0
    forbid_more = SamplingParams(**{**_fields(params), "logit_bias": {0: -1.1}})
    assert draw(forbid_more, context, prompt_len=prompt_len) == 1


def test_a_repetition_penalty_makes_negative_logits_less_likely() -> None:
    logits = torch.tensor([-1.0, -1.5, -3.0])
    assert draw(SamplingParams(repetition_penalty=2.0), [0], logits) == 1
    assert draw(SamplingParams(repetition_penalty=1.25), [0], logits) == 0


def test_presence_and_frequency_penalties_do_not_count_the_prompt() -> None:
    penalties = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, max_tokens=9)
    assert draw(penalties, [0, 0, 0], prompt_len=3) == 0
    assert draw(penalties, [0, 0, 0], prompt_len=2) == 1  # 2.0 - 1.0 - 1.0 is less than 1.0


def test_bias_allowed_tokens_and_min_tokens_shape_the_choice() -> None:
    assert draw(SamplingParams(logit_bias={4: 100.0})) == 4
    assert draw(SamplingParams(allowed_token_ids=(3, 4))) == 3
    stops = SamplingParams(stop_token_ids=frozenset({0, 1}), min_tokens=2)
    assert draw(stops, [9, 9], prompt_len=1) == 5
    assert draw(stops, [9, 9, 9], prompt_len=1) == 0
    noisy = SamplingParams(temperature=2.0, allowed_token_ids=(3, 4), seed=1)
    assert {draw(noisy, [0] * n) for n in range(1, 60)} == {3, 4}


def test_what_a_mask_forbids_is_never_chosen() -> None:
    mask = np.packbits([0, 0, 1, 0, 1, 0], bitorder="little")
    loud = {0: 100.0, 2: -100.0, 4: -100.0}
    for params in (
        SamplingParams(),
        SamplingParams(logit_bias=loud),
        SamplingParams(repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(temperature=1.0, seed=3, top_k=1),
        SamplingParams(temperature=1.0, seed=3, top_p=0.1),
        SamplingParams(temperature=1.0, seed=3, min_p=0.9),
    ):
        chosen = {
            sample(LOGITS.clone(), SamplingRow(params, [*context, 2, 4], 0, mask)).id
            for context in ([0] * count for count in range(40))
        }
        assert chosen <= {2, 4}
    hot = SamplingParams(temperature=9.0)
    both = {sample(LOGITS.clone(), SamplingRow(hot, [0] * count, 0, mask)).id for count in range(40)}
    assert both == {2, 4}


def test_a_mask_that_is_too_short_forbids_the_rest() -> None:
    logits = torch.arange(20.0)
    row = SamplingRow(SamplingParams(), [0], 0, np.array([0b00100100], dtype=np.uint8))
    assert sample(logits, row).id == 5


def test_ends_wait_unless_a_grammar_leaves_no_other_token() -> None:
    constraint = Constraint(ConstraintKind.REGEX, "a*", frozenset({0}))
    may_go_on, must_end = (np.packbits(bits, bitorder="little") for bits in ([1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]))
    for params in (
        SamplingParams(constraint=constraint),
        SamplingParams(constraint=constraint, stop_token_ids=frozenset({0}), min_tokens=5),
    ):
        assert sample(LOGITS.clone(), SamplingRow(params, [9], 0, may_go_on)).id == 3
        assert sample(LOGITS.clone(), SamplingRow(params, [9], 0, must_end)).id == 0
    stops = SamplingParams(constraint=constraint, stop_token_ids=frozenset({0}))
    assert sample(LOGITS.clone(), SamplingRow(stops, [9], 0, may_go_on)).id == 0


def test_logprobs_are_raw_and_ranked() -> None:
    params = SamplingParams(logprobs=2, logit_bias={4: 100.0}, temperature=0.0)
    token = sample(LOGITS.clone(), SamplingRow(params, [0], 1))
    expected = torch.log_softmax(LOGITS, -1)
    assert [(entry.token_id, entry.rank) for entry in token.logprobs] == [(4, 6), (0, 1), (1, 2)]
    assert [entry.logprob for entry in token.logprobs] == pytest.approx(expected[[4, 0, 1]].tolist())


def test_score_reports_given_tokens() -> None:
    tokens = score(LOGITS.repeat(2, 1), [3, 0], top=1)
    assert [token.id for token in tokens] == [3, 0]
    assert tokens[0].logprobs[0].rank == 5
    assert tokens[1].logprobs[0].rank == 1
    assert len(tokens[0].logprobs) == 2


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


def test_of_equal_tokens_top_k_keeps_those_of_the_lowest_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 5.0, 2.0, 2.0, 5.0])
    distribution = cut(logits, SamplingParams(temperature=1.0, top_k=4))
    assert distribution.tokens is not None
    assert distribution.tokens.tolist() == [3, 6, 1, 2]


def test_the_last_token_of_a_bad_word_is_not_chosen_after_the_others() -> None:
    params = SamplingParams(bad_words=((0,), (1, 1), (1, 5, 5)), max_tokens=9)
    assert draw(params, [9]) == 1
    assert draw(params, [9, 1]) == 5
    assert draw(params, [9, 1, 5]) == 1
    assert draw(params, [1]) == 1, "a word may begin in the prompt"
    noisy = dataclasses.replace(params, temperature=9.0)
    context = [9]
    for _ in range(300):
        context.append(sample(LOGITS.clone(), SamplingRow(noisy, np.array(context), 1)).id)
    text = "".join(map(str, context[1:]))
    assert set(text) == set("12345")
    assert "11" not in text
    assert "155" not in text


def test_a_bad_word_is_chosen_if_nothing_else_may_follow() -> None:
    words = SamplingParams(bad_words=((3,), (4, 4)), allowed_token_ids=(3, 4), stop_token_ids=frozenset({4}))
    assert draw(words, [9]) == 4
    assert draw(words, [9, 4]) == 3
    assert draw(dataclasses.replace(words, min_tokens=5), [9]) == 4


def test_named_tokens_are_reported_instead_of_the_most_likely() -> None:
    token = sample(LOGITS.clone(), SamplingRow(SamplingParams(logprobs=3, logprob_token_ids=(4, 0)), [0], 1))
    expected = torch.log_softmax(LOGITS, -1)
    assert [(entry.token_id, entry.rank) for entry in token.logprobs] == [(0, 1), (4, 6), (0, 1)]
    assert [entry.logprob for entry in token.logprobs] == pytest.approx(expected[[0, 4, 0]].tolist())
