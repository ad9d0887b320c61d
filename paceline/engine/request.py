"""One request in the engine: its tokens, its blocks and its progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.media import MediaKind
from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.engine.constraint import Grammar
from paceline.engine.prompt_order import Arrival
from paceline.engine.speculation import Acceptance
from paceline.models.adapters.loading import LoadedAdapter


class Residence(Enum):
    """The place of a request in the engine. `Residents` moves it; `residents.TRANSITIONS` has the possible moves."""

    WAITING = "waiting"
    """The request has no blocks in the pool."""
    LOADING = "loading"
    """The request's blocks are being copied into the pool."""
    RUNNING = "running"
    """The request's blocks are in the pool, so steps may include the request."""
    SWAPPING_OUT = "swapping out"
    """The request leaves the pool until there is room again. Steps in flight or copies still use its blocks."""
    PREEMPTED = "preempted"
    """The request leaves the engine to make room. Results of steps in flight still count."""
    ENDED = "ended"
    """The request leaves because the engine has finished it. Results of steps in flight are dropped."""
    REMOVED = "removed"
    """The request leaves because the service dropped it. Results of steps in flight are dropped."""
    GONE = "gone"
    """Nothing uses the request's blocks any more, and the engine does not know the request."""


LEAVING = frozenset((Residence.PREEMPTED, Residence.ENDED, Residence.REMOVED))
"""Places of requests that leave the engine as soon as no step in flight includes them and no copy touches their blocks.
"""


