"""A snapshot of a large fleet that finds in less than a millisecond the few workers among which `place` chooses.

The cost of a way is a sum. With v = a prefill worker and perhaps a host to fetch from, and d = a decode worker:

    near (one host)    ready(v) + compute(v)                + handoff + load(d)        ready = queue + fetch
    far (two hosts)    ready(v) + max(compute(v), move(d))  + handoff + load(d) + link

So a worker cannot win if another one of its kind is no worse in each term, and comes first where all are equal. What
remains is the best pair of a host, the best decode worker that computes the prompt itself, and, for two hosts, the
Pareto front of (ready, compute) beside that of (load, move). Floating-point addition is monotonic, so this is exact:
`place` returns the same from the nominees as from all workers, which a property test checks.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.core.numerics import Numerics
from paceline.services.gateway.router import (
    FETCH_TOKENS_PER_SECOND,
    HANDOFF_SECONDS,
    LATELY,
    LINK_SECONDS,
    LOAD_SECONDS,
    PREFILL_TOKENS_PER_SECOND,
    Candidate,
    Need,
    Snapshot,
)

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_SLACK = 1e-9
"""Share by which a bound must exceed the cost of a known way before workers are left out: far above rounding errors."""

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


class _Kind:
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
class _Options:
    """Workers that can compute a prompt, with the terms of their costs. A worker may be here twice: with and without
    fetching a prefix first."""

    worker: Indices
    host: Indices
    ready: Floats
    """Seconds until the worker can begin: its queue, and fetching."""
    compute: Floats
    total: Floats
    """ready + compute."""
    load: Floats
    rank: Floats


class CandidateTable(Snapshot):
    """The candidates of a fleet, in columns. It is kept up to date by `put` and `remove`.

    Args:
        half_life: seconds in which the recently sent tokens of a candidate count half as much.
        clock: the time in seconds, of the clock that `recent_tokens` decay by.
    """

    def __init__(self, half_life: float, clock: Callable[[], float]) -> None:
        self._half_life = half_life
        self._clock = clock
        self._kinds: dict[Kind, _Kind] = {}
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
            index = len(self._kinds.setdefault(kind, _Kind()))
            self._places[member.worker_id] = kind, index
            self._is_sorted = False
        host = self._hosts.setdefault(member.host_id, len(self._hosts))
        rows = self._kinds[kind]
        if known != kind or rows.candidates[index].tokens_per_second != candidate.tokens_per_second:
            self._usual = None
        rows.put(index, candidate, host, self._clock())

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

    def nominees(self, need: Need) -> list[Candidate]:
        """Return some workers, among which are those that `place` would choose among all."""
        if not self._is_sorted:
            for rows in self._kinds.values():
                rows.sort()
            self._is_sorted = True
        now = self._clock()
        search = _Search(need, self._hosts, self.usual_rate(), now, self._half_life)
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

    def _classes(self, role: str, need: Need) -> Iterator[_Class]:
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
                        yield _Class(kind, rows, host, fitting, np.flatnonzero(own & is_open))

    def _indices(self, kind: Kind, names: Iterable[str]) -> list[int]:
        places = (self._places[name] for name in names if name in self._places)
        return [index for own, index in places if own == kind]

    def _candidate(self, rows: _Kind, index: int, now: float) -> Candidate:
        candidate = rows.candidates[index]
        recent = _decayed(candidate.recent_tokens, now - rows.column("at")[index], self._half_life)
        return replace(candidate, recent_tokens=float(recent))


@dataclass(slots=True)
class _Class:
    """Workers that differ only in costs."""

    kind: Kind
    rows: _Kind
    cut_host: str
    """The host of all of them, if it is at the end of a cut link; else ""."""
    fitting: Indices
    """Workers whose longest context is long enough; at least one."""
    open: Indices
    """Those that can take the request now."""


class _Search:
    """The search for the nominees of one request."""

    def __init__(self, need: Need, hosts: dict[str, int], usual: float, now: float, half_life: float) -> None:
        self._need, self._usual, self._now, self._half_life = need, usual, now, half_life
        self._hosts = len(hosts)
        self._cached = np.zeros(self._hosts)
        for host, tokens in need.cached.items():
            if (index := hosts.get(host)) is not None:
                self._cached[index] = tokens

    def can_hand_over(self, prefill: _Class, decode: _Class) -> bool:
        """Return whether workers of the first class can hand over to those of the second."""
        return prefill.kind[1] == decode.kind[1] and (prefill.cut_host, decode.cut_host) not in self._need.cut

    def pairs(self, prefill: _Class, decode: _Class) -> tuple[Indices, Indices]:
        """Return the prefill workers and the decode workers of the pairs that may be the best."""
        decoding = decode.open
        if not prefill.open.size or not decoding.size:
            return prefill.open[:0], decoding[:0]
        options = self._options(prefill)
        host = decode.rows.column("host")[decoding].astype(np.intp)
        load, rank = decode.rows.column("load")[decoding], decode.rows.column("rank")[decoding]
        move = (self._need.prompt_tokens - self._cached[host]) / decode.rows.column("fetch")[decoding]
        near, near_seconds = self._near(options, host, load, rank)

        keys = options.total, options.ready, options.compute, options.load, options.rank
        first, begin = _least(np.arange(options.total.size), *keys), _least(np.arange(load.size), load, move, rank)
        ready, compute, least = options.ready[first], options.compute[first], LOAD_SECONDS * load[begin]
        far_seconds = ready + max(compute, move[begin]) + LINK_SECONDS + HANDOFF_SECONDS + least
        most = min(near_seconds, far_seconds) * (1 + _SLACK) + _SLACK - LINK_SECONDS - HANDOFF_SECONDS
        better = (options.ready < ready) | (options.compute < compute)
        better[first] = True
        computing = np.flatnonzero(better & (options.total + least <= most))
        computing = _front(computing, options.ready, options.compute, options.load, options.rank)
        better = move < move[begin]
        better[begin] = True
        others = np.flatnonzero(better & (options.total[first] + LOAD_SECONDS * load <= most))
        others = _front(others, load, move, rank)
        return options.worker[[*computing, *near[:1]]], decoding[[*others, *near[1:]]]

    def local(self, decode: _Class, alone: bool) -> Indices:
        """Return the decode worker that computes the prompt itself at the least cost, if one may.

        Args:
            alone: whether no prefill worker can hand over to the workers of this class.
        """
        workers = decode.open
        if not alone:
            host = decode.rows.column("host")[workers].astype(np.intp)
            left = self._need.prompt_tokens - self._cached[host] + decode.rows.column("queued")[workers]
            workers = workers[left <= self._need.local_tokens]
        if not workers.size:
            return workers
        own = self._options(replace(decode, open=workers))
        seconds = own.total + LOAD_SECONDS * own.load
        keys = seconds, own.total, own.ready, own.compute, own.load, own.rank
        return own.worker[[_least(np.arange(seconds.size), *keys)]]

    def _options(self, workers: _Class) -> _Options:
        """Return the ways in which the open workers of a class can compute the prompt."""
        need, rows, index = self._need, workers.rows, workers.open
        role, layout, _ = workers.kind
        host = rows.column("host")[index].astype(np.intp)
        speed = rows.column("speed")[index]
        speed = np.where(speed > 0, speed, self._usual)
        recent = _decayed(rows.column("recent")[index], self._now - rows.column("at")[index], self._half_life)
        ready = (rows.column("queued")[index] + LATELY * recent) / speed
        here = self._cached[host]
        compute = (need.prompt_tokens - here) / speed
        tokens = max(
            (
                tokens
                for source, tokens in need.cached.items()
                if (source, workers.cut_host) not in need.cut and need.layouts.get(source, layout) == layout
            ),
            default=0,
        )
        if (lacks := np.flatnonzero(here < tokens)).size:
            fetch = LINK_SECONDS + (tokens - here[lacks]) / rows.column("fetch")[index[lacks]]
            ready = np.concatenate([ready, ready[lacks] + fetch])
            compute = np.concatenate([compute, (need.prompt_tokens - tokens) / speed[lacks]])
            index, host = np.concatenate([index, index[lacks]]), np.concatenate([host, host[lacks]])
        if role == "decode":
            compute = compute * (1 + rows.column("running")[index])
        load, rank = rows.column("load")[index], rows.column("rank")[index]
        return _Options(index, host, ready, compute, ready + compute, load, rank)

    def _near(self, options: _Options, host: Indices, load: Floats, rank: Floats) -> tuple[list[int], float]:
        """Return the best option and the best decode worker that are on one host, and their cost in seconds.

        Without such a pair, the list is empty and the cost infinite.

        Args:
            host, load, rank: those of the decode workers.
        """
        least_total, least_load = np.full(self._hosts, np.inf), np.full(self._hosts, np.inf)
        np.minimum.at(least_total, options.host, options.total)
        np.minimum.at(least_load, host, load)
        cost = least_total + HANDOFF_SECONDS + LOAD_SECONDS * least_load
        best = float(cost.min())
        if best == np.inf:
            return [], best
        is_best = (cost == best)[options.host] & (options.total == least_total[options.host])
        tied = np.flatnonzero(is_best)
        for key in (options.total, options.ready, options.compute, options.load, least_load[options.host]):
            tied = _ties(tied, key)
        there = np.zeros(self._hosts, dtype=bool)
        there[options.host[tied]] = True
        decode = _least(np.flatnonzero(there[host] & (load == least_load[host])), rank)
        prefill = _least(tied[options.host[tied] == host[decode]], options.rank)
        return [prefill, decode], best


def _decayed(tokens: float | Floats, age: float | Floats, half_life: float) -> Floats:
    return np.asarray(tokens * np.exp2(-age / half_life))


def _ties(indices: Indices, key: Floats) -> Indices:
    """Return the indices with the least value."""
    values = key[indices]
    least: Indices = indices[values == values.min()]
    return least


def _least(indices: Indices, *keys: Floats) -> int:
    """Return the index that is the least by the first key; later keys break ties."""
    for key in keys:
        if indices.size == 1:
            break
        indices = _ties(indices, key)
    return int(indices[0])


def _front(indices: Indices, first: Floats, second: Floats, *others: Floats) -> Indices:
    """Return the indices to which no other one is equal or better by the first and by the second key. If both are
    equal, other keys choose one."""
    keys = (*reversed(others), second, first)
    indices = indices[np.lexsort([key[indices] for key in keys])]
    values = second[indices]
    before = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return indices[values < before]
