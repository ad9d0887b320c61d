"""Where a request runs: a pure function of the request and of what is known about the fleet.

Each way to run it has a cost in seconds: the time to its first token, as far as it can be told, and what it takes from
others. The cheapest is taken.

    queue            tokens that the computing worker has before it / its tokens a second
    fetch            tokens of a prefix that its host gets from another one first / what it gets a second
    compute          tokens of the context that are cached on neither / its tokens a second
    move             tokens that decode's host lacks / what it gets a second; hidden behind computing
    handoff          the step of the decode worker that is under way, where another one computes the prompt
    for others       load of the decode worker; the delay of those it decodes, where it computes the prompt
    given lately     so that of equal places not always the same one is taken, and a prefix that many share spreads
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.services.common.registry import Member

T = TypeVar("T")

Link = tuple[str, str]
"""Hosts, from where to where KV blocks are moved."""

PREFILL_TOKENS_PER_SECOND = 1000.0
"""Of a fleet where nobody has measured it yet."""
FETCH_TOKENS_PER_SECOND = 20_000.0
"""Likewise."""
LINK_SECONDS = 0.01
"""What a prompt that comes from another host takes besides its bytes."""
HANDOFF_SECONDS = 0.02
"""What it takes to go on where another worker has computed: at least, the step that is under way there."""
LOAD_SECONDS = 1.0
"""To be spared a decode worker that is full, a request waits this much longer for its first token."""
LATELY = 0.1
"""Of the seconds that a worker was given to compute lately."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement must satisfy."""

    context_tokens: int
    """Prompt and longest answer together."""
    prompt_tokens: int = 1
    """Those that are there already: their KV has to come from somewhere."""
    cached: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By host, how many of these it has; a hint."""
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By host, the fingerprint of its blocks, as far as it is known."""
    refused: frozenset[str] = frozenset()
    """Workers that have just said that they are full: not asked again."""
    failed: frozenset[str] = frozenset()
    """Workers on which an earlier attempt failed: taken only where there is no other."""
    cut: frozenset[Link] = frozenset()
    """Over which blocks do not get through now."""
    local_tokens: int = 0
    """Of prompts, that a decode worker may have to compute beside its tokens, where there is another way."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be reached, and how many calls of this gateway it has not finished."""

    member: Member
    in_flight: int = 0
    unreported: int = 0
    """Those of them that the member's figures may not contain yet."""
    unreported_tokens: float = 0.0
    """That it has to compute beside those that the member reports; negative where it has computed of those since."""
    recent_tokens: float = 0.0
    """That this gateway has lately given it to compute."""
    fetch_tokens_per_second: float = 0.0
    """That its host gets from other hosts; 0 is not known."""

    @property
    def load(self) -> float:
        # The figures are up to a second old; our own calls spread a burst that comes in between.
        member = self.member
        return (member.load.running + member.load.waiting + self.unreported) / max(member.max_seqs, 1)

    @property
    def has_room(self) -> bool:
        """As far as this gateway's own calls tell; the worker has the last word."""
        return self.in_flight < self.member.max_seqs

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens that it has not computed yet."""
        return self.member.load.queued_tokens + self.unreported_tokens

    @property
    def tokens_per_second(self) -> float:
        """At which it computes prompts; 0 is not known."""
        return self.member.load.prefill_tokens_per_second


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers for an attempt. Without `prefill` the decode worker computes; without `decode` nothing is decoded."""

    decode: Member | None
    prefill: Member | None
    source: str = ""
    """Host from which the computing worker first brings over a prefix."""
    cached_tokens: int = 0
    """Tokens of the prompt that the computing worker will then find in its cache; a hint."""
    least_cached_tokens: int = 0
    """Cached tokens without which the decode worker must not compute the prompt."""

    @property
    def computing(self) -> Member:
        """The worker that computes the prompt."""
        member = self.prefill or self.decode
        assert member is not None
        return member


