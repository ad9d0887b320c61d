"""A small fleet for the proof of the planner: workers, the platform that starts them, the load, and what is reported.

Time passes in ticks of five seconds. The load is a whole number of requests per tick, so that nothing is random here.
Decode workers share their requests evenly, and prefill workers their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.core.planner.actions import Add, Decision, Drain, Flip
from paceline.core.planner.memory import PlanningState
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role, State

TICK = 5.0
STARTUP, DRAIN, FLIP = 2, 2, 1
"""Ticks that these take, if nothing goes wrong."""
SETTLE = (STARTUP + DRAIN) * TICK
MAX_SEQS = 20
SHARED_SEQS = 30
"""Requests for which a shared arena has memory, however many workers use it."""
CHUNK, CHUNK_SECONDS = 1000, 0.25


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one class: the prompt's and the answer's length in tokens, and how many ticks the answer takes."""

    prompt: int
    answer: int
    ticks: int
    media: int = 0
    pools: bool = False
    """Whether pool workers compute such requests, which then have no answer of tokens."""


KINDS = {
    "documents": Kind(4000, 50, 1),
    "chats": Kind(100, 400, 3),
    "pictures": Kind(600, 100, 2, media=1),
    "vectors": Kind(2000, 0, 0, pools=True),
}

Load = Mapping[str, int]
"""Requests of each class that arrive in a tick."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One world: its objectives, the first number of workers, and the loads that may come."""

    objectives: Objectives
    counts: Mapping[Role, int]
    load: Load
    loads: tuple[Load, ...]
    """Loads that the first one may change to."""
    ticks: int = 14
    """Ticks in which something may go wrong."""
    faults: int = 1
    pins: tuple[tuple[Role, int], ...] = ()
    """Numbers of workers that a person may set."""
    twins: bool = False
    """Whether a second planner always acts, too, on reports of its own."""
    shares_cores: tuple[Role, ...] = ()
    """Roles whose workers share all cores of the only machine, so that a second worker would add no speed."""
    shares_memory: bool = False
    """Whether the KV blocks of all workers are in one arena, so that another worker would add no memory."""

    def most(self, role: Role, wanted: int) -> int:
        """Return up to how many workers a role may grow if so many are wanted now."""
        limits = self.objectives.limits(role)
        return min(limits.most, max(1, limits.least, wanted)) if role in self.shares_cores else limits.most


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    role: Role
    state: State
    ticks: int = 0
    """Ticks in this state."""
    left: int = 0
    """Ticks until it is ready, or has ended."""
    silent: int = 0
    """Ticks since its last report."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the wanted number of a role that a planner made."""

    tick: int
    grows: bool


@dataclass(slots=True)
class World:
    """The state of the model."""

    setup: Setup
    workers: tuple[Worker, ...] = ()
    wanted: dict[Role, int] = field(default_factory=dict)
    pinned: dict[Role, int] = field(default_factory=dict)
    revision: int = 0
    tick: int = 0
    load: Load = field(default_factory=dict)
    load_since: int = 0
    running: tuple[tuple[int, int], ...] = ()
    """Requests that decode, and the ticks that are left of them."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Requests of each class at the gateway."""
    prompts: float = 0.0
    """Tokens of prompts that wait at prefill or pool workers."""
    planners: tuple[PlanningState, ...] = (PlanningState(), PlanningState())
    complete_since: tuple[int, ...] = (0, 0)
    """Since which tick every report has reached each planner in full."""
    late: tuple[int, Decision] | None = None
    """A decision, and its planner, which the platform gets in the next tick."""
    heard: tuple[int, ...] = (-100, -100)
    """Tick of each planner's newest report."""
    before: Report | None = None
    """The report of the tick before."""
    changes: dict[Role, tuple[Change, ...]] = field(default_factory=dict)
    gateways_lost: int = 0
    figures_age: float = 0.0
    names: int = 0
    arrived: dict[str, int] = field(default_factory=dict)

    def copy(self) -> World:
        copied = replace(self)
        copied.wanted, copied.pinned, copied.waiting = dict(self.wanted), dict(self.pinned), dict(self.waiting)
        copied.changes = dict(self.changes)
        return copied

    def of(self, role: Role, state: State = "ready") -> list[Worker]:
        """Return the workers of a role in a state."""
        return [each for each in self.workers if each.role == role and each.state == state]

    @property
    def computing(self) -> Role:
        """The role that computes prompts."""
        return "pool" if "pool" in self.wanted else "prefill"

    @property
    def streams(self) -> int:
        """Requests that have begun to decode."""
        return sum(count for count, _ in self.running)

    @property
    def places(self) -> int:
        """Requests for which the decode workers have places and memory."""
        places = MAX_SEQS * len(self.of("decode"))
        return min(places, SHARED_SEQS) if self.setup.shares_memory else places


