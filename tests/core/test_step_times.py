import pytest

from paceline.core.errors import ConfigError
from paceline.core.step_times import Curve, Delay, Drafts, Profile, Spread, StepTimes, WorkerTimes, read_profile

STEPS = StepTimes(
    prefill=Curve(points=((0, 0.01), (100, 0.11), (200, 0.31))),
    prefill_pair=1e-6,
    decode=Curve(points=((1, 0.02), (3, 0.03))),
    decode_context=1e-5,
    shared=0.005,
    draft=0.001,
)
WORKER = WorkerTimes(steps=STEPS)
PROFILE = Profile(machine="box", model="tiny", token_bytes=1024, prefill=WORKER, decode=WORKER)


def test_a_curve_is_linear_between_its_points_and_goes_on_with_the_last_slope():
    curve = STEPS.prefill
    assert [curve.at(work) for work in (-5, 0, 50, 100, 150, 200, 250)] == pytest.approx(
        [0.01, 0.01, 0.06, 0.11, 0.21, 0.31, 0.41]
    )
    assert Curve(points=((5, 0.2),)).at(100) == 0.2


def test_a_spread_has_its_quantiles_at_even_levels():
    spread = Spread(quantiles=(0.5, 1.0, 3.0))
    assert [spread.at(level) for level in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.5, 0.75, 1.0, 2.0, 3.0]
    assert Spread().at(0.7) == 1.0


def test_a_delay_grows_with_tokens_and_is_spread():
    assert Delay(seconds=0.1, per_token=0.01, spread=Spread(quantiles=(1.0, 2.0))).at(10, 0.5) == pytest.approx(0.3)


def test_the_time_of_a_step_is_that_of_its_prompts_and_its_decoding_sequences():
    prompts, decoding = 0.06 + 0.002, 0.025 + 0.01 + 0.004
    assert STEPS.prefill_seconds(50, 2000) == pytest.approx(prompts)
    assert STEPS.decode_seconds(2, 1000, 4) == pytest.approx(decoding)
    assert STEPS.mixed_seconds(50, 2000, 2, 1000, 4) == pytest.approx(prompts + decoding - 0.005)
    assert STEPS.mixed_seconds(0, 0, 2, 1000, 4) == pytest.approx(decoding)
    assert STEPS.mixed_seconds(50, 2000, 0, 0) == pytest.approx(prompts)


def test_json_gives_the_same_profile(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(PROFILE.to_json())
    assert read_profile(file) == PROFILE


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "is not a profile"),
        (PROFILE.to_json().replace('"token_bytes": 1024.0', '"token_bytes": 0'), "token_bytes"),
        (PROFILE.to_json().replace('"format": 2', '"format": 1'), "format"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_name_of_the_field(tmp_path, text, complaint):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_profile(file)


def test_wrong_values_are_refused(tmp_path):
    for wrong in (
        lambda: Curve(points=((1, 0.1), (1, 0.2))),
        lambda: Spread(quantiles=(1.0, 0.5)),
        lambda: Drafts(most=2, accepted=(0.5,)),
    ):
        with pytest.raises(ValueError, match="validation error"):
            wrong()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "nothing.json")
