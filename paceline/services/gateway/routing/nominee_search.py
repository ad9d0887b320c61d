"""The search for the few workers among which `place` chooses.

The cost of a way is a sum. With v = a prefill worker and perhaps a host to fetch from, and d = a decode worker:

    near (one host)    ready(v) + compute(v)                + handoff + admission(d)
    far (two hosts)    ready(v) + max(compute(v), move(d))  + handoff + admission(d) + link

with ready = queue + fetch + adapter, and admission = load + adapter.

So a worker cannot be chosen if another worker of its kind is no worse in each term, and precedes it in order if all
terms are equal. The candidates that remain are the best pair on one host, the best decode worker that computes the
prompt itself, and for two hosts the Pareto front of prefill workers by (ready, compute) and that of decode workers by
(admission, move). Floating-point addition is monotonic, so the search is exact: `place` returns the same placement from
the nominees as from all workers. A property test checks this.

Each operation here is on all workers of a class at once. Having few operations matters more than having cheap ones:
with a thousand workers, numpy's cost for a call is as large as the computation.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.core.numerics import Numerics
from paceline.services.gateway.routing.candidates import Need
from paceline.services.gateway.routing.figures import Figures, Floats, Indices, decayed
from paceline.services.gateway.routing.router import HANDOFF_SECONDS, LATELY, LINK_SECONDS, LOAD_SECONDS

Kind = tuple[str, str, Numerics | None, str]
"""Role, layout, numerics and weights of a worker. The choice between workers of one kind depends on costs only."""


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


def _admission(workers: Figures) -> Floats:
    """Return the seconds that the load of decode workers and the missing adapter cost."""
    return LOAD_SECONDS * workers.load + workers.miss


_SLACK = 1e-9
"""A way is left out only if it costs at least this many seconds more than another way. Rounding errors are far smaller,
if a cost is less than a day."""

Pair = tuple[list[int], list[int]]
"""Indices of prefill workers and of decode workers."""


class Computing(NamedTuple):
    """Workers that can compute a prompt, with the terms of their costs."""

    worker: Indices
    host: Indices
    ready: Floats
    """Seconds until the worker can begin with the prompt: the time for its queue and for fetching a prefix."""
    compute: Floats
    """Seconds that the worker takes to compute the prompt after that."""
    total: Floats
    """Seconds until the worker has computed the prompt: `ready` + `compute`."""
    load: Floats
    """Load of a prefill worker, or `Decoding.admission` of a decode worker."""
    rank: Floats


class Decoding(NamedTuple):
    """Workers that can decode, with the terms of their costs."""

    worker: Indices
    host: Indices
    admission: Floats
    """Seconds that a worker's load and the missing adapter cost."""
    rank: Floats
    lacking: Floats
    """Number of prompt tokens that are not cached on the worker's host."""
    move: Floats
    """Seconds in which the worker's host fetches these tokens."""
    least_admission: Floats
    """The smallest `admission` of a worker of each host, by the host's number; infinite without workers."""


class NomineeSearch:
    """The search for the nominees of one request.

    Args:
        hosts: the number of each host, by host id.
        usual: prefill rate to assume for workers that have not measured theirs, in tokens per second.
        now: the present instant, in seconds. Recent tokens count by their age at this instant.
        half_life: seconds after which recent tokens count half.
    """

    def __init__(self, need: Need, hosts: Mapping[str, int], usual: float, now: float, half_life: float) -> None:
        self._need, self._usual, self._now, self._half_life = need, usual, now, half_life
        # By the number of a host. The last place takes all hosts that have no number.
        self._cached = np.zeros(len(hosts) + 1)
        numbers = np.fromiter(map(hosts.get, need.cached, itertools.repeat(-1)), np.intp, len(need.cached))
        self._cached[numbers] = np.fromiter(need.cached.values(), np.float64, len(need.cached))

    def can_hand_over(self, prefill: WorkerClass, decode: WorkerClass) -> bool:
        """Return whether prefill workers of the first class can hand over to decode workers of the second class."""
        return prefill.kind[1] == decode.kind[1] and (prefill.cut_host, decode.cut_host) not in self._need.cut

    def computing(self, own: WorkerClass, workers: Figures) -> list[Computing]:
        """Return the ways in which workers of a class can compute the prompt: with the tokens cached on their own
        hosts, and, if another host has cached more, after they have fetched the prefix from there."""
        speed = np.where(workers.speed > 0, workers.speed, self._usual)
        is_decode = own.kind[0] == "decode"
        slower = 1 + workers.running if is_decode else 1.0  # each running request waits as long
        recent = decayed(workers.recent, self._now - workers.at, self._half_life)
        ready = (workers.queued + LATELY * recent) / speed
        if not is_decode:
            ready += workers.miss
        load = _admission(workers) if is_decode else workers.load
        here = self._cached[workers.host]
        compute = (self._need.prompt_tokens - here) / speed * slower
        ways = [Computing(workers.index, workers.host, ready, compute, ready + compute, load, workers.rank)]
        if tokens := self._fetchable(own):
            fetch = np.where(here < tokens, LINK_SECONDS + (tokens - here) / workers.fetch, np.inf)
            ready, compute = ready + fetch, (self._need.prompt_tokens - tokens) / speed * slower
            ways.append(ways[0]._replace(ready=ready, compute=compute, total=ready + compute))
        return ways

    def decoding(self, workers: Figures) -> Decoding:
        """Return these workers with the terms of their costs as decode workers."""
        lacking = self._need.prompt_tokens - self._cached[workers.host]
        admission, least = _admission(workers), np.full(self._cached.size, np.inf)
        np.minimum.at(least, workers.host, admission)
        move = lacking / workers.fetch
        return Decoding(workers.index, workers.host, admission, workers.rank, lacking, move, least)

    def pairs(self, computing: list[Computing], decoding: Decoding) -> Pair:
        """Return the prefill workers and the decode workers of all pairs that may be the cheapest."""
        ways, *fetching = computing
        if not ways.worker.size or not decoding.worker.size:
            return [], []
        handoff = HANDOFF_SECONDS + float(decoding.admission.min())
        near, seconds = _near(ways, decoding)
        for more in fetching:
            if more.total.min() + handoff <= seconds + _SLACK:
                columns: Any = map(np.concatenate, zip(ways, more))  # their types differ
                ways = Computing(*columns)
                near, seconds = _near(ways, decoding)
        if ways.total.min() + handoff + LINK_SECONDS > seconds + _SLACK:
            return near
        far = _far(ways, decoding, seconds)
        return near[0] + far[0], near[1] + far[1]

    def local(self, own: WorkerClass, decoding: Decoding, alone: bool) -> list[int]:
        """Return the index of the decode worker that computes the prompt itself at the least cost; empty if none may.

        Args:
            alone: whether no prefill worker can hand over to the workers of this class.
        """
        workers = own.open
        if not alone:
            workers = workers.take(np.flatnonzero(decoding.lacking + workers.queued <= self._need.local_tokens))
        if not len(workers):
            return []
        ways = Computing(*map(np.concatenate, zip(*self.computing(own, workers))))
        seconds = ways.total + ways.load
        return [int(ways.worker[_least(seconds, ways.total, ways.ready, ways.compute, ways.load, ways.rank)])]

    def _fetchable(self, own: WorkerClass) -> int:
        """Return the number of prompt tokens that workers of a class can fetch: the largest number that a host with a
        usable link and the same layout has cached."""
        need, layout = self._need, own.kind[1]
        for most in sorted(set(need.cached.values()), reverse=True):
            hosts = (host for host, tokens in need.cached.items() if tokens == most)
            if any((each, own.cut_host) not in need.cut and need.layouts.get(each, layout) == layout for each in hosts):
                return most
        return 0


