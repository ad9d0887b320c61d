"""The figures of workers in columns, for computations on all workers of a kind at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.numerics import Numerics
from paceline.services.gateway.routing.candidates import Candidate
from paceline.services.gateway.routing.router import FETCH_TOKENS_PER_SECOND

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

Kind = tuple[str, str, Numerics | None, str]
"""Role, layout, numerics and weights of a worker. The choice between workers of one kind depends on costs only."""

_RANK, _AT, _COLUMNS = 0, 5, 10
"""The rows of `rank` and `at` in the values of `Figures`, and the number of rows."""


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
        self._values = values
        (
            self.rank,
            self.longest,
            self.has_room,
            self.queued,
            self.recent,
            self.at,
            self.speed,
            self.load,
            self.running,
            self.fetch,
        ) = values

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


class KindColumns:
    """The workers of one kind, with their figures."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.candidates: list[Candidate] = []
        self._hosts = np.zeros(16, dtype=np.intp)
        self._values = np.zeros((_COLUMNS, 16))

    def __len__(self) -> int:
        return len(self.ids)

    def figures(self) -> Figures:
        """Return the figures of all workers. The arrays are views, which the next `put`, `drop` or `sort` changes."""
        count = len(self.ids)
        return Figures(np.arange(count), self._hosts[:count], self._values[:, :count])

    def candidate(self, index: int, now: float, half_life: float) -> Candidate:
        """Return a worker, with its recent tokens decayed to the instant `now`."""
        candidate = self.candidates[index]
        if not candidate.recent_tokens:
            return candidate
        recent = decayed(candidate.recent_tokens, now - self._values[_AT, index], half_life)
        return replace(candidate, recent_tokens=float(recent))

    def put(self, index: int, candidate: Candidate, host: int, at: float) -> None:
        """Write the figures of a worker. If the index is the number of workers, the worker is added.

        Args:
            host: number of the worker's host.
            at: instant at which the worker's recent tokens had this value.
        """
        member = candidate.member
        if index == len(self.ids):
            self.ids.append(member.worker_id)
            self.candidates.append(candidate)
            if index == self._hosts.size:
                self._hosts = np.concatenate([self._hosts, np.zeros_like(self._hosts)])
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
        self.candidates[index] = candidate
        self._hosts[index] = host
        self._values[:, index] = (
            self._values[_RANK, index],
            member.max_model_len if member.state == "ready" else -1,
            candidate.has_room,
            candidate.queued_tokens,
            candidate.recent_tokens,
            at,
            candidate.tokens_per_second,
            candidate.load,
            member.load.running,
            candidate.fetch_tokens_per_second or FETCH_TOKENS_PER_SECOND,
        )

    def drop(self, index: int) -> str:
        """Remove a worker. Return the id of the worker that has its index now; "" if it was the last one."""
        last = len(self.ids) - 1
        self._hosts[index], self._values[:, index] = self._hosts[last], self._values[:, last]
        self.ids[index], self.candidates[index] = self.ids[last], self.candidates[last]
        self.ids.pop()
        self.candidates.pop()
        return self.ids[index] if index < last else ""

    def sort(self) -> None:
        """Set the rank of each worker by the order of ids, to break ties."""
        for rank, index in enumerate(sorted(range(len(self.ids)), key=self.ids.__getitem__)):
            self._values[_RANK, index] = rank


@dataclass(slots=True)
class WorkerClass:
    """Workers of one kind that differ only in costs for a request."""

    kind: Kind
    cut_host: str
    """Id of the workers' common host, if this host is at an end of a cut link; else ""."""
    fitting: int
    """Index of one of the workers whose longest context is long enough for the request."""
    open: Figures
    """Workers that can take the request now."""


def decayed(tokens: float | Floats, age: float | Floats, half_life: float) -> Floats:
    """Return the number of tokens that still count of `tokens` that were sent `age` seconds ago."""
    return np.asarray(tokens * np.exp2(-age / half_life))
