"""One request as the engine sees it: its tokens, its blocks, how far it has come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.engine.constraint import Grammar
from paceline.engine.speculation import Acceptance


@dataclass(slots=True)
class RequestStats:
    """Counters of one request."""

    steps: int = 0
    """Steps that gave tokens."""
    drafts: int = 0
    """Steps in which drafts were verified."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_blocks: int = 0
    """Blocks that came from another pool of the device."""

    def count(self, tokens: int, drafted: int, accepted: int) -> None:
        """Count a step that gave `tokens` tokens and accepted `accepted` of the `drafted` tokens that it verified."""
        if tokens:
            self.steps += 1
            self.drafts += drafted > 0
            self.draft_tokens += drafted
            self.accepted_tokens += accepted


@dataclass(slots=True, eq=False)
class Request:
    """A context that grows by sampling.

    Its KV is in blocks for tokens [0, computed_len); the tokens behind are computed next. A decoding request has
    one such token, the one sampled last.
    """

    key: Key
    context: Context
    """Prompt, then output."""
    prompt_len: int
    sampling: SamplingParams
    layout: KVLayout
    tables: list[list[int]]
    """One a group; entry i is the slot of tokens [i * block_tokens, (i + 1) * block_tokens), or NO_SLOT."""
    computed_len: int = 0
    only_first_token: bool = False
    """The request leaves after its first token, and its blocks stay: somebody else decodes it."""
    has_readers: bool = False
    """Its blocks are read as they become complete, by another host."""
    grammar: Grammar | None = None
    """Compiled form of `sampling.constraint`. The runner finds it in the cache of grammars while the request lives."""
    stats: RequestStats = field(default_factory=RequestStats)
    sealed_blocks: list[int] = field(init=False)
    """One a group: blocks before this one are sealed."""
    pool_tables: list[list[int]] | None = field(default=None, init=False)
    """As `tables`, in slots of the pool that is computed in; None while the request has no blocks there."""
    swapping_in: bool = field(default=False, init=False)
    """Whether the content of its blocks is still on its way there."""
    copies: int = field(default=0, init=False)
    """Batches of blocks that are being copied from there or to there."""
    swapping_out: bool = field(default=False, init=False)
    """Whether it leaves the pool, to come back when there is room."""
    growing: bool = field(default=False, init=False)
    """Whether more blocks were asked for and no answer has come."""
    row: int | None = field(default=None, init=False)
    """Its place in the device's state."""
    in_flight: int = field(default=0, init=False)
    """Launched steps that include it and whose results have not come."""
    drafts: int = field(default=0, init=False)
    """Tokens that the newest planned step drafts for the one after it."""
    acceptance: Acceptance | None = field(default=None, init=False)
    drafter_len: int = field(init=False)
    """Tokens whose KV the blocks of the drafter's groups hold."""
    joined_len: int = field(init=False)
    """Tokens that it came with."""
    planned_len: int = field(init=False)
    """Tokens of `token_ids` at the front that are computed or in flight."""
    unknown: deque[int] = field(default_factory=deque, init=False)
    """For each launched step that samples and whose results have not come: the most tokens that it can give; one is
    the least."""

    def __post_init__(self) -> None:
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
        """Tokens that the context has at least, once all launched steps are done."""
        return len(self.token_ids) + len(self.unknown)

    @property
    def most_len(self) -> int:
        """Tokens that it then has at most."""
        return len(self.token_ids) + sum(self.unknown)

    @property
    def decodes(self) -> bool:
        """Whether all that the host knows is computed or in flight, but for the newest token: the device goes on."""
        return bool(self.unknown) or len(self.token_ids) - self.planned_len <= 1

    def limit(self, max_model_len: int) -> int:
        """Tokens that the context may have at most."""
        wanted = self.joined_len + 1 if self.only_first_token else self.prompt_len + self.sampling.max_tokens
        return min(wanted, max_model_len)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks that it holds."""
        return self._capacity(self.tables)

    @property
    def pool_capacity(self) -> int:
        """Tokens that fit into those that can be computed in."""
        return 0 if self.pool_tables is None else self._capacity(self.pool_tables)

    def _capacity(self, tables: list[list[int]]) -> int:
        return min(len(table) * group.block_tokens for table, group in zip(tables, self.layout.groups))

    @property
    def idle(self) -> bool:
        """Whether nobody touches its blocks: no step, and no copy."""
        return self.in_flight == 0 and self.copies == 0

    def start_over(self) -> None:
        """Has the whole context computed again. What is sealed stays so."""
        self.computed_len = self.planned_len = self.drafter_len = 0

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Whether the token sampled last ends the request."""
        if self.sampling.ends(self.token_ids[-1], self.output_len):
            return FinishReason.STOP
        if self.output_len >= self.sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def seal_full_blocks(self, group_index: int) -> tuple[int, list[bytes]]:
        """Marks blocks that became full as sealed; returns the first of them and the hashes of all."""
        block_tokens = self.layout.groups[group_index].block_tokens
        first, end = self.sealed_blocks[group_index], self.filled_len(group_index) // block_tokens
        if first >= end:
            return first, []
        self.sealed_blocks[group_index] = end
        return first, [self.hash_of(group_index, index) for index in range(first, end)]

    def hash_of(self, group_index: int, block: int) -> bytes:
        """The name of a block's content; of one that is not full, of what is in it so far."""
        return self.context.block_name(self.layout, group_index, block, self.filled_len(group_index))

    def trim_behind_window(self, group_index: int) -> int:
        """Forgets blocks that no later query reads; returns how many entries at the front are empty, 0 if no new."""
        first_needed = self.layout.groups[group_index].first_needed_block(self.filled_len(group_index))
        table = self.tables[group_index]
        if first_needed == 0 or table[first_needed - 1] == NO_SLOT:
            return 0
        table[:first_needed] = [NO_SLOT] * first_needed
        return first_needed

    def filled_len(self, group_index: int) -> int:
        """Tokens whose KV is in the group's blocks."""
        return self.drafter_len if self.layout.groups[group_index].shape.drafter else self.computed_len
