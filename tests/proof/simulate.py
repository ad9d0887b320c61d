"""Simulate larger worlds with many random faults: `python -m tests.proof.simulate --seed N`, or `--seeds 10000`.

A run depends only on its seed. A run that fails prints its trace, one line per event, and can be repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

from paceline.core.cache_policy.registry import POLICIES
from tests.proof import gateway, judge, moves, network, transfer, worker
from tests.proof.moves import Move
from tests.proof.setup import ONE_GROUP, WITH_A_WINDOW, Request, Setup
from tests.proof.world import Violation, World, make_world

MOST_EVENTS = 20_000
"""Limit of events. A run that has not come to rest by then repeats itself for ever."""


_HOW_OFTEN = {
    network.duplicate: 8.0,
    network.delay: 2.0,
    network.crash_ledger: 8.0,
    network.cut: 30.0,
    worker.fetch_failed: 10.0,
    worker.leave_prefix: 10.0,
    transfer.run_out_of_time: 10.0,
    gateway.restart: 0.05,
    network.restart_ledger: 0.05,
    worker.adopt_never: 0.1,
}
"""Weights of faults; others have 1. Restarts leave little that could still fail, and calls to adopt are frequent."""


@dataclass
class Run:
    """The world of one seed and its trace."""

    seed: int
    world: World
    lines: list[str] = field(default_factory=list)

    def step(self, move: Move) -> None:
        self.lines.append(f"{len(self.lines):5}  {move.describe(self.world)}")
        moves.step(self.world, move)


FEW_SEEDS = 100
"""Number of seeds in `make test`. Each known mutation of the protocol breaks one of them."""


def setup_of(seed: int) -> Setup:
    """Make a setup: 20 requests with common beginnings, 4 decode and 4 prefill workers, and blocks for few requests.

    For odd seeds there are two hosts, so that about half of the attempts are between hosts. In half of these seeds,
    prefixes are fetched from the other host. In a third of all seeds, half of the requests read encodings. The cache
    policy is random.
    """
    draw = random.Random(seed)
    media = random.Random(f"media {seed}")
    layout = draw.choice((ONE_GROUP, WITH_A_WINDOW))
    requests = tuple(
        Request(
            text=draw.choice(("", "a", "ab", "abcd", "abxy", "uv")),
            tail=draw.choice((0, 4, 15)),
            growth=draw.choice((0, 16, 40)),
            one_token=draw.random() < 0.1,
            media=media.choice(("", "", "m", "mn")) if seed % 3 == 2 else "",
        )
        for _ in range(20)
    )
    slots, faults = draw.choice((12, 12, 20, 40)), draw.choice((0, 5, 20, 60))
    places = tuple(draw.randrange(2) for _ in range(8)) if seed % 2 else ()
    policy = draw.choice([*POLICIES.values()])
    fetched = draw.choice(("", "au")) if places else ""
    return Setup(requests, slots, layout, 4, 4, places, fetched=fetched, attempts=3, faults=faults, policy=policy)


def simulate(seed: int) -> Run:
    """Run a seed until it comes to rest. Raises Violation with the trace."""
    run = Run(seed, make_world(setup_of(seed)))
    try:
        _run(run, random.Random(seed))
    except Violation as violation:
        raise Violation("\n".join((f"seed {seed}", *run.lines, f"=> {violation}"))) from violation
    return run


def _run(run: Run, draw: random.Random) -> None:
    world = run.world
    often = draw.uniform(0.02, 0.3)
    """Probability of a fault per event."""
    while world.faults and len(run.lines) < MOST_EVENTS / 2:
        going = list(moves.progress(world))
        if world.faults and draw.random() < often and (wrong := list(moves.faults(world))):
            world.faults -= 1
            run.step(draw.choices(wrong, [_HOW_OFTEN.get(move.act, 1.0) for move in wrong])[0])
        elif not going or draw.random() < 0.1:
            if not going and not world.jobs:
                break  # every request has ended
            run.step(draw.choice(list(moves.at_any_time(world)) or going))
        else:
            run.step(_some(going, draw))
    _calm_down(run, draw)


def _some(going: list[Move], draw: random.Random) -> Move:
    """Choose a move. Mostly avoid moves in which late messages or blocks arrive, so that much happens before them."""
    in_time = [move for move in going if move.act not in (network.arrive, transfer.read, transfer.stop_reading)]
    return draw.choice(in_time if in_time and draw.random() < 0.95 else going)


def _calm_down(run: Run, draw: random.Random) -> None:
    """Run without faults. When no move is left, let time pass; after that, the world must be at rest."""
    rested = False
    while not rested:
        if len(run.lines) > MOST_EVENTS:
            raise Violation("it does not come to rest")
        going = list(moves.progress(run.world))
        if going:
            run.step(draw.choice(going))
            continue
        run.step(Move(network.pass_time, ()))
        rested = not any(moves.progress(run.world))
    judge.check_quiet(run.world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this seed and print its trace")
    parser.add_argument("--seeds", type=int, default=FEW_SEEDS, help="number of seeds to run")
    parser.add_argument("--first", type=int, default=0, help="first of these seeds")
    arguments = parser.parse_args()
    try:
        if arguments.seed is not None:
            print("\n".join(simulate(arguments.seed).lines))
            return
        began = time.monotonic()
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        events = sum(len(simulate(seed).lines) for seed in seeds)
    except Violation as violation:
        sys.exit(str(violation))
    print(f"{arguments.seeds:,} seeds, {events:,} events, {time.monotonic() - began:.0f} s: no violation")


if __name__ == "__main__":
    main()
