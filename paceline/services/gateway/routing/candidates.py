"""The input and the result of a placement: a request's needs, the workers that could run it, and those that do."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.core.numerics import Numerics
from paceline.services.common.registry import Member

Link = tuple[str, str]
"""Ids of two hosts: KV blocks are moved from the first to the second."""


@dataclass(frozen=True, slots=True)
class Need:
    """The facts about a request that its placement depends on."""

    context_tokens: int
    """Tokens of the prompt and the longest answer together."""
    prompt_tokens: int = 1
    """Tokens that exist already: the prompt, and what earlier attempts generated. Their KV is computed or reused."""
    cached: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of these tokens that a host has cached, by host id. A hint."""
    layouts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For each host id, the fingerprint of its KV layout, if known."""
    refused: frozenset[str] = frozenset()
    """Ids of workers that have just refused this request or failed. They are not asked again for now."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an earlier attempt failed. They are used only if there is no other worker."""
    computed_with: Numerics | None = None
    """Numerics of the worker that computed the prompt for an earlier attempt. A worker with the same ones is preferred;
    None has no preference."""
    decoded_with: Numerics | None = None
    """Numerics of the decode worker that generated the newest tokens; see `computed_with`."""
    weights: str = ""
    """`Member.weights` of the worker that computed the first results; "" if there are none, or if unknown."""
    cut: frozenset[Link] = frozenset()
    """Links on which transfers failed recently."""
    home: str = ""
    """Id of the host that computed the client's latest prompt with the same `prompt_cache_key`; "" if there is none."""
    local_tokens: int = 0
    """Largest number of prompt tokens, this prompt included, that may wait on a decode worker when it computes the
    prompt although a prefill worker could. 0 means that it never does."""

    def may_go_on_with(self, weights: str) -> bool:
        """Return whether a worker with these weights may run the request. Unknown weights cannot be compared."""
        return not self.weights or not weights or weights == self.weights


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be reached, and this gateway's own counts of its work."""

    member: Member
    in_flight: int = 0
    """Calls of this gateway that the worker has not finished."""
    unreported: int = 0
    """Calls in flight that the member's figures may not contain yet."""
    unreported_tokens: float = 0.0
    """Tokens that this gateway has sent since the worker's last report, minus tokens that the worker has computed since
    then. Can be negative."""
    recent_tokens: float = 0.0
    """Prompt tokens that this gateway has sent recently; older ones count less."""
    fetch_tokens_per_second: float = 0.0
    """Measured rate at which its host fetches blocks from other hosts; 0 if unknown."""
    prompts: tuple[int, ...] = ()
    """Tokens of each prompt that this gateway has sent and whose computation has not ended."""
    encodings: int = 0
    """Encodings that this gateway has asked for and that are not complete."""

    @property
    def load(self) -> float:
        # The figures are up to a second old. Our own newer calls are added, so that a burst spreads over the workers.
        member = self.member
        return (member.load.running + member.load.waiting + self.unreported) / max(member.max_seqs, 1)

    @property
    def requests(self) -> int:
        """Requests that the worker runs, or that this gateway has just sent to it."""
        load = self.member.load
        return max(self.in_flight, load.running + load.waiting + self.unreported)

    @property
    def has_room(self) -> bool:
        """Whether this gateway may send the worker another call: it has fewer than `max_seqs` of its own there. The
        worker decides: it knows the calls of all gateways."""
        return self.in_flight < self.member.max_seqs

    @property
    def queued_tokens(self) -> float:
        """Prompt tokens that the worker has not computed yet."""
        return self.member.load.queued_tokens + self.unreported_tokens

    def queued_before(self, prompt_tokens: float) -> float:
        """Return the prompt tokens that the worker computes before a new prompt of `prompt_tokens` tokens.

        Longer prompts of this gateway come after it. The prompts of other gateways are not known one by one.
        """
        longer = sum(tokens for tokens in self.prompts if tokens > prompt_tokens)
        return max(min(sum(self.prompts) - longer, self.queued_tokens), self.queued_tokens - longer)

    @property
    def tokens_per_second(self) -> float:
        """Measured rate at which the worker computes prompts; 0 if unknown."""
        return self.member.load.prefill_tokens_per_second


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt. Without `prefill`, the decode worker computes the prompt. Without `decode`, nothing is
    decoded."""

    decode: Member | None
    prefill: Member | None
    source: str = ""
    """Id of the host from which the computing worker first fetches a prefix; "" if it fetches none."""
    cached_tokens: int = 0
    """Tokens of the prompt that the computing worker will then find in its cache; a hint."""
    least_cached_tokens: int = 0
    """Least number of cached tokens with which the decode worker may compute the prompt itself."""

    @property
    def computing(self) -> Member:
        """The worker that computes the prompt."""
        member = self.prefill or self.decode
        assert member is not None
        return member


class Snapshot(abc.ABC, Iterable[Candidate]):
    """All candidates of a large fleet, and a fast way to leave out those that cannot be chosen."""

    @abc.abstractmethod
    def nominees(self, need: Need) -> list[Candidate]:
        """Return some workers, among which are those that `place` would choose among all."""

    @abc.abstractmethod
    def on_host(self, host_id: str) -> list[Candidate]:
        """Return the workers of one host."""

    @abc.abstractmethod
    def usual_rate(self) -> float:
        """Return the rate of prefill to assume for a worker that has not measured its own, in tokens per second."""

    @abc.abstractmethod
    def hungriest(self, need: Need, seconds: float, tokens: float) -> Candidate | None:
        """Return the worker with the least to compute among those that could compute a prompt: decode workers only if
        there is no prefill worker. None if there is no such worker.

        Args:
            seconds: queues are compared with the prompts that a worker computes in this time.
            tokens: the same in tokens, for a worker that has not measured its rate yet.
        """
