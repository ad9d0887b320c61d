"""The router: places a request on workers, as a pure function of the request and a snapshot of the fleet.

Each way to run a request has a cost in seconds: the estimated time to its first token, and a penalty for the delay of
other requests. The cheapest way is taken. In this table, "the worker" computes the prompt; rates are tokens per second.

    queue       tokens that wait on the worker / its rate
    fetch       tokens of a prefix that its host first fetches from another host / the rate of fetching
    compute     tokens of the prompt that are cached on neither of these hosts / the worker's rate
    move        tokens that the decode worker's host lacks / its rate of fetching; overlaps compute: the longer counts
    handoff     rest of the decode worker's current step, if a prefill worker computes the prompt
    adapter     time in which each worker reads the request's adapter if it is not in its memory
    others      load of the decode worker; if it computes the prompt itself, also the delay of each of its requests
    recent      a tenth of the tokens sent to the worker recently / its rate, so that equal workers share prompts and a
                popular prefix is soon cached on several hosts

The home of a request is the host that computed the client's latest prompt with the same `prompt_cache_key`. If the
cheapest way at home costs little more than the cheapest way of all, the request runs at home: the beginning of the
prompt is probably cached there, or soon will be.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.numerics import may_differ
from paceline.services.common.registry import Member
from paceline.services.gateway.routing.candidates import Candidate, Link, Need, Placement, Snapshot

T = TypeVar("T")

COMPUTING = ("pool", "prefill", "decode")
"""Roles of workers that compute contexts. Later ones compute them only if there is none of an earlier role: a model has
pool workers or the other two, and decode workers compute if there is no prefill worker."""

PREFILL_TOKENS_PER_SECOND = 1000.0
"""Assumed rate of prefill if no worker of the fleet has measured its own rate yet."""
FETCH_TOKENS_PER_SECOND = 20_000.0
"""Assumed rate at which a host fetches blocks from other hosts if it has not measured this rate yet."""
LINK_SECONDS = 0.01
"""Fixed time of a transfer between hosts, in seconds. The time for the transferred bytes is added to it."""
HANDOFF_SECONDS = 0.02
"""Estimated time of a handoff, in seconds. The decode worker must at least finish its current step before it."""
LOAD_SECONDS = 1.0
"""Cost of a full decode worker, in seconds: a request accepts a first token that comes this much later to get an idle
decode worker instead."""
LATELY = 0.1
"""Share of the recently sent tokens that counts like tokens in the worker's queue."""
HOME_SHARE = 0.25
"""Largest extra cost of running a request at its home, as a share of the time to compute its whole prompt there."""


