"""What the scheduler, the runner and the services tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.types import FinishReason, Key, SamplingParams, Token
from paceline.engine.constraint import Matcher
from paceline.engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computes of one request.

    A chunk of a prompt is tokens [start, start + length), which the host knows. A chunk that `follows` goes on from
    what the device has sampled last, which the host may not know yet: it is that token and at most length - 1 drafts
    behind it, and `start` is the furthest place where it may begin.
    """

    request: Request
    row: int
    start: int
    length: int
    follows: bool
    samples: bool
    """Whether the context is complete with this chunk, so that its next tokens can be chosen."""
    drafts: int = 0
    """Tokens to draft behind those that are chosen, for the step after."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def prefills(self) -> bool:
        """Whether it computes what the request came with, rather than what was sampled here."""
        return not self.follows or self.request.only_first_token or self.end <= self.request.prompt_len

    @property
    def hands_over(self) -> bool:
        """Whether a worker of this host is about to go on with the request."""
        return self.samples and self.request.only_first_token and not self.request.has_readers

    @property
    def scored(self) -> range:
        """Positions of prompt tokens whose logprobs this chunk gives: each token is predicted by the one before it."""
        if self.request.sampling.prompt_logprobs is None:
            return range(0)
        return range(self.start + 1, min(self.end + 1, self.request.prompt_len))


@dataclass(frozen=True, slots=True)
class Joined:
    """A request takes a row of the device's state, with all that the host knows of it."""

    row: int
    token_ids: list[int]
    prompt_len: int
    drafter_len: int
    """Tokens whose KV the blocks of the drafter's groups hold."""
    sampling: SamplingParams
    limit: int
    """Tokens that the context may have at most."""
    tables: list[list[int]]
    capacity: int
    """Tokens that fit into the blocks."""
    matcher: Matcher | None = None
    """Where the output is constrained."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A row has more blocks: its whole new tables."""

    row: int
    tables: list[list[int]]
    capacity: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, and what the device has to know first."""

    chunks: tuple[Chunk, ...]
    updates: tuple[Joined | Grown, ...] = ()
    """Come first, in order."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    tokens: list[Token] = field(default_factory=list)
    """Where the chunk samples: the accepted drafts and one token more; none where the row had come to its end."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """How many of them came true; they are the first of `tokens`."""
    scores: list[Token] = field(default_factory=list)
    """One for each position of `Chunk.scored`."""
    failure: str = ""
    """Why no token of the row can ever be chosen."""


@dataclass(frozen=True, slots=True)
class StepResult:
    chunks: list[ChunkResult]
    """One for each chunk, in order."""
    seconds: float = 0.0
    """Time that the step took to compute, drafting included."""
    model_seconds: float = 0.0
    """What of it the model's forward pass and logits took; on a GPU, to launch."""
    draft_seconds: float = 0.0
    drafted: int = 0
    """Tokens drafted for the step after; 0 also where `draft_seconds` tells nothing about what drafts cost."""
    drafter_lengths: Sequence[int] = ()
    """[chunks]: tokens for which a draft model has KV of its own, drafts included; empty where there is none."""
    host_cpu_seconds: float = 0.0
    """CPU time of the computing thread outside of the model: inputs, sampling, drafts."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was chosen. With a reason the request is over for the engine."""

    key: Key
    token: Token
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Computed:
    """A step has computed tokens [first, first + length) of what the request came with."""

    key: Key
    first: int
    length: int
    seconds: float
    """That the whole step took."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The blocks of a request that leaves after its first token contain all `length` tokens that it came with."""

    key: Key
    length: int
    context_hash: bytes
    """Names these tokens."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of prompt tokens [first, first + len(tokens))."""

    key: Key
    first: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing may follow under the request's constraint; it is over for the engine."""

    key: Key
    message: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """Blocks [first_block, first_block + len(hashes)) of a group are full and computed."""

    key: Key
    group: int
    first_block: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Blocks of a windowed group before first_kept_block are needed no more."""

    key: Key
    group: int
    first_kept_block: int


@dataclass(frozen=True, slots=True)
class NeedsBlocks:
    """The context will soon outgrow its blocks; answer with `grow` or `starve`."""

    key: Key
    token_count: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request left the engine to make room; it can be added again with fresh blocks."""

    key: Key
    request: Request


@dataclass(frozen=True, slots=True)
class Removed:
    """Answers `remove`: the engine touches the request's blocks no more."""

    key: Key


Event = Sampled | Computed | Filled | Scored | Failed | Sealed | Trimmed | NeedsBlocks | Preempted | Removed