def make_world(setup: Setup) -> World:
    """Return a world whose fleet has been ready for long."""
    world = World(setup, wanted=dict(setup.counts), load=setup.load)
    for role, count in setup.counts.items():
        for _ in range(count):
            world.workers += (Worker(f"w{world.names}", role, "ready", 100),)
            world.names += 1
    return world


def set_worker(world: World, worker: Worker, new: Worker | None) -> None:
    """Replace a worker, or remove it."""
    world.workers = tuple(
        (each if each is not worker else new) for each in world.workers if each is not worker or new is not None
    )  # type: ignore[assignment]


def pass_tick(world: World) -> None:
    """Let requests arrive, be computed and end, and let workers start and end."""
    world.tick += 1
    for worker in world.workers:
        left = max(0, worker.left - 1)
        moved = replace(worker, ticks=worker.ticks + 1, left=left, silent=0)
        if worker.state == "starting" and not left:
            moved = replace(moved, state="ready", ticks=0)
        set_worker(world, worker, None if worker.state == "draining" and not left else moved)
    _reconcile(world)
    world.arrived = {name: count for name, count in world.load.items() if count}
    for name, count in world.arrived.items():
        world.waiting[name] = world.waiting.get(name, 0) + count
    world.running = tuple((count, left - 1) for count, left in world.running if left > 1)
    _admit(world)
    speed = len(world.of(world.computing)) * CHUNK * TICK / CHUNK_SECONDS
    world.prompts = max(0.0, world.prompts - speed)


def _admit(world: World) -> None:
    """Give places to waiting requests, and their prompts to prefill workers. Pool workers take all requests at once."""
    if world.computing == "pool":
        for name, count in world.waiting.items() if world.of("pool") else ():
            world.prompts += count * KINDS[name].prompt
            world.waiting[name] = 0
        return
    room = world.places - world.streams
    for name, count in sorted(world.waiting.items()):
        admitted = min(count, max(0, room)) if world.of("prefill") or not world.wanted.get("prefill") else 0
        room -= admitted
        world.prompts += admitted * KINDS[name].prompt if world.of("prefill") else 0.0
        world.waiting[name] = count - admitted
        if admitted:
            world.running += ((admitted, KINDS[name].ticks),)


def _reconcile(world: World) -> None:
    """Start or drain workers until there are as many as wanted, as every platform does."""
    for role, count in world.wanted.items():
        present = len(world.of(role)) + len(world.of(role, "starting"))
        for _ in range(count - present):
            world.workers += (Worker(f"w{world.names}", role, "starting", left=STARTUP),)
            world.names += 1
        ready = sorted(world.of(role, "starting"), key=lambda each: -each.left) + world.of(role)
        for worker in ready[: max(0, present - count)]:
            set_worker(world, worker, replace(worker, state="draining", ticks=0, left=DRAIN))


def decide(world: World, which: int, seen: Report) -> Decision:
    """Let one of the planners decide."""
    planner = Planner(world.setup.objectives, world.planners[which])
    decision = planner.decide(seen)
    world.planners = (*world.planners[:which], planner.state, *world.planners[which + 1 :])
    return decision


def apply(world: World, decision: Decision) -> bool:
    """Carry out a decision as a platform does. Return whether anything changed."""
    if decision.advisory or decision.expects != str(world.revision):
        return False
    before = dict(world.wanted)
    for action in decision.actions:
        if isinstance(action, Add):
            world.wanted[action.role] = action.count
        elif isinstance(action, Drain):
            world.wanted[action.role] = action.count
            for worker in [each for each in world.workers if each.name == action.worker and each.state != "draining"]:
                set_worker(world, worker, replace(worker, state="draining", ticks=0, left=DRAIN))
        elif isinstance(action, Flip):
            for worker in [each for each in world.workers if each.name == action.worker and each.role == action.role]:
                set_worker(world, worker, Worker(worker.name, action.to, "starting", left=FLIP))
                world.wanted[action.role] -= 1
                world.wanted[action.to] += 1
    if world.wanted == before:
        return False
    world.revision += 1
    for role, count in world.wanted.items():
        if count != before[role]:
            world.changes[role] = (*world.changes.get(role, ()), Change(world.tick, count > before[role]))
    _reconcile(world)
    return True
