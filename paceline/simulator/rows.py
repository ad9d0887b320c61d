"""The decoding sequences of one worker. They advance together, so simulating many steps of all of them takes constant
time.

Instants are counted in steps of the worker. Between two steps at which a sequence ends or needs blocks, nothing about
the rows changes but the length of their contexts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.engine.chunk_planner import LOOKAHEAD_TOKENS
from paceline.simulator.sequence import Sequence
from paceline.simulator.series import SIZE, Yields


@dataclass(slots=True, eq=False)
class SimulatedRow:
    """A decoding sequence, and the steps at which it ends or next needs blocks."""

    sequence: Sequence
    number: int
    joined_step: int
    joined_len: int
    """Tokens of the context when the row joined the worker's rows, the newest token included."""
    joined_done: int
    """Tokens of the answer that were generated before the row joined."""
    end_step: int
    grow_step: int
    is_here: bool = True


class SimulatedRows:
    """The rows of a worker.

    Args:
        yields: series of the numbers of tokens that steps give to one row.
    """

    def __init__(self, yields: Yields) -> None:
        self.step = 0
        """Steps so far, and the index of the next one."""
        self.count = 0
        self.by_group: dict[str, int] = {}
        """Number of rows by class of requests."""
        self._yields = yields
        self._numbers = 0
        self._due: list[tuple[int, int, SimulatedRow]] = []
        self._rows: dict[Sequence, SimulatedRow] = {}
        self._lengths = 0
        self._steps = 0

    def __iter__(self) -> Iterator[SimulatedRow]:
        return iter(list(self._rows.values()))

    @property
    def growth(self) -> float:
        """Number of tokens by which one step lengthens all contexts together; a mean if there are drafts."""
        return self.count * self._yields.mean

    @property
    def context(self) -> float:
        """Number of tokens, over all contexts, that the next step reads."""
        return self._lengths + (self.count * self.step - self._steps) * self._yields.mean

    def join(self, sequence: Sequence, capacity: int) -> None:
        """Add a sequence, which decodes from the next step on.

        Args:
            capacity: number of tokens that fit into the blocks of the sequence.
        """
        length = sequence.prompt_tokens + sequence.done
        index = _index(sequence)
        end = self.step + self._yields.steps(index, sequence.left)
        row = SimulatedRow(sequence, self._numbers, self.step, length, sequence.done, end, 0)
        self._numbers += 1
        self._rows[sequence] = row
        self.count += 1
        self.by_group[sequence.group] = self.by_group.get(sequence.group, 0) + 1
        self._lengths += length
        self._steps += self.step
        self.grown(row, capacity)

    def grown(self, row: SimulatedRow, capacity: int) -> None:
        """Note the new capacity of a row's blocks. The row needs more blocks before it has that many tokens."""
        room = capacity - LOOKAHEAD_TOKENS - row.joined_len
        index = _index(row.sequence)
        row.grow_step = max(self.step + 1, row.joined_step + self._yields.steps(index, max(room, 0)))
        heapq.heappush(self._due, (min(row.grow_step, row.end_step), row.number, row))

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, which keeps the tokens that it has."""
        row = self._rows.pop(sequence)
        sequence.done = self._done(row)
        row.is_here = False
        self.count -= 1
        self.by_group[sequence.group] -= 1
        self._lengths -= row.joined_len
        self._steps -= row.joined_step

    def has(self, sequence: Sequence) -> bool:
        return sequence in self._rows

    def newest(self) -> SimulatedRow | None:
        """Return the row that joined last; None if there is none."""
        return next(reversed(self._rows.values()), None)

    def length(self, row: SimulatedRow) -> int:
        """Return the number of tokens that a row's context has now."""
        return row.joined_len + self._done(row) - row.joined_done

    def _done(self, row: SimulatedRow) -> int:
        given = self._yields.tokens(_index(row.sequence), self.step - row.joined_step)
        return min(row.joined_done + given, row.sequence.answer_tokens)

    def steps_until_due(self) -> int:
        """Return the steps until the next row ends or needs blocks; there must be a row."""
        while not self._due[0][2].is_here:
            heapq.heappop(self._due)
        return max(1, self._due[0][0] - self.step)

    def advance(self, steps: int) -> list[SimulatedRow]:
        """Count steps, no more than `steps_until_due`. Return the rows that end or need blocks now."""
        self.step += steps
        due: list[SimulatedRow] = []
        while self._due and (self._due[0][0] <= self.step or not self._due[0][2].is_here):
            _, _, row = heapq.heappop(self._due)
            if row.is_here:
                due.append(row)
        return due


def _index(sequence: Sequence) -> int:
    """Return the index in the series of yields at which a sequence begins. A later attempt has another index."""
    return (sequence.number * 7919 + sequence.done * 31) % SIZE
