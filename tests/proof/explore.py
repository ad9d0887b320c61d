"""Visit every state that a small world can reach: `python -m tests.proof.explore SETUP --faults N`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import deque
from dataclasses import dataclass

from tests.proof import judge, moves
from tests.proof.canonical import digest
from tests.proof.moves import Move
from tests.proof.network import pass_time
from tests.proof.setup import SETUPS, Setup
from tests.proof.world import Violation, World, make_world


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    quiet: int
    """Number of states in which nothing can happen any more."""


class Explorer:
    """A breadth-first search over canonical states, so that the trace of a violation is as short as possible."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._came_from: dict[bytes, tuple[bytes, Move] | None] = {}
        self._calm: dict[bytes, bytes] = {}
        """The next state if nothing goes wrong from now on, by state."""
        self._ahead: deque[tuple[bytes, World]] = deque()
        self._transitions = 0

    def run(self) -> Explored:
        """Visit all states.

        Raises Violation, with its trace, if a promise is broken or a state never comes to rest without faults.
        """
        first = make_world(self._setup)
        name = digest(first)
        self._came_from[name] = None
        self._ahead.append((name, first))
        while self._ahead:
            name, world = self._ahead.popleft()
            self._expand(name, world)
        quiet = self._check_ends()
        return Explored(len(self._came_from), self._transitions, quiet)

    def _expand(self, name: bytes, world: World) -> None:
        going = list(moves.progress(world))
        self._calm[name] = b""
        for move in going:
            reached = self._step(name, world, move, fault=False)
            self._calm[name] = self._calm[name] or reached
        for move in moves.at_any_time(world):
            reached = self._step(name, world, move, fault=False)
            if not going and move.act is pass_time:
                self._calm[name] = reached
        if world.faults:
            for move in moves.faults(world):
                if self._setup.kind in ("", move.act.__name__):
                    self._step(name, world, move, fault=True)
        if self._calm[name] == name:
            try:
                judge.check_quiet(world)
            except Violation as violation:
                raise self._traced(violation, name) from violation

    def _step(self, name: bytes, world: World, move: Move, fault: bool) -> bytes:
        self._transitions += 1
        after = world.copy()
        after.faults -= fault
        try:
            moves.step(after, move)
        except Violation as violation:
            raise self._traced(violation, name, move) from violation
        reached = digest(after)
        if reached not in self._came_from:
            self._came_from[reached] = (name, move)
            self._ahead.append((reached, after))
        return reached

    def _check_ends(self) -> int:
        """Check that every state comes to rest if nothing goes wrong any more. Return the number of states at rest."""
        resting = {name for name, follower in self._calm.items() if follower == name}
        ends = set(resting)
        for name in self._calm:
            path = []
            while name not in ends:
                path.append(name)
                ends.add(name)
                name = self._calm[name]
                if name in path:
                    raise self._traced(Violation("it never comes to rest, but repeats the same states"), name)
        return len(resting)

    def _traced(self, violation: Violation, name: bytes, last: Move | None = None) -> Violation:
        """Return the violation with its trace, one line per event."""
        path = [last] if last else []
        while (came := self._came_from[name]) is not None:
            name, move = came
            path.append(move)
        world, lines = make_world(self._setup), []
        for move in reversed(path):
            lines.append(move.describe(world))
            if move is not last:
                move.apply(world)
        return Violation("\n".join((*lines, f"=> {violation}")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setup", nargs="*", help=f"of {', '.join(SETUPS)}; all of them where none is named")
    parser.add_argument("--faults", type=int, default=1, help="at most so many things go wrong")
    parser.add_argument("--kind", default="", help="only this may go wrong: duplicate, delay, lose, crash, fail, ...")
    parser.add_argument("--attempts", type=int, help="of each request, by default as the world has it")
    arguments = parser.parse_args()
    if unknown := set(arguments.setup) - SETUPS.keys():
        parser.error(f"there is no world {', '.join(unknown)}")
    for name in arguments.setup or SETUPS:
        began = time.monotonic()
        attempts = arguments.attempts or SETUPS[name].attempts
        found = Explorer(
            dataclasses.replace(SETUPS[name], faults=arguments.faults, kind=arguments.kind, attempts=attempts)
        ).run()
        seconds = time.monotonic() - began
        print(f"{name}: {found.states:,} states, {found.transitions:,} transitions, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
