from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from bench.fleet.control_plane import Report, parse, run
from bench.fleet.control_plane_parts import placement_seconds
from tests.services.gateway.toy_model import write_toy_model


def test_a_histogram_tells_the_bounds_of_percentiles() -> None:
    counts = {0.0005: 60.0, 0.001: 98.0, 0.002: 100.0, float("inf"): 100.0}
    figures = placement_seconds(counts)
    assert figures == {
        "placement, ms of CPU, p50": 0.5,
        "placement, ms of CPU, p99": 2.0,
        "placements within 1 ms of CPU, %": 98.0,
    }
    assert placement_seconds({}) == {}


@pytest.mark.slow
async def test_no_request_fails_whatever_happens_to_redis(tmp_path: Path) -> None:
    small = ["--workers=16", "--processes=2", "--blocks=10", "--rate=5", "--changes=1"]
    letters = ["--ids", str(ord("a")), str(ord("z") + 1)]  # the toy's vocabulary is small
    short = ["--seconds=1", "--settle=0", "--fault-seconds=4"]
    report = await run(parse([str(write_toy_model(tmp_path / "toy")), *small, *letters, *short]))
    assert report.failed == 0
    assert {name: fault["members given up"] for name, fault in report.faults.items()} == dict.fromkeys(
        ("flushed", "killed", "stopped", "split"), 0
    )
    assert all(fault["requests"] for fault in report.faults.values())
    assert all(getattr(report, field.name) for field in fields(Report))
