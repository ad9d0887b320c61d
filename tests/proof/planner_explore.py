"""Try everything that may happen to a small fleet: `python -m tests.proof.planner_explore SETUP --faults N`.

A run is a sequence of ticks. In each tick nothing goes wrong, or one of all faults does, up to their number. Every run
is tried. After the last tick nothing goes wrong any more, and the fleet must come to rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass

from paceline.core.planner.objectives import Latency, Objectives, RoleLimits
from paceline.core.planner.reports import Role
from tests.proof import planner_judge as judge
from tests.proof.planner_moves import CALM, Move, faults, step
from tests.proof.planner_world import Setup, World, make_world
from tests.proof.world import Violation

WARM_UP, REST = 12, 40
"""Ticks before the first fault, in which the planner learns step times, and after the last one."""

NOTHING = {"documents": 0, "chats": 0}
DOCUMENTS, CHATS, FEW = {"documents": 10, "chats": 2}, {"documents": 0, "chats": 12}, {"documents": 1, "chats": 4}


VECTORS, MORE_VECTORS = {"vectors": 4}, {"vectors": 24}


def _objectives(
    budget: int,
    least: int = 1,
    idle_seconds: float = 15.0,
    flips: bool = True,
    roles: tuple[Role, ...] = ("prefill", "decode"),
) -> Objectives:
    return Objectives(
        default=Latency(ttft=4.0, itl=0.06),
        roles=dict.fromkeys(roles, RoleLimits(least, 4)),
        budget=budget,
        flips=flips,
        slow_seconds=10.0,
        idle_seconds=idle_seconds,
        stale_seconds=12.0,
    )


SETUPS = {
    "swing": Setup(_objectives(4), {"prefill": 2, "decode": 2}, DOCUMENTS, (CHATS, FEW), pins=(("decode", 3),)),
    "zero": Setup(_objectives(4, 0), {"prefill": 1, "decode": 1}, FEW, (NOTHING, CHATS), pins=(("decode", 0),)),
    "asleep": Setup(_objectives(4, 0), {"prefill": 0, "decode": 0}, NOTHING, (FEW, CHATS)),
    "no_flips": Setup(_objectives(4, flips=False), {"prefill": 1, "decode": 3}, CHATS, (DOCUMENTS, NOTHING)),
    "twins": Setup(_objectives(4), {"prefill": 2, "decode": 2}, CHATS, (DOCUMENTS, FEW), twins=True),
    "one_machine": Setup(
        _objectives(4),
        {"prefill": 1, "decode": 1},
        FEW,
        (CHATS, DOCUMENTS),
        pins=(("decode", 2),),
        shares_cores=("prefill", "decode"),
        shares_memory=True,
    ),
    "pool": Setup(
        _objectives(4, 0, roles=("pool",)), {"pool": 2}, VECTORS, (MORE_VECTORS, NOTHING), pins=(("pool", 3),)
    ),
    "pinned": Setup(_objectives(6), {"prefill": 2, "decode": 3}, FEW, (CHATS,), pins=(("prefill", 1), ("decode", 4))),
}


@dataclass
class Explorer:
    """A depth-first search through all runs."""

    setup: Setup
    runs: int = 0
    decisions: int = 0

    def run(self) -> None:
        """Try all runs. Raises Violation with the trace of the first one that breaks a promise."""
        world = make_world(self.setup)
        trace: list[str] = []
        for _ in range(WARM_UP):
            self._step(world, CALM, trace)
        self._explore(world, trace, self.setup.ticks, self.setup.faults)

    def _explore(self, world: World, trace: list[str], ticks: int, left: int) -> None:
        """Try all ways to go on. The branch without a fault goes last, because it may use `world` itself."""
        while ticks and left:
            for move in faults(world):
                branch, lines = world.copy(), trace.copy()
                self._step(branch, move, lines)
                self._explore(branch, lines, ticks - 1, left - 1)
            self._step(world, CALM, trace)
            ticks -= 1
        lines = []
        for _ in range(REST):
            self._step(world, CALM, trace)
            lines.append(trace[-1])
        self.runs += 1
        try:
            judge.check_rest(world, lines)
        except Violation as violation:
            raise Violation("\n".join((*trace, f"=> {violation}"))) from violation

    def _step(self, world: World, move: Move, trace: list[str]) -> None:
        self.decisions += 1
        try:
            line = step(world, move)
        except Violation as violation:
            raise Violation("\n".join((*trace, f"{world.tick:3}  {move}", f"=> {violation}"))) from violation
        trace.append(f"{world.tick:3}  {move}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("setup", nargs="*", help=f"of {', '.join(SETUPS)}; all of them where none is named")
    parser.add_argument("--faults", type=int, default=1, help="number of things that go wrong in a run")
    parser.add_argument("--ticks", type=int, help="ticks in which they may, by default as the setup has it")
    arguments = parser.parse_args()
    if unknown := set(arguments.setup) - SETUPS.keys():
        parser.error(f"there is no setup {', '.join(unknown)}")
    for name in arguments.setup or SETUPS:
        began = time.monotonic()
        setup = SETUPS[name]
        explorer = Explorer(dataclasses.replace(setup, faults=arguments.faults, ticks=arguments.ticks or setup.ticks))
        explorer.run()
        seconds = time.monotonic() - began
        print(f"{name}: {explorer.runs:,} runs, {explorer.decisions:,} ticks, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