def _near(ways: Computing, decoding: Decoding) -> tuple[Pair, float]:
    """Return the cheapest pair of workers on the same host, and its cost in seconds, infinite if there is no pair."""
    admission = decoding.least_admission[ways.host]
    cost = ways.total + HANDOFF_SECONDS + admission
    best = float(cost.min())
    if best == np.inf:
        return ([], []), best
    tied = np.flatnonzero(cost == best)
    for key in (ways.total, ways.ready, ways.compute, ways.load, admission):
        tied = _ties(tied, key)
    is_there = np.zeros(decoding.least_admission.size, dtype=bool)
    is_there[ways.host[tied]] = True
    decode = _first(np.flatnonzero(is_there[decoding.host] & (decoding.admission == admission[tied[0]])), decoding.rank)
    prefill = _first(tied[ways.host[tied] == decoding.host[decode]], ways.rank)
    return ([int(ways.worker[prefill])], [int(decoding.worker[decode])]), best


def _far(ways: Computing, decoding: Decoding, near_seconds: float) -> Pair:
    """Return the workers of all pairs on two hosts that may cost no more than the cheapest pair on one host.

    Args:
        near_seconds: cost of the cheapest pair on one host, in seconds.
    """
    admission, move, total = decoding.admission, decoding.move, ways.total
    first = _least(total, ways.ready, ways.compute, ways.load, ways.rank)
    begin = _least(admission, move, decoding.rank)
    ready, compute, least = ways.ready[first], ways.compute[first], admission[begin]
    seconds = ready + max(compute, move[begin]) + LINK_SECONDS + HANDOFF_SECONDS + least
    most = min(near_seconds, float(seconds)) + _SLACK - LINK_SECONDS - HANDOFF_SECONDS

    some = np.flatnonzero(total <= most - least)
    some = some[(ways.ready[some] < ready) | (ways.compute[some] < compute) | (some == first)]
    computing = _front(some, ways.ready, ways.compute, ways.load, ways.rank)
    some = np.flatnonzero(admission <= most - total[first])
    some = some[(move[some] < move[begin]) | (some == begin)]
    others = _front(some, admission, move, decoding.rank)
    return ways.worker[computing].tolist(), decoding.worker[others].tolist()


def _ties(indices: Indices, key: Floats) -> Indices:
    """Return the indices whose value in `key` is the smallest."""
    if indices.size == 1:
        return indices
    values = key[indices]
    least: Indices = indices[values == values.min()]
    return least


def _first(indices: Indices, *keys: Floats) -> int:
    """Return the index with the smallest value by the first key; later keys break ties."""
    for key in keys:
        indices = _ties(indices, key)
    return int(indices[0])


def _least(key: Floats, *others: Floats) -> int:
    """Return the index of the smallest value in `key`; other keys break ties."""
    return _first(np.flatnonzero(key == key.min()), *others)


def _front(indices: Indices, first: Floats, second: Floats, *others: Floats) -> Indices:
    """Return the Pareto front of the indices by two keys, where smaller values are better: indices to which no other
    index is equal or better by both keys. If indices are equal by both keys, other keys choose one of them."""
    if indices.size <= 1:
        return indices
    keys = (*reversed(others), second, first)
    indices = indices[np.lexsort([key[indices] for key in keys])]
    values = second[indices]
    before = np.minimum.accumulate(np.concatenate([[np.inf], values[:-1]]))
    return indices[values < before]
