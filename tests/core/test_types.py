import pytest

from paceline.core.types import Key, SamplingParams


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
