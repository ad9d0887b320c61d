"""A snapshot of a large fleet that finds in less than a millisecond the few workers among which `place` chooses.

The search itself is in `nominee_search.py`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.services.gateway.routing.candidates import Candidate, Need, Snapshot
from paceline.services.gateway.routing.figures import Figures, decayed
from paceline.services.gateway.routing.nominee_search import Kind, NomineeSearch, WorkerClass
from paceline.services.gateway.routing.router import COMPUTING, FETCH_TOKENS_PER_SECOND, PREFILL_TOKENS_PER_SECOND

_RANK, _AT, _MISS, _COLUMNS = 0, 5, 10, 11
"""The rows of `rank`, `at` and `miss` in the values of `Figures`, and the number of rows."""


class KindColumns:
    """The workers of one kind, with their figures."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.candidates: list[Candidate] = []
        self._hosts = np.zeros(16, dtype=np.intp)
        self._values = np.zeros((_COLUMNS, 16))
        self._adapter = 0
        """The adapter for which the row of `miss` is right."""

    def __len__(self) -> int:
        return len(self.ids)

    def figures(self, adapter: int = 0) -> Figures:
        """Return the figures of all workers for a request with this adapter. The arrays are views, which the next
        `put`, `drop` or `sort` changes."""
        count = len(self.ids)
        if adapter != self._adapter:
            self._adapter = adapter
            self._values[_MISS, :count] = [each.miss_seconds(adapter) for each in self.candidates]
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
            candidate.miss_seconds(self._adapter),
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


