"""What the scheduler, the runner and the services tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.types import FinishReason, Key, Token
from paceline.engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of one request, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the context is complete with this chunk, so that its next token can be chosen."""
        return self.end == len(self.request.token_ids)

    @property
    def scored(self) -> range:
        """Positions of prompt tokens whose logprobs this chunk gives: each token is predicted by the one before it."""
        if self.request.sampling.prompt_logprobs is None:
            return range(0)
        return range(self.start + 1, min(self.end + 1, self.request.prompt_len))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    sampled: Token | None
    """Where the chunk samples."""
    scores: list[Token] = field(default_factory=list)
    """One for each position of `Chunk.scored`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was chosen. With a reason the request is over for the engine."""

    key: Key
    token: Token
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Scored:
    """Logprobs of prompt tokens [first, first + len(tokens))."""

    key: Key
    first: int
    tokens: list[Token]


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


Event = Sampled | Scored | Sealed | Trimmed | NeedsBlocks | Preempted | Removed
