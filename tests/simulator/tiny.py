"""Profiles with round numbers, and runs with them, whose results can be calculated by hand."""

from __future__ import annotations

from typing import Any

from paceline.core.step_times import Curve, Profile, Spread, StepTimes, WorkerTimes
from paceline.simulator.result import Result
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import Simulation
from paceline.simulator.trace import LoadTrace, TraceRequest

BLOCK = 16
UNEVEN = Spread(quantiles=(0.5, 1.0, 1.0, 1.0, 3.0))


def step_times(**fields: Any) -> StepTimes:
    """Return times with which a prompt token takes 1 ms, and a decode step 10 ms and 1 ms for each row."""
    values: dict[str, Any] = {
        "prefill": Curve(points=((0, 0.0), (1000, 1.0))),
        "decode": Curve(points=((1, 0.011), (100, 0.110))),
    }
    return StepTimes(**values | fields)


def worker_times(steps: StepTimes | None = None, **fields: Any) -> WorkerTimes:
    values: dict[str, Any] = {"max_seqs": 4, "max_batched_tokens": 64, "startup": 30.0, "drain": 5.0}
    return WorkerTimes(steps=steps or step_times(), **values | fields)


def profile(prefill: WorkerTimes | None = None, decode: WorkerTimes | None = None, **fields: Any) -> Profile:
    values: dict[str, Any] = {
        "machine": "paper",
        "model": "none",
        "token_bytes": 1000.0,
        "host_tokens": 64 * 1024,
        "transfer_bytes": 1e6,
        "max_model_len": 4096,
    }
    return Profile(prefill=prefill or worker_times(), decode=decode or worker_times(), **values | fields)


def run(requests: list[TraceRequest], **fields: object) -> tuple[Simulation, Result]:
    scenario = Scenario(**{"profile": profile(), "prefill": 1, "decode": 1} | fields)  # type: ignore[arg-type]
    simulation = Simulation(scenario, LoadTrace(BLOCK, requests))
    return simulation, simulation.run()
