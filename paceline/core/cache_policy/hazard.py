"""Statistics of how soon blocks are requested again, by class and age."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

EDGES = (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 181)
"""Ages, in epochs, at which the bins of ages begin."""
BINS = len(EDGES)
HORIZON = 256
"""Age in epochs up to which requests for a block are counted. Older blocks are in the last bin."""

_WIDTHS = [end - start for start, end in zip(EDGES, (*EDGES[1:], HORIZON))]
_BIN = [bisect_right(EDGES, age) - 1 for age in range(HORIZON)]
_DECAY = 0.9
_DECAY_EPOCHS = 32
_PRIOR = 30.0
"""Weight of the rate that is assumed for a class at an age: it counts as much as this many observed blocks."""


def bin_of(age: int) -> int:
    """Return the bin of an age in epochs."""
    return _BIN[age] if age < HORIZON else BINS - 1


class Hazards:
    """Counts, for each class of blocks and each bin of ages, how many blocks waited and how many were requested.

    Older counts weigh less: a count is halved about every 200 epochs.

    Args:
        assumed: for each class, the share of its blocks that are assumed to be requested in an epoch before any were
            observed. None assumes the share of all classes together.
    """

    def __init__(self, assumed: Sequence[float | None]) -> None:
        kinds = len(assumed)
        self._assumed = assumed
        self.now = 0
        """The current epoch."""
        self._waiting = [[0] * HORIZON for _ in range(kinds)]  # blocks by the epoch of their last use, a ring
        self._population = [[0] * BINS for _ in range(kinds)]  # the same blocks by bin of ages
        self._asked = [[0.0] * BINS for _ in range(kinds)]
        self._waited = [[0.0] * BINS for _ in range(kinds)]  # blocks x epochs

    def add(self, kind: int, epoch: int) -> None:
        """Count a block that was last used in `epoch` and waits for its next request."""
        age = self.now - epoch
        if age < HORIZON:
            self._waiting[kind][epoch % HORIZON] += 1
            self._population[kind][_BIN[age]] += 1

    def discard(self, kind: int, epoch: int) -> None:
        """Stop counting a block that was last used in `epoch`."""
        age = self.now - epoch
        if age < HORIZON:
            self._waiting[kind][epoch % HORIZON] -= 1
            self._population[kind][_BIN[age]] -= 1

    def ask(self, kind: int, epoch: int) -> None:
        """Count a request for a block that was last used in `epoch`, and stop counting the block as waiting."""
        age = self.now - epoch
        if age < HORIZON:
            self._asked[kind][_BIN[age]] += 1
        self.discard(kind, epoch)

    def tick(self) -> None:
        """Begin the next epoch."""
        self.now += 1
        for waiting, population, waited in zip(self._waiting, self._population, self._waited):
            if not any(population):
                continue
            for index, count in enumerate(population):
                waited[index] += count
            for index in range(1, BINS):
                older = waiting[(self.now - EDGES[index]) % HORIZON]
                population[index - 1] -= older
                population[index] += older
            population[-1] -= waiting[self.now % HORIZON]
            waiting[self.now % HORIZON] = 0
        if self.now % _DECAY_EPOCHS == 0:
            for counts in (*self._asked, *self._waited):
                counts[:] = [count * _DECAY for count in counts]

    def worth(self) -> list[list[float]]:
        """Return the worth of a block as [class][bin of ages], in expected hits per epoch (the Gittins index).

        The expectation assumes that the block is evicted at the age that makes the rate largest.
        """
        asked, waited = ([sum(column) for column in zip(*counts)] for counts in (self._asked, self._waited))
        usual = [a / (a + w) if a else 0.0 for a, w in zip(asked, waited)]
        # Most loads have no blocks of most classes with hints. Their worth depends only on what is assumed of them.
        unseen: dict[float | None, list[float]] = {}
        worth = []
        for kind, assumed in enumerate(self._assumed):
            if any(self._asked[kind]) or any(self._waited[kind]):
                worth.append(self._worth(kind, usual))
            else:
                if assumed not in unseen:
                    unseen[assumed] = self._worth(kind, usual)
                worth.append(unseen[assumed])
        return worth

    def _worth(self, kind: int, usual: Sequence[float]) -> list[float]:
        if (assumed := self._assumed[kind]) is not None:
            usual = [assumed] * BINS
        rates = [
            (asked + rate * _PRIOR) / (asked + waited + _PRIOR)
            for asked, waited, rate in zip(self._asked[kind], self._waited[kind], usual)
        ]
        # For a block that enters a bin: the probability of a request there, and the expected epochs spent in the bin.
        hits = [1 - (1 - rate) ** width for rate, width in zip(rates, _WIDTHS)]
        times = [hit / rate if rate else float(width) for hit, rate, width in zip(hits, rates, _WIDTHS)]
        return [_best_ratio(hits[first:], times[first:]) for first in range(BINS)]


def _best_ratio(hits: list[float], times: list[float]) -> float:
    """Return the largest ratio of expected hits to expected time over all bins after which a block may be evicted."""
    best = gained = spent = 0.0
    left = 1.0
    for hit, time in zip(hits, times):
        gained += left * hit
        spent += left * time
        left *= 1 - hit
        best = max(best, gained / spent if spent else 0.0)
    return best