def place(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """The cheapest way to run a request.

    A decode worker computes prompts itself only where there is no prefill worker for it at all, or where a few tokens
    at most are not cached there. Where there are prefill workers, all full, the request waits for them, so that a
    burst of prompts does not slow down everybody's tokens.

    Returns None where nothing can take the request now.
    """
    fleet = list(snapshot)
    measured = [speed for candidate in fleet if (speed := candidate.tokens_per_second)]
    usual = statistics.fmean(measured) if measured else PREFILL_TOKENS_PER_SECOND

    def rank(way: _Way) -> tuple[object, ...]:
        # Names break ties, so that equal snapshots give equal placements.
        prefill_load = 0.0 if way.prefill is None else way.prefill.load
        return *way.trouble(need), way.seconds(need, usual), way.local, way.far, prefill_load, way.names, way.source

    way = min(_ways(need, fleet), key=rank, default=None)
    return None if way is None else way.placement(need)


def place_in_turn(need: Need, snapshot: Iterable[Candidate], turn: int) -> Placement | None:
    """As `place`, but one decode worker after the other, and its prefill workers likewise, those of its host first;
    without regard to load, to what is cached, and to what it costs."""
    ways = [way for way in _ways(dataclasses.replace(need, cached={}), snapshot) if way.alone or not way.local]
    least = min((way.trouble(need) for way in ways), default=None)
    ways = [way for way in ways if way.trouble(need) == least]
    if not ways:
        return None
    decode = _in_turn(sorted({way.names[0] for way in ways}), turn)
    ways = sorted((way for way in ways if way.names[0] == decode), key=lambda way: way.names)
    return _in_turn([way for way in ways if not way.far] or ways, turn).placement(need)


def place_computing(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """Return the place at which a context is computed soonest, for work that needs no decoding.

    Decode workers are used only if there is no prefill worker. Returns None if no worker can take the work now.
    """
    fleet = list(snapshot)
    measured = [speed for candidate in fleet if (speed := candidate.tokens_per_second)]
    usual = statistics.fmean(measured) if measured else PREFILL_TOKENS_PER_SECOND

    def rank(candidate: Candidate) -> tuple[object, ...]:
        waiting = candidate.queued_tokens + LATELY * candidate.recent_tokens
        failed = candidate.member.worker_id in need.failed
        return failed, waiting / (candidate.tokens_per_second or usual), candidate.load, candidate.member.worker_id

    return _computing_at(min(_computing(need, fleet), key=rank, default=None))


def place_computing_in_turn(need: Need, snapshot: Iterable[Candidate], turn: int) -> Placement | None:
    """Return a place for work that needs no decoding: one worker after another."""
    workers = sorted(_computing(need, snapshot), key=lambda candidate: candidate.member.worker_id)
    unfailed = [candidate for candidate in workers if candidate.member.worker_id not in need.failed]
    return _computing_at(_in_turn(unfailed or workers, turn)) if workers else None


def _computing(need: Need, snapshot: Iterable[Candidate]) -> list[Candidate]:
    """Return the workers that can compute a context now."""
    fitting = _fitting(need, snapshot)
    workers = [c for c in fitting if c.member.role == "prefill"] or [c for c in fitting if c.member.role == "decode"]
    return [c for c in workers if c.member.worker_id not in need.refused and c.has_room]


def _fitting(need: Need, snapshot: Iterable[Candidate]) -> list[Candidate]:
    """Return the workers that take work of this length."""
    return [c for c in snapshot if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]


def _computing_at(candidate: Candidate | None) -> Placement | None:
    if candidate is None:
        return None
    member = candidate.member
    return Placement(None, member) if member.role == "prefill" else Placement(member, None)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run a request."""

    decode: Candidate
    prefill: Candidate | None
    alone: bool = False
    """Whether there is no prefill worker that could hand over to this decode worker."""
    source: str = ""
    """Host from which a prefix comes first."""

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
        """Tokens that need not be computed."""
        return need.cached.get(self.source or self.computing.member.host_id, 0)

    def trouble(self, need: Need) -> tuple[bool, ...]:
        """What is worse than any cost, the worst first."""
        return self.alone, *(name in need.failed for name in self.names)

    def seconds(self, need: Need, usual: float) -> float:
        """What it costs.

        Args:
            usual: tokens a second of workers that have not measured it.
        """
        computing, decode = self.computing, self.decode
        speed = computing.tokens_per_second or usual
        compute = (need.prompt_tokens - self.cached(need)) / speed
        fetch = 0.0
        if self.source:
            lacking = self.cached(need) - need.cached.get(computing.member.host_id, 0)
            fetch = LINK_SECONDS + lacking / _fetch_speed(computing)
        if self.local:
            compute *= 1 + decode.member.load.running  # each of those waits as long
        if self.far:
            lacking = need.prompt_tokens - need.cached.get(decode.member.host_id, 0)
            move = lacking / _fetch_speed(decode)
            compute = max(compute, move) + LINK_SECONDS
        queue = (computing.queued_tokens + LATELY * computing.recent_tokens) / speed
        handoff = 0.0 if self.local else HANDOFF_SECONDS
        return queue + fetch + compute + handoff + LOAD_SECONDS * decode.load

    def placement(self, need: Need) -> Placement:
        prefill = None if self.prefill is None else self.prefill.member
        least = need.prompt_tokens - need.local_tokens if self.local and not self.alone else 0
        return Placement(self.decode.member, prefill, self.source, self.cached(need), max(0, least))


def _ways(need: Need, snapshot: Iterable[Candidate]) -> list[_Way]:
    """All that are allowed now."""
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
    fetching = [dataclasses.replace(way, source=source) for way in ways if (source := _source(need, way))]
    return ways + fetching


def _source(need: Need, way: _Way) -> str:
    """The host that has the most of the context cached, and more than the computing worker's; "" where none has."""
    here, layout = way.computing.member.host_id, way.computing.member.layout
    readable = [
        (tokens, host)
        for host, tokens in need.cached.items()
        if (host, here) not in need.cut and need.layouts.get(host, layout) == layout
    ]
    tokens, host = max(readable, default=(0, ""))
    return host if tokens > need.cached.get(here, 0) else ""


def _little_is_left(need: Need, decode: Candidate) -> bool:
    """Whether the decode worker may compute what is not cached without being felt by those that it serves."""
    cached = need.cached.get(decode.member.host_id, 0)
    return need.prompt_tokens - cached + decode.queued_tokens <= need.local_tokens


def _fetch_speed(candidate: Candidate) -> float:
    return candidate.fetch_tokens_per_second or FETCH_TOKENS_PER_SECOND


def _can_hand_over(prefill: Member, decode: Member, cut: frozenset[Link]) -> bool:
    return prefill.layout == decode.layout and (prefill.host_id, decode.host_id) not in cut


def _in_turn(choices: Sequence[T], turn: int) -> T:
    return choices[turn % len(choices)]
