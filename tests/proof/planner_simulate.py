"""Simulate large fleets with many random faults: `python -m tests.proof.planner_simulate --seed N`, or `--seeds 10000`.

A run depends only on its seed. Requests arrive at random around a load that stays the same for a while. A run that
breaks a promise prints its trace, one line per tick, and can be repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.reports import Role
from tests.proof import planner_judge as judge
from tests.proof.planner_explore import WARM_UP
from tests.proof.planner_moves import CALM, Move, faults, step
from tests.proof.planner_world import KINDS, Load, Setup, World, make_world
from tests.proof.world import Violation

FEW_SEEDS = 150
"""Number of seeds in `make test`."""
TICKS, REST = 60, 50


def setup_of(seed: int) -> Setup:
    """Return a fleet that starts with up to 17 workers, with or without encode workers, flips, twins and a budget.

    Some fleets are on one machine. Then workers of some roles share its cores, or all share its memory, or both. Each
    eighth fleet has pool workers alone.
    """
    draw = random.Random(seed)
    counts: dict[Role, int] = {"prefill": draw.randint(1, 6), "decode": draw.randint(1, 8)}
    if draw.random() < 0.4:
        counts["encode"] = draw.randint(1, 3)
    if seed % 8 == 7:
        counts = {"pool": draw.randint(1, 6)}
    least = draw.choice((0, 1, 1))
    objectives = Objectives(
        classes={"chats": Latency(3.0, 0.08, 0.9)},
        default=Latency(draw.choice((3.0, 6.0)), draw.choice((0.06, None))),
        roles={role: RoleLimits(least, draw.choice((8, 12))) for role in counts},
        budget=draw.choice((None, sum(counts.values()) + draw.randint(0, 6))),
        flips=draw.random() < 0.7,
        slow_seconds=draw.choice((10.0, 30.0)),
        idle_seconds=draw.choice((10.0, 60.0)),
        stale_seconds=12.0,
    )
    loads = tuple(_draw_load(draw, counts) for _ in range(4))
    pins = tuple((role, draw.randint(0, 4)) for role in counts)
    twins = draw.random() < 0.3
    on_one_machine = draw.random() < 0.3
    sharing = tuple(role for role in counts if on_one_machine and draw.random() < 0.7)
    shares_memory = on_one_machine and draw.random() < 0.7
    return Setup(
        objectives,
        counts,
        loads[0],
        loads[1:],
        pins=pins,
        twins=twins,
        shares_cores=sharing,
        shares_memory=shares_memory,
    )


def _draw_load(draw: random.Random, counts: dict[Role, int]) -> Load:
    """Return a load that may be nothing at all, and that may be too much for the fleet."""
    size = draw.choice((0, 0, 3, 10, 25))
    has_encoders, has_pool = "encode" in counts, "pool" in counts
    kinds = [name for name, kind in KINDS.items() if kind.pools == has_pool and (has_encoders or not kind.media)]
    return {name: draw.randint(0, size) for name in kinds}


def simulate(seed: int) -> list[str]:
    """Run a seed. Return its trace, a line per tick. Raises Violation with the trace."""
    world, draw, lines = make_world(setup_of(seed)), random.Random(seed), list[str]()
    often = draw.choice((0.0, 0.05, 0.2, 0.5))
    try:
        for tick in range(WARM_UP + TICKS + REST):
            move = CALM
            if WARM_UP <= tick < WARM_UP + TICKS and draw.random() < often and (wrong := list(faults(world))):
                name = draw.choice(sorted({each.name for each in wrong}))
                move = draw.choice([each for each in wrong if each.name == name])
            if tick == WARM_UP + TICKS:
                _calm_down(world)
            _tick(world, move, draw, lines, is_noisy=tick < WARM_UP + TICKS)
        judge.check_rest(world, lines)
    except Violation as violation:
        raise Violation("\n".join((f"seed {seed}", *lines, f"=> {violation}"))) from violation
    return lines


def _tick(world: World, move: Move, draw: random.Random, lines: list[str], is_noisy: bool) -> None:
    """Let a tick pass in which as many requests arrive as chance has it."""
    lines.append(f"{world.tick:4}  {move}")
    base = world.load
    if is_noisy:
        world.load = {name: _arrivals(rate, draw) for name, rate in base.items()}
    noisy = world.load
    line = step(world, move)
    if world.load is noisy:
        world.load = base
    lines[-1] += f": {line}"


def _arrivals(rate: int, draw: random.Random) -> int:
    """Return the arrivals of a tick, as independent requests give them."""
    return sum(draw.random() < 0.2 for _ in range(5 * rate))


def _calm_down(world: World) -> None:
    """End what would keep the fleet from resting: people release it, and requests that one machine cannot serve in
    time are given up."""
    if world.setup.shares_cores or world.setup.shares_memory:
        world.waiting.clear()
        world.prompts = 0.0
    for role in list(world.pinned):
        del world.pinned[role]
        world.changes[role] = ()
    world.revision += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this seed and print its trace")
    parser.add_argument("--seeds", type=int, default=FEW_SEEDS, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="first of these seeds")
    arguments = parser.parse_args()
    try:
        if arguments.seed is not None:
            print("\n".join(simulate(arguments.seed)))
            return
        began = time.monotonic()
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        ticks = sum(len(simulate(seed)) for seed in seeds)
    except Violation as violation:
        sys.exit(str(violation))
    print(f"{arguments.seeds:,} seeds, {ticks:,} ticks, {time.monotonic() - began:.0f} s: no violation")


if __name__ == "__main__":
    main()
