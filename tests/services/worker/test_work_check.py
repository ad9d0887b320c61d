"""Every field of an attempt has bounds."""

from __future__ import annotations

import math

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.proto import common_pb2 as pb
from paceline.services.worker.work_check import check_work

VOCABULARY = 100


def work(**changes: object) -> pb.Work:
    sampling = pb.Sampling(top_p=1, repetition_penalty=1, max_tokens=5)
    made = pb.Work(key=pb.Key(request_id="r", attempt=1, generation=1), token_ids=[1, 2, 3], prompt_tokens=3)
    made.sampling.CopyFrom(sampling)
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = made
        for each in owners:
            owner = getattr(owner, each)
        field = getattr(owner, name)
        if isinstance(value, dict):
            field.update(value)
        elif isinstance(value, list):
            del field[:]
            field.extend(value)
        else:
            setattr(owner, name, value)
    return made


def check(**changes: object) -> None:
    check_work(work(**changes), max_model_len=32, vocab_size=VOCABULARY)


def test_what_clients_ask_for_is_taken() -> None:
    check()
    check(sampling__temperature=2.0, sampling__top_p=0.1, sampling__min_p=0.5, sampling__logit_bias={99: -100.0})
    check(sampling__logprobs=20, sampling__seed=2**64 - 1, sampling__top_k=2**31, sampling__max_tokens=2**32 - 1)
    check(token_ids=[1] * 31, cache_salt="x" * 1024, key__request_id="x" * 256)


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("request_id", {"key__request_id": ""}),
        ("request_id", {"key__request_id": "x" * 257}),
        (None, {"key__generation": 2**32 - 1}),
        ("cache_salt", {"cache_salt": "x" * 1025}),
        ("prompt", {"prompt_tokens": 0}),
        ("prompt", {"prompt_tokens": 4}),
        ("prompt", {"token_ids": [1] * 32}),
        (None, {"token_ids": [1, 2, VOCABULARY]}),
        ("max_tokens", {"sampling__max_tokens": 0}),
        ("logprobs", {"sampling__logprobs": VOCABULARY + 1}),
        ("bad_words", {"sampling__bad_words": [pb.TokenSequence()]}),
        ("bad_words", {"sampling__bad_words": [pb.TokenSequence(token_ids=[1])] * 5000}),
        (None, {"sampling__bad_words": [pb.TokenSequence(token_ids=[1, VOCABULARY])]}),
        (None, {"sampling__logprob_token_ids": [VOCABULARY]}),
        ("prompt_logprobs", {"sampling__prompt_logprobs": 2**32 - 1}),
        ("logit_bias", {"sampling__logit_bias": {1: math.nan}}),
        ("logit_bias", {"sampling__logit_bias": {1: math.inf}}),
        (None, {"sampling__logit_bias": {VOCABULARY: 1.0}}),
        (None, {"sampling__stop_token_ids": [VOCABULARY]}),
        (None, {"sampling__allowed_token_ids": [1] * (VOCABULARY + 1)}),
        (None, {"sampling__constraint__end_token_ids": [2**32 - 1]}),
        ("allowed_token_ids", {"sampling__allowed_token_ids": [1], "sampling__constraint__text": "x"}),
        *[
            (name, {f"sampling__{name}": value})
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
            for value in (math.nan, math.inf, -math.inf, 1e30, -1e30)
        ],
        ("repetition_penalty", {"sampling__repetition_penalty": 0.0}),
    ],
)
def test_what_is_out_of_bounds_is_refused(param: str | None, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**changes)
    assert caught.value.param == param


def test_only_text_at_the_front_of_the_prompt_is_shared() -> None:
    def image(start: int) -> pb.MediaSpan:
        return pb.MediaSpan(start=start, length=2, digest=bytes(16), kind=pb.MEDIA_KIND_IMAGE)

    fields = {"token_ids": [1] * 20, "prompt_tokens": 18, "shared_tokens": 16}
    check(**fields, media=[image(16)])
    for wrong in ({"shared_tokens": 17}, {"prompt_tokens": 15}, {"media": [image(15)]}):
        with pytest.raises(InvalidRequestError, match="shared_tokens must be a multiple of 16"):
            check(**{**fields, **wrong})


@pytest.mark.parametrize("has_grids", [False, True])
def test_spans_have_a_grid_exactly_if_the_model_reads_it(has_grids: bool) -> None:
    span = pb.MediaSpan(start=1, length=2, digest=bytes(16), kind=pb.MEDIA_KIND_IMAGE, grid=[1, 1, 2] * has_grids)
    own = work(media=[span])
    check_work(own, 32, VOCABULARY, has_grids)
    with pytest.raises(InvalidRequestError, match="have no grid" if has_grids else "need a grid"):
        check_work(own, 32, VOCABULARY, not has_grids)
