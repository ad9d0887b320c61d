"""The figures of workers in columns, for computations on all workers of a kind at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.numerics import Numerics
from paceline.services.gateway.candidates import Candidate
from paceline.services.gateway.router import FETCH_TOKENS_PER_SECOND

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

Kind = tuple[str, str, Numerics | None]
"""Role, layout and numerics of a worker. Within one kind, only costs decide."""

_COLUMNS = (
    "host",
    "rank",
    "ready",
    "has_room",
    "max_len",
    "queued",
    "recent",
    "at",
    "speed",
    "load",
    "running",
    "fetch",
)


class KindColumns:
    """The workers of one kind: a column of figures for each."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.candidates: list[Candidate] = []
        self._figures = np.zeros((len(_COLUMNS), 16))
        self._row = {name: index for index, name in enumerate(_COLUMNS)}

    def __len__(self) -> int:
        return len(self.ids)

    def column(self, name: str) -> Floats:
        """Return the figures of all workers, by index."""
        return self._figures[self._row[name], : len(self.ids)]

    def put(self, index: int, candidate: Candidate, host: int, at: float) -> None:
        """Write the figures of a worker. An index after the last one adds the worker."""
        member = candidate.member
        if index == len(self.ids):
            self.ids.append(member.worker_id)
            self.candidates.append(candidate)
            if index == self._figures.shape[1]:
                self._figures = np.concatenate([self._figures, np.zeros_like(self._figures)], axis=1)
        self.candidates[index] = candidate
        self._figures[:, index] = (
            host,
            self._figures[1, index],
            member.state == "ready",
            candidate.has_room,
            member.max_model_len,
            candidate.queued_tokens,
            candidate.recent_tokens,
            at,
            candidate.tokens_per_second,
            candidate.load,
            member.load.running,
            candidate.fetch_tokens_per_second or FETCH_TOKENS_PER_SECOND,
        )

    def drop(self, index: int) -> str:
        """Remove a worker. Return the id of the one that has its index now."""
        last = len(self.ids) - 1
        self._figures[:, index] = self._figures[:, last]
        self.ids[index], self.candidates[index] = self.ids[last], self.candidates[last]
        self.ids.pop()
        self.candidates.pop()
        return self.ids[index] if index < last else ""

    def sort(self) -> None:
        """Rank the workers by their ids."""
        for rank, index in enumerate(sorted(range(len(self.ids)), key=self.ids.__getitem__)):
            self._figures[1, index] = rank


@dataclass(slots=True)
class WorkerClass:
    """Workers that differ only in costs."""

    kind: Kind
    rows: KindColumns
    cut_host: str
    """The host of all of them, if it is at the end of a cut link; else ""."""
    fitting: Indices
    """Workers whose longest context is long enough; at least one."""
    open: Indices
    """Those that can take the request now."""


def decayed(tokens: float | Floats, age: float | Floats, half_life: float) -> Floats:
    """Return what counts of tokens that were sent `age` seconds ago."""
    return np.asarray(tokens * np.exp2(-age / half_life))