def place(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """Return the cheapest placement of a request, or None if no workers can take it now.

    A decode worker computes a prompt itself only if no prefill worker can hand over to it, or if at most
    `Need.local_tokens` uncached tokens would then wait on it. If all prefill workers are full, the request waits for
    one of them, so that a burst of prompts does not slow down the decoding of other requests.
    """
    fleet = snapshot.nominees(need) if isinstance(snapshot, Snapshot) else list(snapshot)
    usual = snapshot.usual_rate() if isinstance(snapshot, Snapshot) else _usual_rate(fleet)
    way = _cheapest(need, fleet, usual)
    if way is None:
        return None
    if need.home and not way.is_at_home(need):
        known = snapshot.on_host(need.home) if isinstance(snapshot, Snapshot) else fleet
        way = _at_home(need, known, way, usual) or way
    return way.placement(need)


def _cheapest(need: Need, fleet: Iterable[Candidate], usual: float) -> _Way | None:
    """Return the way with the least trouble, and among equal ones the cheapest way; None if there is no way.

    Args:
        usual: prefill rate to assume for workers that have not measured theirs, in tokens per second.
    """
    return min(_ways(need, fleet), key=lambda way: (way.trouble(need), way.rank(need, usual)), default=None)


def _at_home(need: Need, known: Iterable[Candidate], best: _Way, usual: float) -> _Way | None:
    """Return the cheapest way to compute a prompt at its home; None if it is too much worse than the best way.

    Args:
        known: all workers at the home, and perhaps other workers.
        best: the cheapest way of all. Its decode worker may also decode a prompt that is computed at home.
        usual: prefill rate to assume for workers that have not measured theirs, in tokens per second.
    """
    home = [each for each in known if each.member.host_id == need.home]
    others = [each for each in (best.decode, best.prefill) if each is not None and each.member.host_id != need.home]
    ways = [way for way in _ways(need, [*home, *others]) if way.is_at_home(need)]
    way = min(ways, key=lambda way: (way.trouble(need), way.rank(need, usual)), default=None)
    if way is None or way.trouble(need) > best.trouble(need):
        return None
    longest = HOME_SHARE * need.prompt_tokens / (way.computing.tokens_per_second or usual)
    return way if way.rank(need, usual)[0] <= best.rank(need, usual)[0] + longest else None


def place_in_turn(need: Need, snapshot: Iterable[Candidate], turn: int) -> Placement | None:
    """Return a placement for which decode workers take turns, and prefill workers take turns; None if none is possible.

    Prefill workers on the decode worker's host are preferred. Load, cached tokens and cost are ignored.

    Args:
        turn: number of the turn, which grows by one with each request.
    """
    ways = [way for way in _ways(dataclasses.replace(need, cached={}), snapshot) if way.alone or not way.local]
    least = min((way.trouble(need) for way in ways), default=None)
    ways = [way for way in ways if way.trouble(need) == least]
    if not ways:
        return None
    decode = _in_turn(sorted({way.names[0] for way in ways}), turn)
    ways = sorted((way for way in ways if way.names[0] == decode), key=lambda way: way.names)
    return _in_turn([way for way in ways if not way.far] or ways, turn).placement(need)


def place_computing(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """Return the worker that computes a context soonest, for work that needs no decoding.

    Decode workers are used only if there is no other worker. Returns None if no worker can take the work now.
    """
    fleet = list(snapshot)
    usual = _usual_rate(fleet)

    def rank(candidate: Candidate) -> tuple[object, ...]:
        waiting = candidate.queued_tokens + LATELY * candidate.recent_tokens
        seconds = waiting / (candidate.tokens_per_second or usual) + candidate.miss_seconds(need.adapter)
        return *_trouble(need, candidate), seconds, candidate.load, candidate.member.worker_id

    return _computing_at(min(_computing(need, fleet), key=rank, default=None))


def place_computing_in_turn(need: Need, snapshot: Iterable[Candidate], turn: int) -> Placement | None:
    """Return a placement for work that needs no decoding, for which workers take turns; None if none is possible.

    Args:
        turn: number of the turn, which grows by one with each request.
    """
    workers = sorted(_computing(need, snapshot), key=lambda candidate: candidate.member.worker_id)
    least = min((_trouble(need, candidate) for candidate in workers), default=None)
    best = [candidate for candidate in workers if _trouble(need, candidate) == least]
    return _computing_at(_in_turn(best, turn)) if best else None


def _usual_rate(fleet: Iterable[Candidate]) -> float:
    """Return the prefill rate to assume for a worker that has not measured its own rate, in tokens per second."""
    measured = [rate for candidate in fleet if (rate := candidate.tokens_per_second)]
    return statistics.fmean(measured) if measured else PREFILL_TOKENS_PER_SECOND


def _computing(need: Need, snapshot: Iterable[Candidate]) -> list[Candidate]:
    """Return the workers that can take work without decoding now, of the first of `COMPUTING` that the fleet has."""
    workers = computing_of(_fitting(need, snapshot))
    return [c for c in workers if c.member.worker_id not in need.refused and c.has_room]


def computing_of(fitting: Iterable[Candidate]) -> list[Candidate]:
    """Return the workers that compute prompts and other work without decoding: those of the first of `COMPUTING` that
    has any."""
    known = list(fitting)
    return next((found for role in COMPUTING if (found := [c for c in known if c.member.role == role])), [])


def _trouble(need: Need, candidate: Candidate) -> tuple[bool, bool]:
    """Return a computing worker's disadvantages that outweigh any cost, the gravest one first."""
    return candidate.member.worker_id in need.failed, may_differ(need.computed_with, candidate.member.numerics)


def _fitting(need: Need, snapshot: Iterable[Candidate]) -> list[Candidate]:
    """Return the ready workers whose longest context is long enough and that have the weights of earlier results."""
    known = [c for c in snapshot if need.may_go_on_with(c.member.weights)]
    return [c for c in known if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]


def _computing_at(candidate: Candidate | None) -> Placement | None:
    if candidate is None:
        return None
    member = candidate.member
    return Placement(member, None) if member.role == "decode" else Placement(None, member)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run a request: its workers, and the host from which a prefix is fetched."""

    decode: Candidate
    prefill: Candidate | None
    alone: bool = False
    """Whether no prefill worker at all can hand over to this decode worker, not even one that is full now."""
    source: str = ""
    """Id of the host from which the computing worker first fetches a prefix; "" if it fetches none."""

    @property
    def computing(self) -> Candidate:
        return self.prefill or self.decode

    @property
    def local(self) -> bool:
        return self.prefill is None

    @property
    def far(self) -> bool:
        return self.computing.member.host_id != self.decode.member.host_id

    @property
    def names(self) -> tuple[str, str]:
        return self.decode.member.worker_id, "" if self.prefill is None else self.prefill.member.worker_id

    def cached(self, need: Need) -> int:
        """Return the number of prompt tokens that are cached or fetched, so that the worker need not compute them."""
        return need.cached.get(self.source or self.computing.member.host_id, 0)

    def is_at_home(self, need: Need) -> bool:
        return self.computing.member.host_id == need.home

    def trouble(self, need: Need) -> tuple[bool, ...]:
        """Return this way's disadvantages that outweigh any cost, the gravest one first."""
        failed = (name in need.failed for name in self.names)
        other_decode = may_differ(need.decoded_with, self.decode.member.numerics)
        return self.alone, *failed, other_decode, may_differ(need.computed_with, self.computing.member.numerics)

    def rank(self, need: Need, usual: float) -> tuple[float, tuple[object, ...]]:
        """Return the cost in seconds, and a key that decides between ways of equal cost; smaller is better.

        In the key, the terms of the cost come before names. So a way that is no worse in any term never ranks after the
        other way, even if rounding makes the costs equal. `CandidateTable` relies on this.

        Args:
            usual: prefill rate to assume for workers that have not measured theirs, in tokens per second.
        """
        computing, decode = self.computing, self.decode
        speed = computing.tokens_per_second or usual
        ready = (computing.queued_tokens + LATELY * computing.recent_tokens) / speed
        if self.source:
            lacking = self.cached(need) - need.cached.get(computing.member.host_id, 0)
            ready += LINK_SECONDS + lacking / _fetch_speed(computing)
        compute = (need.prompt_tokens - self.cached(need)) / speed
        if self.local:
            compute *= 1 + decode.member.load.running  # each running request waits as long
        else:
            ready += computing.miss_seconds(need.adapter)
        move = 0.0
        if self.far:
            move = (need.prompt_tokens - need.cached.get(decode.member.host_id, 0)) / _fetch_speed(decode)
        longer = max(compute, move) + LINK_SECONDS if self.far else compute
        handoff = 0.0 if self.local else HANDOFF_SECONDS
        admission = LOAD_SECONDS * decode.load + decode.miss_seconds(need.adapter)
        seconds = ready + longer + handoff + admission
        prefill_load = 0.0 if self.prefill is None else self.prefill.load
        parts = ready + compute, ready, compute, prefill_load, admission, move
        # Ids break ties, so that equal snapshots give equal placements.
        return seconds, (self.local, self.far, *parts, self.names, self.source)

    def placement(self, need: Need) -> Placement:
        prefill = None if self.prefill is None else self.prefill.member
        least = need.prompt_tokens - need.local_tokens if self.local and not self.alone else 0
        return Placement(self.decode.member, prefill, self.source, self.cached(need), max(0, least))


def _ways(need: Need, snapshot: Iterable[Candidate]) -> list[_Way]:
    """Return all ways to run a request that are possible now."""
    fitting = _fitting(need, snapshot)
    prefills = [c for c in fitting if c.member.role == "prefill"]
    ways: list[_Way] = []
    for decode in fitting:
        if decode.member.role != "decode" or decode.member.worker_id in need.refused:
            continue
        partners = [c for c in prefills if _can_hand_over(c.member, decode.member, need.cut)]
        open_ones = [c for c in partners if c.member.worker_id not in need.refused and c.has_room]
        ways += [_Way(decode, prefill) for prefill in open_ones]
        if not partners or _little_is_left(need, decode):
            ways.append(_Way(decode, None, alone=not partners))
    computing = {way.computing.member.worker_id: way.computing.member for way in ways}
    least = min((need.cached.get(member.host_id, 0) for member in computing.values()), default=0)
    # A prefix that all prompts begin with is on all hosts, so most of them have no more than the others.
    richer = sorted(((tokens, host) for host, tokens in need.cached.items() if tokens > least), reverse=True)
    sources = {worker_id: _source(need, member, richer) for worker_id, member in computing.items()}
    fetching = [
        _Way(way.decode, way.prefill, way.alone, source)
        for way in ways
        if (source := sources[way.computing.member.worker_id])
    ]
    return ways + fetching


def _source(need: Need, computing: Member, richer: Iterable[tuple[int, str]]) -> str:
    """Return the id of the host to fetch a prefix from: the host with most cached tokens among those that can send it.

    Returns "" if the computing worker's own host has as many cached tokens.

    Args:
        richer: cached tokens and host ids, in descending order. All hosts with more than the worker's own are included.
    """
    here, layout = computing.host_id, computing.layout
    own = need.cached.get(here, 0)
    for tokens, host in richer:
        if tokens <= own:
            break
        if (host, here) not in need.cut and need.layouts.get(host, layout) == layout:
            return host
    return ""


def _little_is_left(need: Need, decode: Candidate) -> bool:
    """Return whether a decode worker that gets the prompt would have at most `local_tokens` prompt tokens to compute,
    including the prompts that wait there already."""
    cached = need.cached.get(decode.member.host_id, 0)
    return need.prompt_tokens - cached + decode.queued_tokens <= need.local_tokens


def _fetch_speed(candidate: Candidate) -> float:
    return candidate.fetch_tokens_per_second or FETCH_TOKENS_PER_SECOND


def _can_hand_over(prefill: Member, decode: Member, cut: frozenset[Link]) -> bool:
    return prefill.layout == decode.layout and (prefill.host_id, decode.host_id) not in cut


def _in_turn(choices: Sequence[T], turn: int) -> T:
    return choices[turn % len(choices)]
