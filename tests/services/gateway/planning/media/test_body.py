"""How fast the bodies of files are read."""

from __future__ import annotations

import pytest

from paceline.services.gateway.planning.media.body import BYTES_PER_SECOND, LEAST_PAUSE, Pace


def test_all_files_together_rest_until_the_rate_allows_more() -> None:
    now = 100.0
    pace = Pace(lambda: now)
    assert pace.pause == 0
    pace.count(BYTES_PER_SECOND)
    assert pace.pause == pytest.approx(1.0)
    pace.count(BYTES_PER_SECOND // 2)
    assert pace.pause == pytest.approx(1.5)
    now = 101.25
    assert pace.pause == pytest.approx(0.25)
    now = 200.0  # what was not used before does not count
    pace.count(BYTES_PER_SECOND)
    assert pace.pause == pytest.approx(1.0)


def test_short_pauses_are_left_out_but_not_forgotten() -> None:
    pace = Pace(lambda: 100.0)
    pace.count(int(0.6 * LEAST_PAUSE * BYTES_PER_SECOND))
    assert pace.pause == 0
    pace.count(int(0.6 * LEAST_PAUSE * BYTES_PER_SECOND))
    assert pace.pause == pytest.approx(1.2 * LEAST_PAUSE, rel=1e-3)
