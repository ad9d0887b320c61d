"""The search for the few workers among which `place` chooses.

The cost of a way is a sum. With v = a prefill worker and perhaps a host to fetch from, and d = a decode worker:

    near (one host)    ready(v) + compute(v)                + handoff + load(d)        ready = queue + fetch
    far (two hosts)    ready(v) + max(compute(v), move(d))  + handoff + load(d) + link

So a worker cannot win if another one of its kind is no worse in each term, and comes first where all are equal. What
remains is the best pair of a host, the best decode worker that computes the prompt itself, and, for two hosts, the
Pareto front of (ready, compute) beside that of (load, move). Floating-point addition is monotonic, so this is exact:
`place` returns the same from the nominees as from all workers, which a property test checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.services.gateway.candidates import Need
from paceline.services.gateway.router import HANDOFF_SECONDS, LATELY, LINK_SECONDS, LOAD_SECONDS
from paceline.services.gateway.worker_columns import Floats, Indices, WorkerClass, decayed

_SLACK = 1e-9
"""Share by which a bound must exceed the cost of a known way before workers are left out: far above rounding errors."""


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


class NomineeSearch:
    """The search for the nominees of one request."""

    def __init__(self, need: Need, hosts: dict[str, int], usual: float, now: float, half_life: float) -> None:
        self._need, self._usual, self._now, self._half_life = need, usual, now, half_life
        self._hosts = len(hosts)
        self._cached = np.zeros(self._hosts)
        for host, tokens in need.cached.items():
            if (index := hosts.get(host)) is not None:
                self._cached[index] = tokens

    def can_hand_over(self, prefill: WorkerClass, decode: WorkerClass) -> bool:
        """Return whether workers of the first class can hand over to those of the second."""
        return prefill.kind[1] == decode.kind[1] and (prefill.cut_host, decode.cut_host) not in self._need.cut

    def pairs(self, prefill: WorkerClass, decode: WorkerClass) -> tuple[Indices, Indices]:
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

    def local(self, decode: WorkerClass, alone: bool) -> Indices:
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

    def _options(self, workers: WorkerClass) -> _Options:
        """Return the ways in which the open workers of a class can compute the prompt."""
        need, rows, index = self._need, workers.rows, workers.open
        role, layout, _ = workers.kind
        host = rows.column("host")[index].astype(np.intp)
        speed = rows.column("speed")[index]
        speed = np.where(speed > 0, speed, self._usual)
        recent = decayed(rows.column("recent")[index], self._now - rows.column("at")[index], self._half_life)
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
