"""Kernels choose the same tokens as the host's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.types import SamplingParams
from paceline.engine.sampler import SamplingRow, as_draw, sample
from paceline.kernels import select_kernels
from paceline.kernels.choosing import Draw, TokenChooser
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.kernels import NativeChooser
from paceline.kernels.native.library import instruction_sets

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=["triton", *instruction_sets()])
def chooser(request: pytest.FixtureRequest) -> TokenChooser:
    if request.param != "triton":
        return NativeKernels(2, request.param).chooser
    pytest.importorskip("triton", reason="the package triton is not installed")
    chooser = select_kernels(DEVICE, "triton").chooser
    assert chooser is not None
    return chooser


def device_of(chooser: TokenChooser) -> torch.device:
    return torch.device("cpu") if isinstance(chooser, NativeChooser) else DEVICE


def poisoned(rows: Tensor, device: torch.device) -> Tensor:
    """Copy rows to the device, with infinity and NaN after each row."""
    wide = torch.full((rows.shape[0] + 1, rows.shape[1] + 9), NAN)
    wide[:, rows.shape[1] :: 2] = INF
    wide[:-1, : rows.shape[1]] = rows
    return wide.to(device)[:-1, : rows.shape[1]]


def on_host(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    context = [0] * max((position for _, position in rows), default=0)
    return [
        sample(own.clone(), SamplingRow(params, context[:position], 0)).id
        for own, (params, position) in zip(logits, rows)
    ]


def on_device(chooser: TokenChooser, logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int]:
    draws = [as_draw(params, position, 0) for params, position in rows]
    known = [draw for draw in draws if draw is not None]
    assert len(known) == len(rows)
    tokens: list[int] = chooser.choose(poisoned(logits, device_of(chooser)), range(len(rows)), known).tolist()
    return tokens


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 63, 100_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-6, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(params, st.integers(0, 5000)), min_size=1, max_size=5),
    vocab=st.sampled_from([1, 2, 60, 63, 1024, 1500, 4099]),
    seed=st.integers(0, 1000),
    coarse=st.booleans(),
)
def test_tokens_are_those_of_the_host(
    chooser: TokenChooser, rows: list[tuple[SamplingParams, int]], vocab: int, seed: int, coarse: bool
) -> None:
    logits = 3 * torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed), device="cpu")
    if coarse:  # many equal values, as with bf16
        logits = (logits * 2).round() / 2
    expected = on_host(logits, rows)
    assert on_device(chooser, logits, rows) == expected
    # A row alone gives the same token as in a batch.
    assert [on_device(chooser, logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))] == expected


# With a spread of 0.02, hundreds of tokens are almost as likely as the best.
@pytest.mark.parametrize(
    ("top_k", "top_p", "spread"), [(0, 0.5, 0.02), (0, 0.95, 3.0), (7, 1.0, 0.02), (40, 0.5, 3.0), (599, 1.0, 0.02)]
)
def test_many_draws_are_those_of_the_host(chooser: TokenChooser, top_k: int, top_p: float, spread: float) -> None:
    count = 48 if isinstance(chooser, NativeChooser) else 16  # Triton's interpreter is slow
    logits = spread * torch.randn(count, 600, generator=torch.Generator().manual_seed(4), device="cpu")
    rows = [(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed), 3) for seed in range(count)]
    assert on_device(chooser, logits, rows) == on_host(logits, rows)


@settings(max_examples=40)
@given(
    params=params,
    bias=st.dictionaries(st.integers(0, 69), st.sampled_from([-5.0, 2.0]), max_size=3),
    penalties=st.sampled_from([(0.0, 0.0, 1.0), (0.5, 0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.0, 1.3)]),
    allowed=st.sampled_from([(), (3, 9, 60)]),
    logprobs=st.sampled_from([None, 2]),
    mask=st.booleans(),
)
def test_logits_that_were_changed_first_are_drawn_from_in_the_same_way(
    chooser: TokenChooser,
    params: SamplingParams,
    bias: dict[int, float],
    penalties: tuple[float, float, float],
    allowed: tuple[int, ...],
    logprobs: int | None,
    mask: bool,
) -> None:
    presence, frequency, repetition = penalties
    changed = replace(
        params,
        logit_bias=bias,
        allowed_token_ids=allowed,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logprobs=logprobs,
    )
    row = SamplingRow(changed, [3, 7, 9, 3, 9, 9], 2, np.full(9, 0b10110110, dtype=np.uint8) if mask else None)
    logits = 3 * torch.randn(70, generator=torch.Generator().manual_seed(1), device="cpu")
    expected = sample(logits.clone(), row)
    token = sample(logits.to(device_of(chooser), copy=True), row, chooser=chooser)
    assert token.id == expected.id
    assert [each.token_id for each in token.logprobs] == [each.token_id for each in expected.logprobs]


def test_rows_may_be_taken_in_any_order(chooser: TokenChooser) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2), device="cpu").to(device_of(chooser))
    draws = [Draw(temperature, 0, 0.0, top_p, 5, 1) for temperature in (0.0, 1.0) for top_p in (1.0, 0.5)]
    order = [4, 0, 4, 5]
    expected = [int(chooser.choose(logits, [row], [draw])) for row, draw in zip(order, draws)]
    assert chooser.choose(logits, order, draws).tolist() == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-INF, -INF, -INF], 0),
        ([-INF, -5.0, INF], 2),
        ([-0.0, 0.0, -1.0], 0),
        ([0.0, -0.0], 0),
        ([1.0, INF, NAN, NAN], 2),
        ([-3.0, -2.0, -2.5], 1),
        ([-3e38, -1e-40, -1e-45], 2),
    ],
    ids=str,
)
def test_greedy_takes_the_first_of_the_largest(chooser: TokenChooser, numbers: list[float], expected: int) -> None:
    rows = [(SamplingParams(), 1)]
    logits = torch.tensor([numbers], device="cpu")
    assert on_host(logits, rows) == [expected]
    assert on_device(chooser, logits, rows) == [expected]
    behind = torch.cat((torch.full((1, 5000), -INF, device="cpu"), logits), dim=1)  # in another block
    assert on_device(chooser, behind, rows) == on_host(behind, rows)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.5), (3, 0.5)])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_from_what_is_no_number_a_token_comes_that_exists(
    chooser: TokenChooser, number: float, top_k: int, top_p: float
) -> None:
    logits = torch.full((2, 70), number, device="cpu")
    logits[1, :66] = 0.0
    params = SamplingParams(temperature=0.5, top_k=top_k, top_p=top_p)
    assert all(0 <= token < 70 for token in on_device(chooser, logits, [(params, 1)] * 2))


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_token_that_is_forbidden_is_never_drawn(chooser: TokenChooser, top_k: int) -> None:
    logits = torch.full((40, 1100), -INF, device="cpu")
    logits[:, 1050], logits[:, 70] = 1.0, 1.5
    rows = [(SamplingParams(temperature=1.0, top_k=top_k, seed=seed), 3) for seed in range(40)]
    tokens = on_device(chooser, logits, rows)
    assert set(tokens) == {70, 1050}
    assert tokens == on_host(logits, rows)


def test_the_tail_is_drawn_as_often_as_it_is_likely(chooser: TokenChooser) -> None:
    # An fp32 cumulative sum would have too few digits for the tail.
    logits = torch.zeros(40, 4096, device="cpu")
    logits[:, 0] = 17.0  # the others together have 1.7e-4
    rows = [(SamplingParams(temperature=2.0, seed=seed), 0) for seed in range(40)]
    tokens = on_device(chooser, logits, rows)
    assert tokens == on_host(logits, rows)
    assert 0 < sum(token != 0 for token in tokens) < 40


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.booleans(), max_size=6).flatmap(lambda hits: st.tuples(st.just(hits), st.booleans())), max_size=4
    )
)
def test_drafts_are_accepted_up_to_the_first_that_was_not_chosen(
    chooser: TokenChooser, requests: list[tuple[list[bool], bool]]
) -> None:
    # Each request says which of its drafts equal the chosen tokens, and whether it has rows.
    tokens, drafts, first_rows, expected = [], [], [0], []
    for hits, has_rows in requests:
        if has_rows:
            chosen = [100 + index for index in range(len(hits) + 1)]
            tokens += chosen
            # The entry before the first row is not a draft, even if it looks like one.
            drafts += [100, *(token if hit else 7 for hit, token in zip(hits, chosen))]
            count = (*hits, False).index(False)
            expected.append(chosen[: count + 1])
        else:
            expected.append([])
        first_rows.append(len(tokens))
    # The memory after the last row has values that would be accepted as more drafts.
    device = device_of(chooser)
    held = torch.tensor([*tokens, 105, 105]).to(device), torch.tensor([*drafts, 100, 101, 102, 103]).to(device)
    out = chooser.accept(held[0][: len(tokens)], held[1][: len(tokens)], first_rows)
    assert [[token for token in own if token != -1] for own in out.tolist()] == expected


def test_what_more_than_logits_decide_is_left_to_the_host() -> None:
    assert as_draw(SamplingParams(temperature=0.5, seed=3), 9, 2) == Draw(0.5, 0, 0.0, 1.0, 3, 9)
    assert as_draw(SamplingParams(stop_token_ids=frozenset({1}), min_tokens=7), 9, 2) == Draw(0.0, 0, 0.0, 1.0, 0, 9)
    for own in (
        SamplingParams(logprobs=0),
        SamplingParams(logit_bias={1: 2.0}),
        SamplingParams(allowed_token_ids=(1,)),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(stop_token_ids=frozenset({1}), min_tokens=8),
    ):
        assert as_draw(own, 9, 2) is None
