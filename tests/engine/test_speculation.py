"""The number of drafts on simulated machines and texts."""

from __future__ import annotations

import random

import pytest

from paceline.engine.speculation import Acceptance, Speculation, StepCost


def simulate(worth: float, slope: float, draft_seconds: float = 0.0, base: float = 0.03, steps: int = 600) -> float:
    """Return the speedup by drafts for one request, each of whose drafts is accepted with probability `worth`."""
    rng = random.Random(1)
    speculation = Speculation(8)
    request = speculation.newcomer()
    seconds, tokens, drafted = 0.0, 0, 0
    for _ in range(steps):
        accepted = 0
        while accepted < drafted and rng.random() < worth:
            accepted += 1
        chosen = speculation.choose(request)
        took = base + slope * (1 + drafted) + draft_seconds * chosen
        took *= rng.uniform(0.95, 1.1)
        speculation.observe_step(1 + drafted, accepted + 1, chosen, took, draft_seconds * chosen)
        speculation.observe_drafts(request, drafted, accepted)
        seconds, tokens, drafted = seconds + took, tokens + accepted + 1, chosen
    return tokens / seconds * (base + slope) * 1.025


@pytest.mark.parametrize("slope", [0.0005, 0.003, 0.02])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.005, 0.03])
def test_drafts_that_fail_are_not_noticed(slope: float, draft_seconds: float) -> None:
    assert simulate(0.02, slope, draft_seconds) > 0.97


def test_drafts_that_come_true_are_made() -> None:
    assert simulate(0.95, 0.001) > 4
    assert simulate(0.7, 0.001) > 1.8
    assert simulate(0.8, 0.001, draft_seconds=0.004) > 1.8


def test_what_costs_more_than_it_saves_is_not_drafted() -> None:
    assert simulate(0.5, 0.04, base=0.001) > 0.97


def test_a_request_that_changes_is_followed() -> None:
    speculation = Speculation(6)
    for tokens in (1, 3, 1, 5, 2, 7) * 10:
        speculation.observe_step(tokens, 1, 0, 0.03 + 0.002 * tokens, 0.0)
    request = speculation.newcomer()
    for _ in range(40):
        speculation.observe_drafts(request, 4, 0)
    assert speculation.choose(request) in (0, 1)
    for _ in range(60):
        speculation.observe_drafts(request, 4, 4)
    assert speculation.choose(request) == 6


def test_a_newcomer_is_judged_by_the_others() -> None:
    speculation = Speculation(6)
    for _ in range(50):
        speculation.observe_drafts(speculation.newcomer(), 6, 0)
    assert speculation.newcomer().rate < 0.1


def test_without_adaptation_it_is_always_the_most() -> None:
    speculation = Speculation(5, adaptive=False)
    request = Acceptance(0.0, 50.0)
    speculation.observe_step(1, 1, 5, 1.0, 0.9)
    assert speculation.choose(request) == 5
    assert Speculation(0).choose(request) == 0


def test_the_slope_is_found_and_kept_while_steps_are_of_one_size() -> None:
    cost = StepCost()
    for tokens in (1, 4, 2, 6) * 20:
        cost.observe(tokens, 0.02 + 0.003 * tokens)
    assert cost.slope == pytest.approx(0.003)
    for _ in range(500):
        cost.observe(1, 0.05)
    assert cost.slope == pytest.approx(0.003)
    cost.observe(5, 3.0)
    assert cost.slope == pytest.approx(0.003)
