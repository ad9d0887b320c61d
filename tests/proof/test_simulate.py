"""The protocol in larger worlds. `make proof` runs 10,000 seeds, and mutations are tried with more, too."""

from __future__ import annotations

import pytest

from tests.proof.simulate import FEW_SEEDS, simulate


@pytest.mark.slow
def test_no_seed_breaks_a_promise() -> None:
    for seed in range(FEW_SEEDS // 3):
        simulate(seed)


def test_a_seed_replays() -> None:
    first, second = simulate(7), simulate(7)
    assert first.lines == second.lines
    assert any("duplicate" in line or "delay" in line or "crash" in line for line in first.lines)
