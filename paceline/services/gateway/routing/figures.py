"""The figures of many workers as arrays, by which a search compares all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Figures:
    """The figures of some workers of a kind: an array for each figure, with one element for each worker.

    Args:
        index: positions of the workers among all workers of their kind.
        host: numbers of the workers' hosts.
        values: the other figures, [figure, worker], as `KindColumns.put` writes them.
    """

    def __init__(self, index: Indices, host: Indices, values: Floats) -> None:
        self.index, self.host = index, host
        self.rank: Floats
        """Rank of each worker in the order of ids, which breaks ties."""
        self.longest: Floats
        """Longest context in tokens; -1 if the worker is not ready."""
        self.has_room: Floats
        self.queued: Floats
        self.recent: Floats
        self.at: Floats
        """Instant for which the value in `recent` is right."""
        self.speed: Floats
        self.load: Floats
        self.running: Floats
        self.fetch: Floats
        self.miss: Floats
        """Seconds in which each worker reads the request's adapter; 0 if it has it."""
        self._values = values
        self.rank, self.longest, self.has_room, self.queued, self.recent = values[:5]
        self.at, self.speed, self.load, self.running, self.fetch, self.miss = values[5:]

    def __len__(self) -> int:
        return self.index.size

    def take(self, which: Indices) -> Figures:
        """Return the figures of some of these workers.

        Args:
            which: indices of workers in ascending order, without repetitions.
        """
        if which.size == self.index.size:
            return self
        return Figures(self.index[which], self.host[which], self._values[:, which])


def decayed(tokens: float | Floats, age: float | Floats, half_life: float) -> Floats:
    """Return the number of tokens that still count of `tokens` that were sent `age` seconds ago."""
    return np.asarray(tokens * np.exp2(-age / half_life))