class CandidateTable(Snapshot):
    """The candidates of a fleet, in columns. Its owner keeps it up to date with `put` and `remove`.

    Args:
        half_life: seconds after which recently sent tokens count half.
        clock: function that returns the time in seconds, for the decay of `recent_tokens`.
    """

    def __init__(self, half_life: float, clock: Callable[[], float]) -> None:
        self._half_life = half_life
        self._clock = clock
        self._kinds: dict[Kind, KindColumns] = {}
        self._places: dict[str, tuple[Kind, int]] = {}
        self._hosts: dict[str, int] = {}
        self._is_sorted = True
        self._usual: float | None = None

    # ---- keeping it up to date

    def put(self, candidate: Candidate) -> None:
        """Add a worker, or replace its figures. `candidate.recent_tokens` must have the value of this moment."""
        member = candidate.member
        kind = member.role, member.layout, member.numerics, member.weights
        known, index = self._places.get(member.worker_id, (None, 0))
        if known != kind:
            self.remove(member.worker_id)
            index = len(self._kinds.setdefault(kind, KindColumns()))
            self._places[member.worker_id] = kind, index
            self._is_sorted = False
        host = self._hosts.setdefault(member.host_id, len(self._hosts))
        rows = self._kinds[kind]
        if known != kind or rows.candidates[index].tokens_per_second != candidate.tokens_per_second:
            self._usual = None
        rows.put(index, candidate, host, self._clock())

    def settle(self) -> None:
        """Rank the workers again if workers were added or removed. Otherwise the next search would be slow, as it would
        do this first."""
        if not self._is_sorted:
            for rows in self._kinds.values():
                rows.sort()
            self._is_sorted = True
        self.usual_rate()

    def remove(self, worker_id: str) -> None:
        """Remove a worker by its id, if the table contains it."""
        kind, index = self._places.pop(worker_id, (None, 0))
        if kind is not None:
            rows = self._kinds[kind]
            if moved := rows.drop(index):
                self._places[moved] = kind, index
            if not len(rows):
                del self._kinds[kind]
            self._is_sorted, self._usual = False, None

    # ---- the snapshot

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all workers, in the order of their ids."""
        now = self._clock()
        for worker_id in sorted(self._places):
            kind, index = self._places[worker_id]
            yield self._kinds[kind].candidate(index, now, self._half_life)

    def usual_rate(self) -> float:
        """Return the average prefill rate that the workers have measured, in tokens per second."""
        if self._usual is None:
            speeds = (rows.figures().speed for rows in self._kinds.values())
            rates = [rate for speed in speeds for rate in speed[speed > 0].tolist()]
            self._usual = statistics.fmean(rates) if rates else PREFILL_TOKENS_PER_SECOND
        return self._usual

    def hungriest(self, need: Need, seconds: float, tokens: float) -> Candidate | None:
        """Return the worker with the least to compute, as `Snapshot.hungriest` defines it."""
        for role in COMPUTING:
            found: Candidate | None = None
            least = math.inf
            for kind, rows in self._kinds.items():
                if kind[0] != role:
                    continue
                every = rows.figures()
                fitting = every.take(np.flatnonzero(every.longest >= need.context_tokens))
                filled = fitting.queued / np.where(fitting.speed > 0, seconds * fitting.speed, tokens)
                if filled.size and filled.min() < least:
                    least, found = float(filled.min()), rows.candidates[fitting.index[filled.argmin()]]
            if found is not None:
                return found
        return None

    def on_host(self, host_id: str) -> list[Candidate]:
        """Return the workers that run on one host."""
        if (host := self._hosts.get(host_id)) is None:
            return []
        now = self._clock()
        return [
            rows.candidate(int(index), now, self._half_life)
            for rows in self._kinds.values()
            for index in np.flatnonzero(rows.figures().host == host)
        ]

    def nominees(self, need: Need) -> list[Candidate]:
        """Return a few workers. `place` chooses the same ones from these as it would from all workers."""
        self.settle()
        now = self._clock()
        search = NomineeSearch(need, self._hosts, self.usual_rate(), now, self._half_life)
        prefills = [(own, search.computing(own, own.open)) for own in self._classes("prefill", need)]
        chosen: set[tuple[Kind, int]] = set()
        for decode in self._classes("decode", need):
            decoding = search.decoding(decode.open)
            partners = [(own, ways) for own, ways in prefills if search.can_hand_over(own, decode)]
            for own, ways in partners:
                computing, decodes = search.pairs(ways, decoding)
                # One that fits stays in any case, so that no decode worker seems to be without a partner.
                chosen.update((own.kind, index) for index in (own.fitting, *computing))
                chosen.update((decode.kind, index) for index in decodes)
            chosen.update((decode.kind, index) for index in search.local(decode, decoding, alone=not partners))
        return [self._kinds[kind].candidate(index, now, self._half_life) for kind, index in chosen]

    def _classes(self, role: str, need: Need) -> Iterator[WorkerClass]:
        """Divide the workers of a role into classes whose members differ only in costs. Empty classes are left out."""
        for kind, rows in self._kinds.items():
            if kind[0] != role or not need.may_go_on_with(kind[3]):
                continue
            every = rows.figures(need.adapter)
            fits = every.longest >= need.context_tokens
            is_open = fits & (every.has_room > 0) if role == "prefill" else fits.copy()
            is_open[self._indices(kind, need.refused)] = False
            for host, members in self._parts(kind, every, need):
                fitting = fits & members
                if fitting[first := int(fitting.argmax())]:
                    yield WorkerClass(kind, host, first, every.take(np.flatnonzero(is_open & members)))

    def _parts(self, kind: Kind, every: Figures, need: Need) -> Iterator[tuple[str, NDArray[np.bool_] | np.bool_]]:
        """Divide the workers of a kind into groups within which only costs differ. Workers on which an earlier attempt
        failed form groups of their own.

        Yields the id of a group's host, if this host is at an end of a cut link, else ""; and the mask of its workers.
        """
        cut_hosts = {host for host in itertools.chain.from_iterable(need.cut) if host in self._hosts}
        at_links = [(host, every.host == self._hosts[host]) for host in cut_hosts]
        others = ~np.any([members for _, members in at_links], axis=0) if at_links else np.True_
        failed = self._indices(kind, need.failed)
        for host, members in (("", others), *at_links):
            if failed:
                has_failed = np.zeros(len(every), dtype=bool)
                has_failed[failed] = True
                yield host, members & has_failed
                members = members & ~has_failed
            yield host, members

    def _indices(self, kind: Kind, names: Iterable[str]) -> list[int]:
        places = (self._places[name] for name in names if name in self._places)
        return [index for own, index in places if own == kind]
