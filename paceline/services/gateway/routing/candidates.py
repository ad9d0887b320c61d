"""The input and the result of a placement: a request's needs, the candidates among workers, and the chosen workers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.core.numerics import Numerics
from paceline.services.common.registry import Member

MISS_SECONDS = 0.1
"""Assumed time in which a worker reads an adapter if it has not read one yet, in seconds."""

Link = tuple[str, str]
"""Ids of two hosts: KV blocks are moved from the first host to the second host."""


@dataclass(frozen=True, slots=True)
class Need:
    """The facts about a request that its placement depends on."""

    context_tokens: int
    """Number of tokens of the prompt plus the longest answer that the request allows."""
    prompt_tokens: int = 1
    """Number of tokens that exist already: the prompt, plus tokens that earlier attempts generated. A worker computes
    their KV or reuses it from a cache."""
    cached: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of these tokens that each host has cached, by host id. It is a hint and may be wrong."""
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fingerprint of each host's KV layout, by host id. A host whose layout is unknown is missing."""
    refused: frozenset[str] = frozenset()
    """Ids of workers that have just refused this request or failed. They are not asked again in this search."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an earlier attempt failed. They are used only if there is no other worker."""
    computed_with: Numerics | None = None
    """Numerics of the worker that computed the prompt for an earlier attempt. A worker with the same numerics is
    preferred; None for no preference."""
    decoded_with: Numerics | None = None
    """Numerics of the decode worker that generated the newest tokens. A decode worker with the same numerics is
    preferred; None for no preference."""
    weights: str = ""
    """`Member.weights` of the worker that computed the first results; "" if there are no results, or if unknown."""
    cut: frozenset[Link] = frozenset()
    """Links on which transfers failed recently."""
    home: str = ""
    """Id of the host that computed the client's latest prompt with the same `prompt_cache_key`; "" if there is none."""
    local_tokens: int = 0
    """A decode worker computes this prompt, although a prefill worker could, only if at most this many uncached prompt
    tokens then wait on the decode worker, this prompt included. 0 sends all prompts to prefill workers."""

    adapter: int = 0
    """The request's adapter, as `core.adapters.short_digest`; 0 for the model alone."""

    def may_go_on_with(self, weights: str) -> bool:
        """Return whether a worker with these weights may run the request. True if either weights are unknown."""
        return not self.weights or not weights or weights == self.weights


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be reached, and the work that this gateway has given it."""

    member: Member
    in_flight: int = 0
    """Number of calls of this gateway that the worker has not finished."""
    unreported: int = 0
    """Number of calls in flight that the worker's last report may not contain yet."""
    unreported_tokens: float = 0.0
    """Tokens that this gateway has sent since the worker's last report, minus tokens that the worker has computed since
    then. Can be negative."""
    recent_tokens: float = 0.0
    """Prompt tokens that this gateway has sent to the worker recently; their count decays with a half-life."""
    fetch_tokens_per_second: float = 0.0
    """Measured rate at which its host fetches blocks from other hosts, in tokens per second; 0 if unknown."""
    prompts: tuple[int, ...] = ()
    """Number of uncached tokens of each prompt that this gateway has sent and that the worker has not computed yet."""
    encodings: int = 0
    """Number of encodings that this gateway has asked for and that are not complete."""
    adapters: frozenset[int] = frozenset()
    """Adapters that the worker has reported, and those of this gateway's calls since, as `core.adapters.short_digest`.
    It is a hint and may be wrong."""

    @property
    def load(self) -> float:
        # The figures are up to a second old. Our own newer calls are added, so that a burst spreads over the workers.
        member = self.member
        return (member.load.running + member.load.waiting + self.unreported) / max(member.max_seqs, 1)

    @property
    def requests(self) -> int:
        """Number of requests that run or wait at the worker, including those that this gateway has just sent to it."""
        load = self.member.load
        return max(self.in_flight, load.running + load.waiting + self.unreported)

    @property
    def has_room(self) -> bool:
        """Whether this gateway may send the worker another call: fewer than `max_seqs` of its own calls run there. The
        worker itself may still refuse, because it knows the calls of all gateways."""
        return self.in_flight < self.member.max_seqs

    @property
    def queued_tokens(self) -> float:
        """Number of prompt tokens that wait on the worker to be computed."""
        return self.member.load.queued_tokens + self.unreported_tokens

    def queued_before(self, prompt_tokens: float) -> float:
        """Return the number of prompt tokens that the worker computes before a new prompt of `prompt_tokens` tokens.

        The worker computes longer prompts after the new one. This counts only for prompts of this gateway, because the
        lengths of other gateways' prompts are unknown.
        """
        longer = sum(tokens for tokens in self.prompts if tokens > prompt_tokens)
        return max(min(sum(self.prompts) - longer, self.queued_tokens), self.queued_tokens - longer)

    def miss_seconds(self, adapter: int) -> float:
        """Return the expected time until the worker has an adapter in memory, in seconds; 0 if it has it already, or
        for the model alone (0)."""
        if not adapter or adapter in self.adapters:
            return 0.0
        return self.member.lora.miss_seconds or MISS_SECONDS

    @property
    def tokens_per_second(self) -> float:
        """Measured rate at which the worker computes prompts, in tokens per second; 0 if unknown."""
        return self.member.load.prefill_tokens_per_second


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt. If `prefill` is None, the decode worker computes the prompt. If `decode` is None, the
    work needs no decoding."""

    decode: Member | None
    prefill: Member | None
    """The prefill worker, or the pool worker of a model without a decoder."""
    source: str = ""
    """Id of the host from which the computing worker first fetches a prefix; "" if it fetches none."""
    cached_tokens: int = 0
    """Number of prompt tokens that the computing worker will find cached, after it has fetched a prefix. It is a hint
    and may be wrong."""
    least_cached_tokens: int = 0
    """Number of prompt tokens that the decode worker must have cached to compute the prompt itself."""

    @property
    def computing(self) -> Member:
        """The worker that computes the prompt."""
        member = self.prefill or self.decode
        assert member is not None
        return member


class Snapshot(abc.ABC, Iterable[Candidate]):
    """All candidates of a large fleet, with fast searches, so that a placement need not look at each candidate."""

    @abc.abstractmethod
    def nominees(self, need: Need) -> list[Candidate]:
        """Return a few workers. `place` chooses the same ones from these as it would from all workers."""

    @abc.abstractmethod
    def on_host(self, host_id: str) -> list[Candidate]:
        """Return the workers that run on one host."""

    @abc.abstractmethod
    def usual_rate(self) -> float:
        """Return the prefill rate to assume for a worker that has not measured its own rate, in tokens per second."""

    @abc.abstractmethod
    def hungriest(self, need: Need, seconds: float, tokens: float) -> Candidate | None:
        """Return the worker with the least to compute among workers that could compute a prompt; None if there is none.

        Only workers of the first role of `COMPUTING` that the fleet has are compared. A worker's queue is divided by
        the prompt tokens that the worker computes in `seconds`, and the worker with the smallest quotient is returned.

        Args:
            seconds: time for the divisor of the queue, in seconds.
            tokens: the divisor for a worker that has not measured its rate yet, in tokens.
        """