@dataclass(slots=True)
class RequestStats:
    """Counters of one request."""

    steps: int = 0
    """Number of steps that gave the request tokens."""
    drafts: int = 0
    """Number of steps that verified drafts of the request."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_blocks: int = 0
    """Number of blocks that were copied from another worker's pool on the same device."""

    def count(self, tokens: int, drafted: int, accepted: int) -> None:
        """Count a step that gave `tokens` tokens. It verified `drafted` draft tokens and accepted `accepted` of
        them.
        """
        if tokens:
            self.steps += 1
            self.drafts += drafted > 0
            self.draft_tokens += drafted
            self.accepted_tokens += accepted


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on one worker.

    The KV of tokens [0, computed_len) is in its blocks; the tokens after them are computed next. A decoding request has
    one such token, the token sampled last.
    """

    key: Key
    context: Context
    """The tokens, prompt first, then output, and the names of their blocks."""
    prompt_len: int
    sampling: SamplingParams
    layout: KVLayout
    tables: list[list[int]]
    """[groups][blocks]: slots of the arena. Entry i is the slot of tokens [i * block_tokens, (i + 1) * block_tokens),
    or NO_SLOT."""
    computed_len: int = 0
    only_first_token: bool = False
    """Whether the request leaves after its first token, because another worker decodes it in its blocks."""
    states: Literal["none", "last", "all"] = "none"
    """The tokens whose hidden states are the request's result. If there are any, no token is sampled, and the request
    ends with its last token.
    """
    has_readers: bool = False
    """Whether another host reads the blocks while they become full."""
    background: bool = False
    """Whether no client waits for the request, so that it comes after all others (`BackgroundTurns`)."""
    wanted_seconds: float | None = None
    """Limit for the time to first token, in seconds from its arrival at this worker; None if it has no objective."""
    kept_len: int = 0
    """Number of prompt tokens after which the partial blocks are copied, so that other requests can continue from
    there; 0 if no copies are to be made, or after they were made.
    """
    spare: list[int] = field(default_factory=list)
    """[groups]: slots of the arena for the copies at `kept_len`; empty if there are none."""
    adapter: LoadedAdapter | None = None
    """The adapter whose digest the context has. It stays in memory while the request lives, so that any step can put it
    into a slot. None if the context has no adapter.
    """
    grammar: Grammar | None = None
    """Compiled form of `sampling.constraint`. The runner finds it in the cache of grammars while the request lives."""
    stats: RequestStats = field(default_factory=RequestStats)
    encodings: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    """Slots of the arena with the encoding of a span, by the index of the span in the context. A span whose encoding is
    not computed yet is missing."""
    media_end: int = field(init=False)
    """Index of the token after the last span of media; 0 if the context has no spans."""
    sealed_blocks: list[int] = field(init=False)
    """[groups]: number of sealed blocks at the front of the context."""
    place: Residence = field(default=Residence.WAITING, init=False)
    growing: bool = field(default=False, init=False)
    """Whether the engine has asked for more blocks and has not got them yet."""
    row: int | None = field(default=None, init=False)
    """Row of the device's state that the request has; None if it has none."""
    launched: deque[int] = field(default_factory=deque, init=False)
    """For each step in flight that includes the request, oldest first: the largest number of tokens that the step can
    give. 0 if the step does not sample; otherwise the step gives at least one token.
    """
    drafts: int = field(default=0, init=False)
    """Number of tokens that the newest planned step drafts for the following step."""
    acceptance: Acceptance | None = field(default=None, init=False)
    drafter_len: int = field(init=False)
    """Number of tokens whose KV is in the blocks of the drafter's groups."""
    prompt_arrival: Arrival | None = field(default=None, init=False)
    """Arrival among the prompts of the worker; None until a step could include the prompt."""
    joined_len: int = field(init=False)
    """Number of tokens that the context had when the request joined this engine."""
    planned_len: int = field(init=False)
    """Number of tokens at the front of the context that are computed or in flight."""

    def __post_init__(self) -> None:
        self.media_end = self.context.media[-1].end if self.context.media else 0
        if self.media_end > len(self.token_ids):
            raise ValueError(f"{self.key}: a span of media ends at {self.media_end}, after the context's last token")
        self.joined_len = len(self.token_ids)
        self.planned_len = self.drafter_len = self.computed_len
        self.sealed_blocks = [self.computed_len // group.block_tokens for group in self.layout.groups]

    @property
    def token_ids(self) -> list[int]:
        return self.context.token_ids

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def least_len(self) -> int:
        """Least number of tokens that the context can have after all launched steps."""
        return len(self.token_ids) + len(self.launched) - self.launched.count(0)

    @property
    def most_len(self) -> int:
        """Largest number of tokens that the context can have after all launched steps."""
        return len(self.token_ids) + sum(self.launched)

    @property
    def decodes(self) -> bool:
        """Whether all known tokens but the newest one are computed or in flight, so that the device continues by
        itself."""
        if self.states != "none":
            return False
        return any(self.launched) or (self.left_len <= 1 and self.planned_len >= self.media_end)

    @property
    def is_computed(self) -> bool:
        """Whether the request wants hidden states and has them all."""
        return self.states != "none" and self.computed_len == len(self.token_ids)

    @property
    def left_len(self) -> int:
        """Number of known tokens that are neither computed nor in flight."""
        return len(self.token_ids) - self.planned_len

    @property
    def ttft_seconds(self) -> float | None:
        """Limit for the time to first token, in seconds from arrival; 0 if its client already has tokens. None without
        a limit.
        """
        return self.wanted_seconds if self.output_len == 0 else 0.0

    @property
    def ready_len(self) -> int:
        """Number of tokens at the front of the context, up to the first span of media whose encoding is missing."""
        for index, span in enumerate(self.context.media):
            if span.end > self.planned_len and index not in self.encodings:
                return span.start
        return len(self.token_ids)

    def chunk_end(self, end: int, whole: Collection[MediaKind]) -> int:
        """Return the end of a chunk from `planned_len` to about `end` that does not cut a span of one of these kinds.

        The chunk ends before such a span if it has tokens before the span. Otherwise it ends after the span.
        """
        for span in self.context.media:
            if span.start < end < span.end and span.kind in whole:
                return span.start if span.start > self.planned_len else span.end
        return end

    def limit(self, max_model_len: int) -> int:
        """Return the largest number of tokens that the context may have."""
        wanted = self.joined_len + 1 if self.only_first_token else self.prompt_len + self.sampling.max_tokens
        return min(wanted, max_model_len)

    @property
    def capacity(self) -> int:
        """Number of tokens of the context that fit into the request's blocks."""
        return self.capacity_of(self.tables)

    def capacity_of(self, tables: list[list[int]]) -> int:
        """Return the number of tokens that fit into the blocks of tables [groups][blocks]."""
        return min(len(table) * group.block_tokens for table, group in zip(tables, self.layout.groups))

    def start_over(self) -> None:
        """Reset the request, so that its whole context is computed again. Sealed blocks stay sealed."""
        self.computed_len = self.planned_len = self.drafter_len = 0

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Return the reason why the token sampled last ends the request; None if the request goes on."""
        if self.sampling.ends(self.token_ids[-1], self.output_len):
            return FinishReason.STOP
        if self.output_len >= self.sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def seal_full_blocks(self, group_index: int) -> tuple[int, list[bytes]]:
        """Mark the blocks that have become full as sealed. Return the index of the first of them, and the names of all
        of them.
        """
        block_tokens = self.layout.groups[group_index].block_tokens
        first, end = self.sealed_blocks[group_index], self.filled_len(group_index) // block_tokens
        if first >= end:
            return first, []
        self.sealed_blocks[group_index] = end
        return first, [self.hash_of(group_index, index) for index in range(first, end)]

    def hash_of(self, group_index: int, block: int) -> bytes:
        """Return the name of a block's content. If the block is not full, this is the name of its content so far."""
        return self.context.block_name(self.layout, group_index, block, self.filled_len(group_index))

    def trim_behind_window(self, group_index: int) -> int:
        """Drop blocks that no later query reads. Return the number of empty entries at the front; 0 if no block was
        dropped.
        """
        first_needed = self.layout.groups[group_index].first_needed_block(self.filled_len(group_index))
        table = self.tables[group_index]
        if first_needed == 0 or table[first_needed - 1] == NO_SLOT:
            return 0
        table[:first_needed] = [NO_SLOT] * first_needed
        return first_needed

    def partial_blocks(self, length: int) -> list[tuple[int, int]]:
        """Return (group, block) for each block that the first `length` tokens fill only in part."""
        ends = [divmod(length, group.block_tokens) for group in self.layout.groups]
        return [(group, block) for group, (block, rest) in enumerate(ends) if rest]

    @property
    def has_tail(self) -> bool:
        """Whether all groups have the KV of the computed tokens, and it ends in a partial block. Another request needs
        this block to continue after these tokens.
        """
        layout, end = self.layout, self.computed_len
        is_whole = all(self.filled_len(index) == end for index in range(len(layout.groups)))
        return layout.keeps_tails and is_whole and end % layout.alignment > 0

    def filled_len(self, group_index: int) -> int:
        """Return the number of tokens whose KV is in the group's blocks."""
        return self.drafter_len if self.layout.groups[group_index].shape.drafter else self.computed_len
