"""The figures of long runs, and the routes that their requests use."""

from __future__ import annotations

import pytest

from bench.serving.soak import WINDOWS, Life, Reading, cpu_per_request, itl_windows
from bench.serving.soak_calls import CALLS, INSIDE, LEFT_OUT, WEIGHTS, missing_routes
from paceline.services.gateway.http.paths import DECISIONS


def test_each_route_has_a_request() -> None:
    assert missing_routes() == set()
    assert CALLS.keys() | INSIDE | LEFT_OUT <= DECISIONS.keys()
    assert WEIGHTS.keys() <= CALLS.keys()


def life(megabytes_per_hour: float, hours: float, descriptors: int = 20) -> Life:
    """Return the life of a process that fills its caches in the first third of an hour and then grows evenly."""
    readings = []
    for number in range(101):
        now = 1.0 + hours * number / 100
        grown = 30 * min(1.0, 3 * (now - 1.0)) + megabytes_per_hour * max(0.0, now - 4 / 3)
        is_late = number > 80
        readings.append(Reading(now, int(1e6 * (100 + grown)), descriptors if is_late else 20, 5, 36.0 * (now - 1.0)))
    return Life("decode-0", 7, readings)


def test_growth_is_read_after_the_warm_up() -> None:
    growth = life(3.0, 2.0).growth()
    assert growth is not None
    assert (growth["megabytes_per_hour"], growth["descriptors"], growth["threads"]) == (3.0, 0, 0)


def test_a_peak_is_no_growth() -> None:
    peaking = life(0.0, 2.0)
    peaking.readings[95] = peaking.readings[95]._replace(memory=500_000_000)
    growth = peaking.growth()
    assert growth is not None
    assert growth["megabytes_per_hour"] == 0


def test_descriptors_that_stay_are_seen() -> None:
    growth = life(0.0, 2.0, descriptors=24).growth()
    assert growth is not None
    assert growth["descriptors"] == 4


def test_a_short_life_shows_no_growth() -> None:
    assert life(3.0, 1.2).growth() is None


def test_kills_are_windows_of_their_own() -> None:
    gaps = [(at / 100, 0.5 if 100 <= at < 120 else 0.01) for at in range(6000)]
    windows = itl_windows(gaps, 60.0)
    assert len(windows) == WINDOWS
    assert [place for place, p99 in enumerate(windows) if p99 > 10] == [1]


def test_cpu_time_is_shared_among_the_requests_of_its_time() -> None:
    # 36 s an hour, in which there are 7,200 requests. The first tenth has the first reading, which does not count.
    shares = cpu_per_request([life(0.0, 2.0)])

    assert shares.keys() == {"decode"}
    assert shares["decode"][-1] == pytest.approx(5.0, rel=0.1)  # a reading at the border belongs to one side
