"""A profile from what was measured."""

from __future__ import annotations

import pytest

from paceline.core.step_record import StepRecord
from paceline.core.step_times import StepTimes
from paceline.profiler.measure import Measured
from paceline.profiler.profile import Lifetimes, make_profile
from paceline.profiler.stack import Facts
from tests.profiler.test_overheads import traced


def facts(prefill: int, takes_turns: bool) -> Facts:
    workers = {"prefill": prefill, "decode": 1}
    return Facts("small", "1.0", 4096, "numerics", workers, 8, 512, takes_turns, 0.0, 100.0, 65_536)


def measured(role: str) -> Measured:
    """Return prompts of 1 ms per token and steps of 10 ms, which the worker of a role computed."""
    found = Measured(singles=[traced(64)] * 3)
    for number in range(12):
        tokens = 64 * (1 + number % 3)
        pairs = tokens * (tokens + 1) // 2
        found.prompts[role].append(StepRecord(2 * number, number, tokens / 1000, tokens, pairs, 0, 0, 0))
        found.decoding["decode"].append(StepRecord(2 * number, number, 0.010, 0, 0, 1 + number % 3, 0, 100))
    return found


def test_a_decode_worker_that_takes_turns_plans_its_next_step_late() -> None:
    apart, _ = make_profile(facts(1, True), measured("prefill"), Lifetimes(), (0, 0.0))
    assert (apart.prefill.planned_steps, apart.decode.planned_steps) == (1, 0)
    assert apart.turns is not None
    together, _ = make_profile(facts(0, True), measured("decode"), Lifetimes(), (0, 0.0))
    assert together.decode.planned_steps == 1
    alone, _ = make_profile(facts(1, False), measured("prefill"), Lifetimes(), (0, 0.0))
    assert (alone.decode.planned_steps, alone.turns) == (1, None)


def test_the_delays_of_tokens_are_those_of_a_single_worker() -> None:
    found = measured("prefill")
    answer, trace = found.singles[0]
    late = answer._replace(token_times=(0.1, 0.110, 0.120, 0.134))
    found.singles[0] = late, trace
    own = [StepRecord(number, 1 + number / 100, 0.01, 0, 0, 1, 0, 65 + number) for number in range(3)]
    found.decoding["decode"][:0] = own
    one, _ = make_profile(facts(1, False), found, Lifetimes(), (0, 0.0))
    assert one.token.at(0, 1.0) - one.token.at(0, 0.5) == pytest.approx(0.002, rel=1e-3)
    two_workers = facts(1, False)
    two_workers.workers["decode"] = 2
    two, _ = make_profile(two_workers, found, Lifetimes(), (0, 0.0))
    assert two.token.at(0, 1.0) == two.token.at(0, 0.5)


def seconds(times: StepTimes, *tokens: int) -> list[float]:
    """Return how long prompts of these lengths take in a step of their own."""
    return [times.prefill_seconds(count, count * count / 2) for count in tokens]


def test_short_prompts_are_those_of_decode_workers_and_long_ones_of_prefill_workers() -> None:
    found = measured("prefill")
    for number in range(8):
        tokens = 16 * (1 + number // 4)
        pairs = tokens * (tokens + 1) // 2
        found.prompts["decode"].append(StepRecord(2 * number, number, tokens / 2000, tokens, pairs, 0, 0, 0))
    made, _ = make_profile(facts(1, False), found, Lifetimes(), (0, 0.0))
    assert seconds(made.prefill.steps, 16, 32, 64, 192) == pytest.approx([0.008, 0.016, 0.064, 0.192])
    assert seconds(made.decode.steps, 16, 32, 64, 192) == pytest.approx([0.008, 0.016, 0.064, 0.192])


def test_a_role_has_its_own_times_of_the_sizes_that_it_computed() -> None:
    found = measured("prefill")
    pairs = 64 * 65 // 2
    found.prompts["decode"] += [StepRecord(2 * number, number, 0.1, 64, pairs, 0, 0, 0) for number in range(4)]
    # Three steps do not say how long such steps take.
    found.prompts["decode"] += [StepRecord(8 + 2 * number, 4 + number, 0.9, 128, 8256, 0, 0, 0) for number in range(3)]
    made, _ = make_profile(facts(1, False), found, Lifetimes(), (0, 0.0))
    assert seconds(made.prefill.steps, 64, 128) == pytest.approx([0.064, 0.128])
    assert seconds(made.decode.steps, 64, 128) == pytest.approx([0.1, 0.128], rel=0.01)
