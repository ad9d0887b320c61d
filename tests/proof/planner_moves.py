"""What may happen to a fleet in a tick: nothing, or one thing that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.planner.memory import PlanningState
from paceline.core.planner.reports import Report, Role
from tests.proof import planner_judge as judge
from tests.proof.planner_reports import report
from tests.proof.planner_world import (
    STARTUP,
    TICK,
    Load,
    Worker,
    World,
    apply,
    decide,
    pass_tick,
    set_worker,
)


@dataclass(frozen=True, slots=True)
class Move:
    """A tick, before which `act` happens; the planner's reports and decisions go as `route` says."""

    name: str
    act: Callable[..., None] | None = None
    arguments: tuple[Any, ...] = ()
    route: str = ""
    """One of "lost", "old", "unapplied", "late", or "second", or empty: the way of this tick's report and decision."""

    def __str__(self) -> str:
        return " ".join((self.name, *map(str, self.arguments)))


CALM = Move("calm")


def faults(world: World) -> Iterator[Move]:
    """Yield everything that may go wrong in the next tick."""
    for load in world.setup.loads:
        if load != world.load:
            yield Move("load", _change_load, (load,))
    yield Move("report lost", route="lost")
    yield Move("report of the tick before", route="old")
    yield Move("decision lost", route="unapplied")
    yield Move("decision late", route="late")
    yield Move("second planner acts first", route="second")
    yield Move("second planner acts on the report before", route="second old")
    yield Move("new planner without state", _forget)
    yield Move("figures of gateways are old", _age_figures)
    yield Move("a gateway is lost", _lose_gateway)
    for worker in world.workers:
        if worker.state != "draining":
            yield Move("worker is silent", _silence, (worker.name,))
        if worker.state == "starting":
            yield Move("worker starts slowly", _slow_down, (worker.name,))
            yield Move("worker never starts", _stick, (worker.name,))
        if worker.state == "ready":
            yield Move("worker dies", _kill, (worker.name,))
    for role, count in world.setup.pins:
        if world.pinned.get(role) != count:
            yield Move("person sets", _pin, (role, count))
    for role in world.pinned:
        yield Move("person releases", _release, (role,))


def step(world: World, move: Move) -> str:
    """Let one tick pass with this move. Return the planner's decision in one line. Raises Violation."""
    world.gateways_lost, world.figures_age = 0, 0.0
    if world.late is not None:
        (which, decision), world.late = world.late, None
        _carry_out(world, which, decision)
    pass_tick(world)
    if move.act:
        move.act(world, *move.arguments)
    seen, before = report(world), world.before
    world.before = seen
    lines = []
    if move.route.startswith("second"):
        lines.append("second: " + _act(world, 1, before if move.route == "second old" and before else seen))
    if move.route == "old" and before:
        _act(world, 0, before)
    if move.route != "lost":
        lines.append(_act(world, 0, seen, move.route))
    if world.setup.twins:
        lines.append("second: " + _act(world, 1, report(world, later=TICK / 2)))
    return "; ".join(lines) or "nobody decides"


def _act(world: World, which: int, seen: Report, route: str = "") -> str:
    """Let a planner decide, and carry the decision out."""
    known = world.planners[which].at
    if known is None or seen.at > known:  # it ignores other reports
        made = int(seen.at // TICK)
        if made - world.heard[which] > 3 or not _is_complete(world, seen):
            world.complete_since = _replaced(world.complete_since, which, made)
        world.heard = _replaced(world.heard, which, made)
    decision = decide(world, which, seen)
    judge.check_decision(world, which, seen, decision)
    if route == "late":
        world.late = (which, decision)
    elif route != "unapplied":
        _carry_out(world, which, decision)
    return decision.line


def _is_complete(world: World, seen: Report) -> bool:
    stale = world.setup.objectives.stale_seconds
    fresh = all(each.age <= stale for each in seen.workers)
    return fresh and seen.traffic_age <= stale and not seen.gateways_lost


def _carry_out(world: World, which: int, decision: Any) -> None:
    if apply(world, decision):
        judge.check_applied(world, decision)


def _replaced(pair: tuple[int, ...], which: int, value: int) -> tuple[int, ...]:
    return (*pair[:which], value, *pair[which + 1 :])


def _find(world: World, name: str) -> Worker:
    return next(each for each in world.workers if each.name == name)


def _change_load(world: World, load: Load) -> None:
    world.load, world.load_since = load, world.tick


def _forget(world: World) -> None:
    world.planners = (PlanningState(), world.planners[1])
    world.complete_since = _replaced(world.complete_since, 0, world.tick)


def _age_figures(world: World) -> None:
    world.figures_age = world.setup.objectives.stale_seconds + 1


def _lose_gateway(world: World) -> None:
    """A gateway's share of the figures is missing."""
    world.gateways_lost = 1
    world.arrived = {name: count // 2 for name, count in world.arrived.items()}


def _silence(world: World, name: str) -> None:
    set_worker(world, _find(world, name), replace(_find(world, name), silent=5))


def _slow_down(world: World, name: str) -> None:
    worker = _find(world, name)
    set_worker(world, worker, replace(worker, left=worker.left + STARTUP))


def _stick(world: World, name: str) -> None:
    set_worker(world, _find(world, name), replace(_find(world, name), left=10_000))


def _kill(world: World, name: str) -> None:
    """The platform starts the worker again. Its requests go on elsewhere."""
    worker = _find(world, name)
    set_worker(world, worker, Worker(name, worker.role, "starting", left=STARTUP))


def _pin(world: World, role: Role, count: int) -> None:
    world.pinned[role] = count
    if count != world.wanted[role]:
        world.changes[role] = ()
    world.wanted[role] = count
    world.revision += 1


def _release(world: World, role: Role) -> None:
    del world.pinned[role]
    world.changes[role] = ()
    world.revision += 1
