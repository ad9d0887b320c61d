"""Random series with sums in constant time, so that many steps can be simulated at once.

A series repeats after SIZE values. Each user of a series begins at its own index.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random

import numpy as np
from numpy.typing import NDArray

from paceline.core.step_times import Drafts, Spread

SIZE = 1 << 12


class Ratios:
    """A series of ratios that has exactly the distribution of a spread.

    Args:
        seed: decides the order of the ratios.
    """

    def __init__(self, spread: Spread, seed: int) -> None:
        self._values = [spread.at((index + 0.5) / SIZE) for index in range(SIZE)]
        random.Random(seed).shuffle(self._values)
        self._array = np.array(self._values)
        twice = self._values * 2
        self._sums = [0.0, *itertools.accumulate(twice)]
        self._moments = [0.0, *itertools.accumulate(index * value for index, value in enumerate(twice))]

    def at(self, index: int) -> float:
        """Return the ratio at an index of the series."""
        return self._values[index % SIZE]

    def values(self, index: int, count: int) -> NDArray[np.float64]:
        """Return `count` consecutive ratios, the first of them at `index`."""
        return self._array[np.arange(index, index + count) % SIZE]

    def seconds(self, index: int, steps: int, first: float, growth: float) -> float:
        """Return the time of `steps` steps: the sum of (first + i * growth) * ratio over the steps i = 0, 1, …

        Args:
            index: index of the first step's ratio.
            first: seconds of the first step before it is multiplied by its ratio.
            growth: seconds by which each step is longer than the one before it.
        """
        index %= SIZE
        seconds = 0.0
        while steps > 0:
            count = min(steps, SIZE)
            ratios = self._sums[index + count] - self._sums[index]
            moment = self._moments[index + count] - self._moments[index] - index * ratios
            seconds += first * ratios + growth * moment
            steps, first = steps - count, first + count * growth
        return seconds

    def steps_within(self, seconds: float, index: int, most: int, first: float, growth: float) -> int:
        """Return the number of steps, at most `most`, after which at least `seconds` have passed. For the other
        arguments see `seconds`.
        """
        return bisect.bisect_left(range(most), seconds, key=lambda steps: self.seconds(index, steps, first, growth))


@functools.lru_cache(maxsize=64)
def ratios_of(spread: Spread, seed: int) -> Ratios:
    """Return the series of a spread and a seed. Simulations of one profile share it."""
    return Ratios(spread, seed)


class Yields:
    """A series of the numbers of tokens that steps give to one sequence: one, and the drafts that are accepted.

    Args:
        seed: decides the order of the numbers.
    """

    def __init__(self, drafts: Drafts, seed: int) -> None:
        chances = list(itertools.accumulate(drafts.accepted, lambda before, chance: before * chance, initial=1.0))
        # The share of steps that give more than j tokens is chances[j], so evenly spaced levels give exact shares.
        self._numbers = [max(1, sum((index + 0.5) / SIZE < chance for chance in chances)) for index in range(SIZE)]
        random.Random(seed).shuffle(self._numbers)
        self._sums = [0, *itertools.accumulate(self._numbers)]
        self.mean = self._sums[-1] / SIZE
        """Mean number of tokens that a step gives to one sequence."""
        self.is_one = not drafts.most
        """Whether every step gives exactly one token, because there are no drafts."""

    def tokens(self, index: int, steps: int) -> int:
        """Return the number of tokens that `steps` steps give; the first of them has this index."""
        return steps if self.is_one else self._sum(index + steps) - self._sum(index)

    def steps(self, index: int, tokens: int) -> int:
        """Return the least number of steps that give at least `tokens` tokens."""
        if self.is_one:
            return tokens
        rounds, rest = divmod(self._sum(index) + tokens, self._sums[-1])
        return rounds * SIZE + bisect.bisect_left(self._sums, rest) - index

    def _sum(self, index: int) -> int:
        rounds, rest = divmod(index, SIZE)
        return rounds * self._sums[-1] + self._sums[rest]
