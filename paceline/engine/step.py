"""Steps, which the scheduler gives to the runner, their results, and the events that follow for services.

A `Step` is a plain value: it can be pickled, stored and computed in another process over the same KV memory. It
contains names of requests and descriptions of constraints, but no live objects such as requests and matchers. Steps are
computed in order, and each is launched before the tokens of the step before it are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.context import Tail
from paceline.core.errors import PacelineError
from paceline.core.media import MediaSpan
from paceline.core.types import FinishReason, Key, SamplingParams, Token


class Chunk(NamedTuple):  # a tuple, because each step makes many of them
    """The tokens of one request that one step computes.

    A chunk of a prompt is tokens [start, start + length), which the host knows. A chunk that `follows` continues after
    the token that the device has sampled last, which the host may not know yet: it consists of that token and at most
    length - 1 drafts after it, and `start` is the largest position at which it may begin.
    """

    key: Key
    """The request."""
    row: int
    """Row of the device's state that the request has."""
    start: int
    length: int
    follows: bool
    samples: bool
    """Whether the chunk completes the context, so that the next tokens can be chosen."""
    prefills: bool
    """Whether it computes tokens that the request came with, rather than tokens sampled here."""
    hands_over: bool = False
    """Whether another worker of this host continues with the request after this chunk."""
    scored: int = 0
    """Number of prompt logprobs that the chunk gives, for the tokens at [start + 1, start + 1 + scored), because each
    token is predicted from the tokens before it.
    """
    drafts: int = 0
    """Tokens to draft after the chosen tokens, for the next step."""
    background: bool = False
    """Whether nobody waits for the request."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to): slots of the pool. Each block is copied before the chunk is computed, and the chunk goes on to write
    into `from`.
    """

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RowAssigned:
    """The start of a request in a row of the device's state, with all of its data that the device needs."""

    row: int
    token_ids: list[int]
    """The context so far: prompt, then output."""
    prompt_len: int
    drafter_len: int
    """Tokens whose KV is in the blocks of the drafter's groups."""
    sampling: SamplingParams
    """Includes the constraint, from which the runner makes masks."""
    limit: int
    """Largest number of tokens that the context may have."""
    tables: list[list[int]]
    """[groups][blocks]: slots of the pool."""
    capacity: int
    """Tokens that fit into the blocks."""
    media: tuple[MediaSpan, ...] = ()
    """Spans of the context. Encodings follow in a `RowEncoded` each."""


@dataclass(frozen=True, slots=True)
class RowEncoded:
    """The encoding of a span has become available."""

    row: int
    span: int
    """Index of the span in the context."""
    slots: tuple[int, ...]
    """Slots of the arena with the blocks of the encoding, in order."""


@dataclass(frozen=True, slots=True)
class RowExtended:
    """More blocks for a row."""

    row: int
    tables: list[list[int]]
    """The whole new block tables: [groups][blocks]."""
    capacity: int
    """Tokens that fit into the blocks."""


RowUpdate = RowAssigned | RowExtended | RowEncoded


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, and the changes to rows that come before it."""

    chunks: tuple[Chunk, ...]
    updates: tuple[RowUpdate, ...] = ()
    """Changes of the device's rows, to be made in this order before the chunks are computed."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The outcome of one chunk."""

    tokens: list[Token] = field(default_factory=list)
    """If the chunk samples: the accepted drafts and one more token; empty if the row had ended before."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Drafts that were accepted; they are the first of `tokens`."""
    scores: list[Token] = field(default_factory=list)
    """[chunk.scored]: prompt tokens with their logprobs."""
    failure: PacelineError | None = None
    """The reason why no token can be chosen for the row; None if there is none."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, and the time that it took."""

    chunks: list[ChunkResult]
    """One for each chunk, in order."""
    seconds: float = 0.0
    """Time of the whole step, drafting included."""
    model_seconds: float = 0.0
    """Time of the model's forward pass and logits; on a GPU, the time to launch them."""
    draft_seconds: float = 0.0
    """Time of drafting."""
    drafted: int = 0
    """Tokens drafted for the next step; 0 also if `draft_seconds` says nothing about the cost of a draft."""
    drafter_lengths: Sequence[int] = ()
    """[chunks]: tokens for which a draft model has KV of its own, drafts included; empty if there is no such model."""
    host_cpu_seconds: float = 0.0
    """CPU time of the computing thread outside of the model: inputs, sampling, drafts."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was chosen. If there is a reason, the engine is done with the request."""

    key: Key
    token: Token
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Computed:
    """A step has computed tokens [first, first + length) of the tokens that the request came with."""

    key: Key
    first: int
    length: int
    seconds: float
    """Time of the whole step."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks of a request that leaves after its first token contain the KV of all tokens that it came with."""

    key: Key
    length: int
    """Tokens that the request came with."""
    context_hash: bytes
    """Name of these tokens, see `Context.name`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of prompt tokens [first, first + len(tokens))."""

    key: Key
    first: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Failed:
    """No token can be chosen for the request. The engine is done with the request."""

    key: Key
    error: PacelineError


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks [first_block, first_block + len(hashes)) of a group are full and computed."""

    key: Key
    group: int
    first_block: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Kept:
    """The blocks at a tail of a request do not change any more, whether they are full or not."""

    key: Key
    tail: Tail
    copied: bool = False
    """Whether they are the copies in the request's spare blocks. Otherwise they are the request's last blocks, because
    it has ended.
    """


@dataclass(frozen=True, slots=True)
class SpareUnused:
    """A request's spare blocks have no copies and will get none, so other requests may use them now."""

    key: Key


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Blocks of a windowed group before `first_kept_block` are no longer needed."""

    key: Key
    group: int
    first_kept_block: int


@dataclass(frozen=True, slots=True)
class NeedsBlocks:
    """The context will soon outgrow its blocks. The answer is a call of `grow` or `starve`."""

    key: Key
    token_count: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request left the engine to make room. It can be added again with fresh blocks."""

    key: Key


@dataclass(frozen=True, slots=True)
class Removed:
    """The answer to `remove`: the engine does not touch the request's blocks any more."""

    key: Key


Event = (
    Sampled
    | Computed
    | Filled
    | Scored
    | Failed
    | Sealed
    | Kept
    | SpareUnused
    | Trimmed
    | NeedsBlocks
    | Preempted
    | Removed
)
