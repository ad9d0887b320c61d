"""Samples of counters and histograms, as /fleet and Prometheus show them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.metrics import Family, Histogram, Sample, counted, samples_of

WAITS = Family("wait_seconds", "How long requests waited.", "histogram")
MISSES = Family("cache_misses", "Lookups that found nothing.")


def test_a_histogram_counts_durations_up_to_each_bound_inclusive() -> None:
    waits = Histogram("wait", WAITS, (5, 100))
    for seconds in (0.004, 0.005, 0.006, 0.1, 3.0):
        waits.observe(seconds)
    assert list(waits.samples()) == [
        Sample("waits_within_5ms", 2, WAITS, {"le": "0.005"}, "_bucket"),
        Sample("waits_within_100ms", 4, WAITS, {"le": "0.1"}, "_bucket"),
        Sample("", 5, WAITS, {"le": "+Inf"}, "_bucket"),
        Sample("waits", 5, WAITS, suffix="_count"),
        Sample("wait_seconds", 3.115, WAITS, suffix="_sum"),
    ]


def test_numbers_of_a_dataclass_are_figures_and_other_fields_are_not() -> None:
    @dataclass
    class Counts:
        misses: int = counted(MISSES, tier="disk")
        rate: float = 0.5
        name: str = "x"

    assert list(samples_of(Counts(misses=3))) == [
        Sample("misses", 3, MISSES, {"tier": "disk"}),
        Sample("rate", 0.5),
    ]
