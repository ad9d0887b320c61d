"""What the services of the planner's small world report."""

from __future__ import annotations

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.reports import Report, Role, RoleReport, Steps, Traffic, WorkerReport
from tests.proof.planner_world import (
    CHUNK,
    CHUNK_SECONDS,
    DRAIN,
    FLIP,
    KINDS,
    MAX_SEQS,
    SHARED_SEQS,
    STARTUP,
    TICK,
    Worker,
    World,
)

ENCODED, ENCODE_SECONDS = 256, 0.2
COLD_TICKS, COLD = 2, 10.0
"""The steps of a worker take this many times as long in its first ticks."""


def report(world: World, later: float = 0.0) -> Report:
    """Return what the services of this world report now, or some seconds later if nothing happens until then."""
    objectives = world.setup.objectives
    roles = {role: _describe_role(world, role, later) for role in world.wanted}
    per_worker = world.streams / max(1, len(world.of("decode")))
    itl = Distribution()
    itl.add(step_seconds(per_worker), max(1, world.streams))
    waits = world.prompts / (max(1, len(world.of(world.computing))) * CHUNK / CHUNK_SECONDS)
    traffic = {}
    for name, kind in KINDS.items():
        arrived = world.arrived.get(name, 0)
        if not arrived and name not in world.waiting:
            continue
        waiting = world.waiting.get(name, 0)
        traffic[name] = Traffic(
            TICK,
            arrivals=arrived,
            finished=arrived,
            waiting=waiting,
            media_items=arrived * kind.media,
            oldest_wait=TICK if waiting else 0.0,
            prompt_tokens=_constant(kind.prompt, arrived),
            answer_tokens=_constant(kind.answer, arrived),
            ttft=_constant(kind.prompt / CHUNK * CHUNK_SECONDS + waits, arrived),
            itl=itl if arrived and not kind.pools else Distribution(),
        )
    workers = tuple(_describe(world, each, objectives) for each in world.workers)
    return Report(
        world.tick * TICK + later,
        str(world.revision),
        workers,
        roles,
        traffic,
        traffic_age=world.figures_age,
        gateways_lost=world.gateways_lost,
    )


def _describe_role(world: World, role: Role, later: float) -> RoleReport:
    ago: dict[bool, float] = {
        change.grows: (world.tick - change.tick) * TICK + later for change in world.changes.get(role, ())
    }
    return RoleReport(
        world.wanted[role],
        world.pinned.get(role),
        ago.get(True),
        ago.get(False),
        STARTUP * TICK,
        DRAIN * TICK,
        FLIP * TICK,
        shares_cores=role in world.setup.shares_cores,
    )


def _describe(world: World, worker: Worker, objectives: Objectives) -> WorkerReport:
    running, steps = 0, ()
    ready = [each.name for each in world.of(worker.role)]
    cold = COLD if worker.ticks < COLD_TICKS else 1.0
    if worker.state == "ready" and worker.role == "decode":
        place = ready.index(worker.name)
        running = world.streams // len(ready) + (place < world.streams % len(ready))
        steps = (Steps(running, running * 300.0, _constant(cold * step_seconds(running), 100)),) if running else ()
    elif worker.state == "ready" and sum(world.arrived.values()):
        tokens, seconds = (ENCODED, ENCODE_SECONDS) if worker.role == "encode" else (CHUNK, CHUNK_SECONDS)
        steps = (Steps(tokens, 0 if worker.role == "pool" else tokens, _constant(cold * seconds, 10)),)
    others: tuple[Role, ...] = ("prefill", "decode", "encode") if objectives.flips else ()
    return WorkerReport(
        worker.name,
        worker.role,
        state=worker.state,
        state_seconds=worker.ticks * TICK,
        age=worker.silent * TICK,
        running=running,
        queued_tokens=round(world.prompts / max(1, len(ready))) if worker.role == world.computing else 0,
        max_seqs=MAX_SEQS,
        kv_pressure=world.streams / SHARED_SEQS if world.setup.shares_memory else running / MAX_SEQS,
        shares_memory=world.setup.shares_memory,
        flips_to=tuple(role for role in others if role != worker.role),
        loss=float(running),
        steps=steps,
    )


def step_seconds(running: float) -> float:
    """Return the time of a decode step with so many requests."""
    return 0.02 + 0.002 * running


def _constant(value: float, times: int) -> Distribution:
    made = Distribution()
    if times:
        made.add(value, times)
    return made
