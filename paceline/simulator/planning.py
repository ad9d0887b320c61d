"""The real planner in a simulated fleet: it reads reports about this fleet, which carries out its actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from paceline.core.planner.actions import Add, Decision, Drain, Flip
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, RoleReport, Steps, Traffic, WorkerReport
from paceline.core.planner.reports import Role as AnyRole
from paceline.simulator.events import Events
from paceline.simulator.fleet import FLIP_SECONDS, SimulatedFleet
from paceline.simulator.gateway import SimulatedGateway
from paceline.simulator.recorder import SimulationRecorder
from paceline.simulator.steps import Run
from paceline.simulator.worker import Role, SimulatedWorker

ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(slots=True)
class _Load:
    """Steps of one worker with about the same number of tokens."""

    steps: int = 0
    tokens: float = 0.0
    context: float = 0.0
    seconds: Distribution = field(default_factory=Distribution)


class SimulatedPlanner:
    """Calls the planner at its interval and carries out its decisions.

    Args:
        goes_on: returns whether the simulation has more to do. When it returns False, no further decision is made.
    """

    def __init__(
        self,
        planner: Planner,
        events: Events,
        fleet: SimulatedFleet,
        gateway: SimulatedGateway,
        recorder: SimulationRecorder,
        goes_on: Callable[[], bool],
    ) -> None:
        self.decisions: list[Decision] = []
        """Decisions with an action that changes the fleet, in order."""
        self._planner, self._events, self._fleet = planner, events, fleet
        self._gateway, self._recorder, self._goes_on = gateway, recorder, goes_on
        self._revision = 0
        self._wanted = {role: fleet.count(role) for role in ROLES}
        self._loads: dict[str, dict[int, _Load]] = {}

    def begin(self) -> None:
        """Schedule the first decision, one interval from now."""
        self._events.after(self._planner.objectives.fast_seconds, self._decide)

    def stepped(self, worker: SimulatedWorker, run: Run) -> None:
        """Add the ended steps of a worker to the step times in its next report."""
        tokens = sum(count for _, count in run.chunks) + run.rows
        context = sum(sequence.computed for sequence, _ in run.chunks) + run.context + run.rows * (run.steps - 1) / 2
        loads = self._loads.setdefault(worker.name, {})
        load = loads.setdefault(int(tokens).bit_length(), _Load())
        load.steps += run.steps
        load.tokens += tokens * run.steps
        load.context += context * run.steps
        load.seconds.add(run.seconds(run.steps) / run.steps, run.steps)

    def _decide(self) -> None:
        decision = self._planner.decide(self._report())
        if any(action.kind != "hold" for action in decision.actions):
            self.decisions.append(decision)
            self._carry_out(decision)
        if self._goes_on():
            self._events.after(self._planner.objectives.fast_seconds, self._decide)

    def _carry_out(self, decision: Decision) -> None:
        self._revision += 1
        workers, wanted = self._fleet.workers, self._wanted
        for action in decision.actions:
            if isinstance(action, Add) and _is_simulated(action.role):
                for _ in range(action.count - wanted[action.role]):
                    self._fleet.add(action.role)
            elif isinstance(action, Drain) and _is_simulated(action.role):
                ready = [
                    worker for worker in workers.values() if worker.role == action.role and worker.state == "ready"
                ]
                victim = workers.get(action.worker) or min(ready, key=lambda worker: len(worker.admitted), default=None)
                if victim is not None:
                    self._fleet.drain(victim)
            elif isinstance(action, Flip) and _is_simulated(action.role) and _is_simulated(action.to):
                if action.worker in workers:
                    self._fleet.drain(workers[action.worker], action.to)
                wanted[action.role] -= 1
                wanted[action.to] += 1
        self._wanted = {role: decision.wanted.get(role, wanted[role]) for role in ROLES}

    def _report(self) -> Report:
        seconds = self._planner.objectives.fast_seconds
        now = self._events.now
        waiting = list(self._gateway.waiting)
        traffic: dict[str, Traffic] = {}
        for group, recent in self._recorder.take_recent().items():
            members = [sequence for sequence in waiting if sequence.group == group]
            traffic[group] = Traffic(
                seconds,
                arrivals=recent.arrivals,
                finished=recent.finished,
                refused=recent.refused,
                waiting=len(members),
                oldest_wait=max((now - sequence.arrival for sequence in members), default=0.0),
                prompt_tokens=recent.prompts,
                cached_tokens=recent.cached_tokens,
                started_tokens=recent.started_tokens,
                answer_tokens=recent.answers,
                ttft=recent.ttft,
                itl=recent.itl,
            )
        roles: dict[AnyRole, RoleReport] = {}
        for role in ROLES:
            times = self._fleet.times(role)
            roles[role] = RoleReport(self._wanted[role], None, times.startup, times.drain + 1.0, FLIP_SECONDS + 1.0)
        workers = tuple(self._describe(worker, now) for worker in self._fleet.workers.values())
        self._loads.clear()
        return Report(now, f"{self._revision}", workers, roles, traffic)

    def _describe(self, worker: SimulatedWorker, now: float) -> WorkerReport:
        counts = worker.host.counts()
        steps = tuple(
            Steps(load.tokens / load.steps, load.context / load.steps, load.seconds)
            for load in self._loads.get(worker.name, {}).values()
        )
        other: Role = "decode" if worker.role == "prefill" else "prefill"
        return WorkerReport(
            worker.name,
            worker.role,
            worker.host.name,
            "draining" if worker.state == "draining" else "starting" if worker.state == "starting" else "ready",
            now - worker.since,
            running=len(worker.admitted),
            waiting=len(worker.preempted),
            queued_tokens=worker.queued_tokens,
            max_seqs=worker.kit.times.max_seqs,
            kv_pressure=(counts.held + counts.in_flight) / counts.total,
            kv_tokens=worker.host.tokens // max(1, self._fleet.count_residents(worker.host)),
            flips_to=(other,),
            loss=float(sum(sequence.computed + sequence.done for sequence in worker.admitted)),
            steps=steps,
        )


def _is_simulated(role: AnyRole) -> TypeGuard[Role]:
    """Return whether the simulated fleet has workers of a role."""
    return role in ROLES
