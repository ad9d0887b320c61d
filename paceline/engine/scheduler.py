"""Which tokens to compute next. Pure: no clock, no I/O, no tensors; everything that happens is told by its methods.

Blocks are not allocated here. A request comes with the blocks for its prompt; when it is about to outgrow them the
scheduler asks (`NeedsBlocks`) some steps ahead, and computes on while the answer is under way. A request whose blocks
are full waits. When there are no blocks (`starve`), the request that came last leaves (`Preempted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import Key
from paceline.engine.request import Request
from paceline.engine.step import (
    Chunk,
    ChunkResult,
    Event,
    NeedsBlocks,
    Preempted,
    Removed,
    Sampled,
    Scored,
    Sealed,
    Step,
    Trimmed,
)

GROWTH_TOKENS = 64
"""Blocks are asked for in pieces of this many tokens, so that asking is rare."""

LOOKAHEAD_TOKENS = 16
"""They are asked for this many tokens before they are needed, so that the answer comes in time."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batched_tokens: int
    """Tokens of one step, at most."""
    max_model_len: int


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns the running requests."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: dict[Key, Request] = {}  # in order of arrival
        self._events: list[Event] = []
        self._made_room = False
        self.stats = SchedulerStats()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A request with the blocks for its context. Its key must be new."""
        if request.key in self._requests:
            raise ValueError(f"{request.key} is already running")
        self._requests[request.key] = request

    def remove(self, key: Key) -> None:
        """Drops a request, if it is still here; confirms with `Removed` in any case."""
        self._requests.pop(key, None)
        self._events.append(Removed(key))

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        """The blocks asked for have come: `tables` are the request's whole new tables."""
        if request := self._requests.get(key):
            for own, new in zip(request.tables, tables):
                own.extend(new[len(own) :])
            request.growing = False

    def starve(self, key: Key) -> None:
        """There are no blocks for this request now. The newest request leaves, so that the others go on."""
        if (request := self._requests.get(key)) is None:
            return
        request.growing = False  # asks again with the next plan
        if self._made_room:
            return  # room was made since the last plan; whether it suffices will show
        victim = next(reversed(self._requests.values()))
        del self._requests[victim.key]
        self._made_room = True
        self.stats.preemptions += 1
        self._events.append(Preempted(victim.key, victim))

    def plan(self) -> Step | None:
        """The next step, or None where no request can go on now. Decoding comes first, then prompts in order."""
        self._made_room = False
        budget = self._limits.max_batched_tokens
        chunks: list[Chunk] = []
        for request in sorted(self._requests.values(), key=lambda request: request.uncomputed_len > 1):
            self._ask_for_blocks(request)
            length = min(request.uncomputed_len, budget, request.capacity - request.computed_len)
            if length > 0:
                chunks.append(Chunk(request, request.computed_len, length))
                budget -= length
            if budget == 0:
                break
        return Step(tuple(chunks)) if chunks else None

    def apply(self, step: Step, results: Sequence[ChunkResult]) -> None:
        """Takes in what a step computed."""
        self.stats.steps += 1
        for chunk, result in zip(step.chunks, results, strict=True):
            request = chunk.request
            request.computed_len = chunk.end
            self.stats.computed_tokens += chunk.length
            self._settle_blocks(request)
            if result.scores:
                self._events.append(Scored(request.key, chunk.scored.start, result.scores))
            if result.sampled is None:
                continue
            request.token_ids.append(result.sampled.id)
            self.stats.sampled_tokens += 1
            reason = request.finish_reason(self._limits.max_model_len)
            self._events.append(Sampled(request.key, result.sampled, reason))
            if reason is not None or request.only_first_token:
                del self._requests[request.key]

    def take_events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _ask_for_blocks(self, request: Request) -> None:
        wanted = len(request.token_ids) + LOOKAHEAD_TOKENS
        most = min(request.prompt_len + request.sampling.max_tokens, self._limits.max_model_len)
        if request.growing or request.only_first_token or request.capacity >= min(wanted, most):
            return
        request.growing = True
        self._events.append(NeedsBlocks(request.key, min(len(request.token_ids) + GROWTH_TOKENS, most)))

    def _settle_blocks(self, request: Request) -> None:
        for index in range(len(request.tables)):
            first, hashes = request.seal_full_blocks(index)
            if hashes:
                self._events.append(Sealed(request.key, index, first, hashes))
            if first_kept := request.trim_behind_window(index):
                self._events.append(Trimmed(request.key, index, first_kept))
