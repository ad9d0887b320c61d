"""The steps that the scheduler gives to the runner, their results, and the events about them for services.

A `Step` is a plain value: it can be pickled, stored and computed in another process over the same KV memory. It
contains names of requests and descriptions of constraints, but no live objects such as requests and matchers. Steps are
computed in order, and each is launched before the tokens of the step before it are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

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
    """Key of the request."""
    row: int
    """Row of the request in the device's state."""
    start: int
    length: int
    follows: bool
    samples: bool
    """Whether the chunk completes the context, so that the next tokens can be chosen."""
    prefills: bool
    """Whether the chunk computes tokens that the request came with, rather than tokens that this engine sampled."""
    hands_over: bool = False
    """Whether another worker of this host continues with the request after this chunk."""
    scored: int = 0
    """Number of prompt logprobs that the chunk gives, for the tokens at [start + 1, start + 1 + scored), because each
    token is predicted from the tokens before it.
    """
    states: int = 0
    """Number of the chunk's last tokens whose hidden states are a result of the step."""
    drafts: int = 0
    """Number of tokens to draft after the chosen tokens, for the next step."""
    background: bool = False
    """Whether no client waits for the request."""
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
    """Tokens of the context so far: the prompt, then the output."""
    prompt_len: int
    drafter_len: int
    """Number of tokens whose KV is in the blocks of the drafter's groups."""
    sampling: SamplingParams
    """Parameters of sampling, with the constraint from which the runner makes masks."""
    limit: int
    """Largest number of tokens that the context may have."""
    tables: list[list[int]]
    """[groups][blocks]: slots of the pool."""
    capacity: int
    """Number of tokens of the context that fit into the blocks."""
    media: tuple[MediaSpan, ...] = ()
    """Spans of media in the context. A `RowEncoded` with the slots of its encoding follows for each span."""
    adapter: bytes = b""
    """Digest of the request's adapter, which is in a slot in each step of the row; empty if it has none."""


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
    """The blocks of a row have become more."""

    row: int
    tables: list[list[int]]
    """The whole new block tables: [groups][blocks]."""
    capacity: int
    """Number of tokens of the context that fit into the blocks."""


RowUpdate = RowAssigned | RowExtended | RowEncoded


@dataclass(frozen=True, slots=True)
class AdapterPlaced:
    """An adapter takes a slot of the device, in place of the adapter that is there."""

    slot: int
    adapter: bytes
    """Digest of the adapter."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, and the changes of rows that the device makes before it."""

    chunks: tuple[Chunk, ...]
    updates: tuple[RowUpdate, ...] = ()
    """Changes of the device's rows, to be made in this order before the chunks are computed."""
    adapters: tuple[AdapterPlaced, ...] = ()
    """Adapters that the chunks need and that the device's slots did not have."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The outcome of one chunk."""

    tokens: list[Token] = field(default_factory=list)
    """If the chunk samples: the accepted drafts and one more token; empty if the row had ended before."""
    drafted: int = 0
    """Number of draft tokens that the step verified for the row."""
    accepted: int = 0
    """Number of accepted drafts. They are the first entries of `tokens`."""
    scores: list[Token] = field(default_factory=list)
    """[chunk.scored]: prompt tokens with their logprobs."""
    states: Tensor | None = None
    """fp32 [chunk.states, hidden], on the CPU: hidden states after the final norm; None if there are none."""
    failure: PacelineError | None = None
    """The reason why no token can be chosen for the row; None if tokens can be chosen."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step, and the time that it took."""

    chunks: list[ChunkResult]
    """One result for each chunk of the step, in order."""
    seconds: float = 0.0
    """Duration of the whole step in seconds, drafting included."""
    model_seconds: float = 0.0
    """Seconds for the model's forward pass and logits; on a GPU, only for their launch."""
    draft_seconds: float = 0.0
    """Seconds for drafting."""
    drafted: int = 0
    """Number of tokens drafted for the next step; also 0 if `draft_seconds` does not measure the cost of a draft."""
    drafter_lengths: Sequence[int] = ()
    """[chunks]: number of each row's tokens for which a draft model has KV of its own, drafts included; empty without
    such a model.
    """
    host_cpu_seconds: float = 0.0
    """CPU time of the computing thread outside of the model (inputs, sampling, drafts), in seconds."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was chosen. If it has a finish reason, the engine has finished the request."""

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
    """Duration of the whole step, in seconds."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks of a request that leaves after its first token contain the KV of all tokens that it came with."""

    key: Key
    length: int
    """Number of tokens that the request came with."""
    context_hash: bytes
    """Name of the tokens that the request came with, from `Context.name`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of prompt tokens [first, first + len(tokens)) are known."""

    key: Key
    first: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class States:
    """The hidden states of tokens [first, first + len(rows)) are known. If these are the last tokens of the context,
    the engine has finished the request.
    """

    key: Key
    first: int
    rows: Tensor
    """fp32 [tokens, hidden], on the CPU."""


@dataclass(frozen=True, slots=True)
class Failed:
    """No token can be chosen for the request, or its hidden states are not finite. The engine has finished it."""

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
    """Whether the blocks are the copies in the request's spare blocks. Otherwise they are the request's last blocks,
    because the request has ended.
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
    | States
    | Failed
    | Sealed
    | Kept
    | SpareUnused
    | Trimmed
    | NeedsBlocks
    | Preempted
    | Removed
)
