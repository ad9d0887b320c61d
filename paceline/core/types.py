"""The words that every part uses. Imports nothing of ours."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """Names one try at one request, and who may touch its blocks.

    `attempt` grows with every new try of the gateway, `generation` with every change of hands; a holder of a smaller
    generation is refused.
    """

    request_id: str
    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}/{self.generation}"


class FinishReason(enum.Enum):
    """Why a request ended. Values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class ConstraintKind(enum.Enum):
    """How the text of a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """The whole output matches it. Rust's syntax: no look-around, no back references; `\\d` and `\\w` are ASCII."""
    CHOICE = "choice"
    """A JSON list of texts; the output is one of them."""
    GRAMMAR = "grammar"
    """Lark with rule `start`, or GBNF with rule `root`."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an output must be."""

    kind: ConstraintKind
    text: str
    end_token_ids: frozenset[int]
    """Tokens that say: complete. They are possible only where the output may end, and always end the request."""
    place: str = field(default="", compare=False)
    """Where the client said it, as in "structured_outputs.regex". Only gateways know."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Resolved by the gateway: no field means "the default of the model"."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bits. Noise is a function of (seed, position) alone."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows every token."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ends the request; the token is part of the output."""
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int | None = None
    """Number of most likely tokens to report beside the chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def ends(self, token_id: int, output_len: int) -> bool:
        """Whether a token that makes the output `output_len` tokens long is its last."""
        # Before min_tokens such a token comes only where a grammar has left no other.
        return token_id in self.ending_token_ids and (output_len >= self.min_tokens or self.constraint is not None)

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that may end the request."""
        return self.stop_token_ids if self.constraint is None else self.stop_token_ids | self.constraint.end_token_ids

    def unwanted_ends(self, output_len: int) -> frozenset[int]:
        """Tokens that must not come behind an output of `output_len` tokens, unless a constraint leaves no other."""
        unwanted = self.stop_token_ids if output_len < self.min_tokens else frozenset[int]()
        if self.constraint is not None:
            # As with ignore_eos, which leaves them out of the stop tokens.
            unwanted |= self.constraint.end_token_ids - self.stop_token_ids
        return unwanted

    @property
    def needs_history(self) -> bool:
        """Whether the next token's scores depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Logprob(NamedTuple):
    """One entry of a token's report: `rank` 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


class Token(NamedTuple):
    """A token, with the report asked for: the chosen token first, then the most likely ones in order."""

    id: int
    logprobs: tuple[Logprob, ...] = ()
