from __future__ import annotations

import pytest

from paceline.services.kvtransfer.host_memory import LONGEST_GAP_SECONDS, AwakeClock


def test_a_standstill_is_left_out_and_everything_else_counts() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now)
    began = clock()
    for seconds in (0.25, LONGEST_GAP_SECONDS, 500.0, 0.25, 3.0):
        now += seconds
        clock()
    assert clock() - began == pytest.approx(0.5 + 3 * LONGEST_GAP_SECONDS)
