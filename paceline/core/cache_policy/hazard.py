"""How soon blocks are asked for again, learned while they are kept and after they were evicted."""

from __future__ import annotations

from bisect import bisect_right

EDGES = (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 181)
"""Ages, in epochs, at which a bin of ages begins."""
HORIZON = 256
"""Epochs after which a block that was not asked for is forgotten."""
BIN = tuple(bisect_right(EDGES, age) - 1 for age in range(HORIZON))
"""The bin of an age."""
BINS = len(EDGES)

_WIDTHS = [end - start for start, end in zip(EDGES, (*EDGES[1:], HORIZON))]
_DECAY = 0.9
_DECAY_EPOCHS = 32
_PRIOR = 30.0
"""What all classes together say of an age counts as much as so many blocks of the class itself that were seen there."""


class Hazards:
    """Counts, for each class of blocks and each bin of ages, how many were there and how many of these were asked for.

    Only what happened recently counts: half of it is forgotten within some 200 epochs.
    """

    def __init__(self, classes: int) -> None:
        self.now = 0
        """Epoch."""
        self._alive = [[0] * HORIZON for _ in range(classes)]  # blocks by the epoch of their last use, a ring
        self._population = [[0] * BINS for _ in range(classes)]  # the same by age
        self._asked = [[0.0] * BINS for _ in range(classes)]
        self._exposed = [[0.0] * BINS for _ in range(classes)]  # blocks x epochs

    def add(self, kind: int) -> None:
        """A block of this class is used now."""
        self._alive[kind][self.now % HORIZON] += 1
        self._population[kind][0] += 1

    def discard(self, kind: int, epoch: int) -> None:
        """A block that was used then is not waited for any more."""
        age = self.now - epoch
        if age < HORIZON:
            self._alive[kind][epoch % HORIZON] -= 1
            self._population[kind][BIN[age]] -= 1

    def ask(self, kind: int, epoch: int) -> None:
        """A block that was used then is asked for now."""
        age = self.now - epoch
        if age < HORIZON:
            self._asked[kind][BIN[age]] += 1
            self.discard(kind, epoch)

    def tick(self) -> None:
        """The next epoch begins."""
        for population, exposed in zip(self._population, self._exposed):
            for index, count in enumerate(population):
                exposed[index] += count
        self.now += 1
        for alive, population in zip(self._alive, self._population):
            for index in range(1, BINS):
                moved = alive[(self.now - EDGES[index]) % HORIZON]
                population[index - 1] -= moved
                population[index] += moved
            population[-1] -= alive[self.now % HORIZON]
            alive[self.now % HORIZON] = 0
        if self.now % _DECAY_EPOCHS == 0:
            for counts in (*self._asked, *self._exposed):
                counts[:] = [count * _DECAY for count in counts]

    def indices(self) -> list[list[float]]:
        """By class and bin of ages: the most hits for each epoch in a slot that keeping such a block can give, over all
        times after which it is given up (Gittins' index)."""
        asked = [sum(column) for column in zip(*self._asked)]
        exposed = [sum(column) for column in zip(*self._exposed)]
        base = [(a + 1e-6) / (a + e + 1e-3) for a, e in zip(asked, exposed)]
        return [self._index(kind, base) for kind in range(len(self._asked))]

    def _index(self, kind: int, base: list[float]) -> list[float]:
        rates = [
            (asked + rate * _PRIOR) / (asked + exposed + _PRIOR)
            for asked, exposed, rate in zip(self._asked[kind], self._exposed[kind], base)
        ]
        # Within a bin the rate is the same, so its middle stands for it.
        hits = [1 - (1 - rate) ** width for rate, width in zip(rates, _WIDTHS)]
        times = [hit / rate if rate > 0 else float(width) for hit, rate, width in zip(hits, rates, _WIDTHS)]
        found = []
        for first in range(BINS):
            best = gained = spent = 0.0
            left = 1.0
            for index in range(first, BINS):
                gained += left * hits[index]
                spent += left * times[index]
                left *= 1 - hits[index]
                best = max(best, gained / spent)
            found.append(best)
        return found
