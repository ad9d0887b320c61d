import pytest

from paceline.core.types import Constraint, ConstraintKind, Key, SamplingParams


def test_a_key_is_told_by_its_three_parts() -> None:
    assert str(Key("r1", 2, 3)) == "r1/2/3"


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=1.0, top_k=3, logit_bias={1: 2.0}), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.5), True),
        (SamplingParams(frequency_penalty=0.5), True),
    ],
)
def test_history_is_needed_by_penalties_alone(params: SamplingParams, needed: bool) -> None:
    assert params.needs_history is needed


YES = Constraint(ConstraintKind.REGEX, "yes", frozenset({2, 3}))


def test_stop_tokens_end_a_request_from_min_tokens_on() -> None:
    params = SamplingParams(stop_token_ids=frozenset({1}), min_tokens=5)
    assert [params.ends(1, length) for length in (4, 5, 6)] == [False, True, True]
    assert not params.ends(2, 9)
    assert (params.unwanted_ends(4), params.unwanted_ends(5)) == ({1}, frozenset())


def test_the_ends_of_a_constraint_always_end_a_request_but_are_unwanted_where_the_model_s_end_is_ignored() -> None:
    ignoring = SamplingParams(stop_token_ids=frozenset({1}), min_tokens=5, constraint=YES)
    assert all(ignoring.ends(token, 1) for token in (1, 2, 3))
    assert ignoring.ending_token_ids == {1, 2, 3}
    assert (ignoring.unwanted_ends(4), ignoring.unwanted_ends(5)) == ({1, 2, 3}, {2, 3})
    plain = SamplingParams(stop_token_ids=frozenset({1, 2, 3}), constraint=YES)
    assert plain.unwanted_ends(0) == frozenset()
