"""A simulation from its beginning to its end, which gives a `Result`."""

from __future__ import annotations

import gc

from paceline.core.planner.planner import Planner
from paceline.core.prefix import BlockHolders
from paceline.simulator.events import Events
from paceline.simulator.fleet import SimulatedFleet
from paceline.simulator.gateway import SimulatedGateway
from paceline.simulator.host import LAYOUT
from paceline.simulator.planning import SimulatedPlanner
from paceline.simulator.recorder import SimulationRecorder
from paceline.simulator.result import Level, Result, class_result
from paceline.simulator.scenario import Scenario
from paceline.simulator.sequence import Sequence, block_name
from paceline.simulator.steps import Run
from paceline.simulator.trace import LoadTrace, TraceRequest
from paceline.simulator.worker import SimulatedWorker

LEVEL_SECONDS = 10.0
"""Interval at which the state of the fleet is sampled, in seconds."""


class Simulation:
    """One scenario under one trace. `run` is called once."""

    def __init__(self, scenario: Scenario, trace: LoadTrace) -> None:
        scenario.check()
        profile = scenario.profile
        if scenario.host_tokens:
            profile = profile.model_copy(update={"host_tokens": scenario.host_tokens})
        self.events = Events()
        self.recorder = SimulationRecorder(
            scenario.objectives, profile.token, watches=scenario.plans, seed=scenario.seed
        )
        self._scenario = scenario
        self._block_tokens = trace.block_tokens
        self._requests = enumerate(trace)
        self._running = 0
        self._is_over = False
        self._planner: SimulatedPlanner | None = None
        hints = BlockHolders(LAYOUT)
        self.gateway = SimulatedGateway(
            self.events,
            profile,
            trace.block_tokens,
            hints,
            self.recorder,
            scenario.gateway,
            scenario.seed,
            on_over=self._over,
            on_steps=self._stepped,
        )
        self.fleet = SimulatedFleet(
            scenario, profile, trace.block_tokens, self.events, self.gateway, hints, self._goes_on
        )
        self._levels: list[Level] = []

    def run(self) -> Result:
        """Simulate until every request has ended."""
        self.fleet.begin()
        if self._scenario.plans:
            self._planner = SimulatedPlanner(
                Planner(self._scenario.objectives),
                self.events,
                self.fleet,
                self.gateway,
                self.recorder,
                self._goes_on,
            )
            self._planner.begin()
        self._next()
        self._sample()
        self.events.run(lambda: self._is_over and not self._running)
        self.fleet.pay()
        return self._result()

    def _stepped(self, worker: SimulatedWorker, run: Run) -> None:
        if self._planner is not None:
            self._planner.stepped(worker, run)

    def _goes_on(self) -> bool:
        return not self._is_over or self._running > 0

    def _next(self) -> None:
        """Schedule the arrival of the trace's next request."""
        entry = next(self._requests, None)
        if entry is None:
            self._is_over = True
        else:
            self.events.at(entry[1].arrival, self._arrive, *entry)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        self._running += 1
        self.gateway.arrive(number, request, [block_name(name) for name in request.blocks])
        self._next()

    def _over(self, sequence: Sequence) -> None:
        self._running -= 1

    def _sample(self) -> None:
        workers = self.fleet.workers.values()
        counts = [host.counts() for host in self.fleet.hosts]
        total = sum(count.total for count in counts)
        self._levels.append(
            Level(
                self.events.now,
                sum(worker.role == "prefill" and worker.state == "ready" for worker in workers),
                sum(worker.role == "decode" and worker.state == "ready" for worker in workers),
                sum(worker.state == "starting" for worker in workers),
                sum(worker.state == "draining" for worker in workers),
                self._running,
                len(self.gateway.waiting),
                sum(count.held + count.in_flight for count in counts) / total if total else 0.0,
                *self.fleet.expenses(),
            )
        )
        if self._goes_on():
            self.events.after(LEVEL_SECONDS, self._sample)

    def _result(self) -> Result:
        scenario, workers = self._scenario, list(self.fleet.workers.values())
        classes = {
            name: class_result(record, scenario.objectives.latency(name), self.events.now)
            for name, record in self.recorder.classes.items()
        }
        return Result(
            seconds=self.events.now,
            prefill=scenario.prefill,
            decode=scenario.decode,
            is_aggregated=scenario.is_aggregated,
            classes=classes,
            device_seconds=self.fleet.device_seconds,
            cost=self.fleet.cost,
            preemptions=self.recorder.preemptions,
            adapter_loads=sum(worker.adapters.loads for worker in workers),
            levels=self._levels,
            decisions=[] if self._planner is None else self._planner.decisions,
            busy={
                role: sum(worker.busy_seconds for worker in workers if worker.role == role)
                / max(1e-9, self.events.now * sum(worker.role == role for worker in workers))
                for role in ("prefill", "decode")
            },
        )


def simulate(scenario: Scenario, trace: LoadTrace) -> Result:
    """Simulate a fleet under a load. Equal arguments give equal results.

    Raises ConfigError if the scenario contradicts itself.
    """
    simulation = Simulation(scenario, trace)
    # Millions of blocks live long, and hardly any freed object is part of a cycle.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return simulation.run()
    finally:
        if was_enabled:
            gc.enable()
