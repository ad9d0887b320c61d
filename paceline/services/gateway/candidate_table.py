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

from paceline.services.gateway.candidates import Candidate, Need, Snapshot
from paceline.services.gateway.nominee_search import NomineeSearch
from paceline.services.gateway.router import PREFILL_TOKENS_PER_SECOND
from paceline.services.gateway.worker_columns import Kind, KindColumns, WorkerClass, decayed


class CandidateTable(Snapshot):
    """The candidates of a fleet, in columns. It is kept up to date by `put` and `remove`.

    Args:
        half_life: seconds in which the recently sent tokens of a candidate count half as much.
        clock: the time in seconds, of the clock that `recent_tokens` decay by.
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
        """Add a worker, or replace what is known of it. Its `recent_tokens` are those of now."""
        member = candidate.member
        kind = member.role, member.layout, member.numerics
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
        """Do now what the next search would do first after changes, because it may take longer than the search."""
        if not self._is_sorted:
            for rows in self._kinds.values():
                rows.sort()
            self._is_sorted = True
        self.usual_rate()

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is here."""
        kind, index = self._places.pop(worker_id, (None, 0))
        if kind is not None:
            if moved := self._kinds[kind].drop(index):
                self._places[moved] = kind, index
            self._is_sorted, self._usual = False, None

    # ---- the snapshot

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all workers, in the order of their ids."""
        now = self._clock()
        for worker_id in sorted(self._places):
            kind, index = self._places[worker_id]
            yield self._candidate(self._kinds[kind], index, now)

    def usual_rate(self) -> float:
        """Return the average rate of prefill that the workers have measured, in tokens per second."""
        if self._usual is None:
            rates = [rate for rows in self._kinds.values() for rate in rows.column("speed").tolist() if rate]
            self._usual = statistics.fmean(rates) if rates else PREFILL_TOKENS_PER_SECOND
        return self._usual

    def hungriest(self, need: Need, seconds: float, tokens: float) -> Candidate | None:
        """See `Snapshot.hungriest`."""
        for role in ("prefill", "decode"):
            found: Candidate | None = None
            least = math.inf
            for kind, rows in self._kinds.items():
                if kind[0] != role:
                    continue
                fitting = np.flatnonzero((rows.column("ready") > 0) & (rows.column("max_len") >= need.context_tokens))
                speed = rows.column("speed")[fitting]
                filled = rows.column("queued")[fitting] / np.where(speed > 0, seconds * speed, tokens)
                if fitting.size and filled.min() < least:
                    least, found = float(filled.min()), rows.candidates[fitting[filled.argmin()]]
            if found is not None:
                return found
        return None

    def on_host(self, host_id: str) -> list[Candidate]:
        """Return the workers of one host."""
        if (host := self._hosts.get(host_id)) is None:
            return []
        now = self._clock()
        return [
            self._candidate(rows, int(index), now)
            for rows in self._kinds.values()
            for index in np.flatnonzero(rows.column("host") == host)
        ]

    def nominees(self, need: Need) -> list[Candidate]:
        """Return some workers, among which are those that `place` would choose among all."""
        self.settle()
        now = self._clock()
        search = NomineeSearch(need, self._hosts, self.usual_rate(), now, self._half_life)
        prefills, decodes = (list(self._classes(role, need)) for role in ("prefill", "decode"))
        chosen: set[tuple[Kind, int]] = set()
        for decode in decodes:
            partners = [own for own in prefills if search.can_hand_over(own, decode)]
            for own in partners:
                computing, decoding = search.pairs(own, decode)
                # One that fits stays in any case, so that no decode worker seems to be without a partner.
                chosen.update((own.kind, int(index)) for index in (own.fitting[0], *computing))
                chosen.update((decode.kind, int(index)) for index in decoding)
            chosen.update((decode.kind, int(index)) for index in search.local(decode, alone=not partners))
        return [self._candidate(self._kinds[kind], index, now) for kind, index in chosen]

    def _classes(self, role: str, need: Need) -> Iterator[WorkerClass]:
        """Divide the workers of a role into classes whose members differ only in costs. Empty classes are left out.

        Workers that failed are apart, and so are those of each host at the end of a cut link.
        """
        cut_hosts = {host for host in itertools.chain.from_iterable(need.cut) if host in self._hosts}
        for kind, rows in self._kinds.items():
            if kind[0] != role:
                continue
            fits = (rows.column("ready") > 0) & (rows.column("max_len") >= need.context_tokens)
            is_open = fits.copy() if role == "decode" else fits & (rows.column("has_room") > 0)
            is_open[self._indices(kind, need.refused)] = False
            failed = np.zeros(len(rows), dtype=bool)
            failed[self._indices(kind, need.failed)] = True
            hosts = rows.column("host")
            parts = [(host, hosts == self._hosts[host]) for host in cut_hosts]
            others = ~np.any([members for _, members in parts], axis=0) if parts else np.ones(len(rows), dtype=bool)
            for host, members in (("", others), *parts):
                for own in (members & ~failed, members & failed) if need.failed else (members,):
                    if (fitting := np.flatnonzero(own & fits)).size:
                        yield WorkerClass(kind, rows, host, fitting, np.flatnonzero(own & is_open))

    def _indices(self, kind: Kind, names: Iterable[str]) -> list[int]:
        places = (self._places[name] for name in names if name in self._places)
        return [index for own, index in places if own == kind]

    def _candidate(self, rows: KindColumns, index: int, now: float) -> Candidate:
        candidate = rows.candidates[index]
        recent = decayed(candidate.recent_tokens, now - rows.column("at")[index], self._half_life)
        return replace(candidate, recent_tokens=float(recent))
