"""Reports of small fleets for tests of the planner."""

from __future__ import annotations

from typing import Any

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Report, RoleReport, Steps, Traffic, WorkerReport

DECODE_FIXED, DECODE_SEQUENCE = 0.02, 0.001


def decode_seconds(running: float) -> float:
    """Return the time of a step of the decode workers in these reports."""
    return DECODE_FIXED + DECODE_SEQUENCE * running


def decode_report(at: float, workers: int, running: int, **fields: Any) -> Report:
    """Return the report of a fleet of decode workers, each with `running` requests of 200 tokens.

    Args:
        fields: other fields of the report.
    """
    seconds = Distribution()
    seconds.add(decode_seconds(running), 200)
    steps = (Steps(running, 300.0 * running, seconds),) if running else ()
    described = tuple(
        WorkerReport(f"d{i}", "decode", state_seconds=100.0, running=running, max_seqs=200, steps=steps)
        for i in range(workers)
    )
    arrivals = round(workers * running / (200 * decode_seconds(running)) * 5)
    traffic = Traffic(
        5.0,
        arrivals,
        arrivals,
        prompt_tokens=Distribution.of([200.0] * arrivals),
        answer_tokens=Distribution.of([200.0] * arrivals),
    )
    values = {
        "revision": "1",
        "workers": described,
        "roles": {"decode": RoleReport(workers, startup_seconds=30.0, drain_seconds=10.0)},
        "traffic": {"chat": traffic} if arrivals else {},
    }
    return Report(at, **{**values, **fields})
