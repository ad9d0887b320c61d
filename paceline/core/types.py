"""Types that every part uses. Imports no other file of Paceline."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """The name of one attempt at a request. It is also the right to use the attempt's blocks.

    The gateway increases `attempt` with each new attempt. `generation` increases whenever the lease gets a new owner.
    Earlier owners, whose generation is smaller, are refused.
    """

    request_id: str
    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}/{self.generation}"


class FinishReason(enum.Enum):
    """The reason why a request ended. The values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class ConstraintKind(enum.Enum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """A regular expression in Rust's syntax: no look-around, no back references; `\\d` and `\\w` are ASCII. The whole
    output matches."""
    CHOICE = "choice"
    """A JSON list of texts. The output is one of them."""
    GRAMMAR = "grammar"
    """A grammar: Lark with a rule `start`, or GBNF with a rule `root`."""
    ANSWER = "answer"
    """A grammar in Lark that a gateway has built from a constraint of another kind, tool calls and a budget for
    reasoning.
    """


@dataclass(frozen=True, slots=True)
class Constraint:
    """A language in which an output must be: a JSON schema, a regular expression, a choice or a grammar."""

    kind: ConstraintKind
    text: str
    end_token_ids: frozenset[int]
    """Tokens that end the output. They are allowed only when the output is complete, and always end the request."""
    place: str = field(default="", compare=False)
    """Field of the API that the client used, such as "structured_outputs.regex". Only gateways know it."""
    unenforced: tuple[str, ...] = field(default=(), compare=False)
    """Keywords of JSON schemas that are not enforced, each with the field of the API. Only gateways know them."""
    grammar: str = field(default="", compare=False)
    """The constraint as a grammar of the library, which a gateway has compiled on trial; "" if it has not been
    translated."""
    domain: str = ""
    """Salt that separates requests: only requests with the same salt share the compiled constraint and the time for its
    masks. Only workers know it.
    """


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling. The gateway has resolved them, so no value means "the default of the model"."""

    temperature: float = 0.0
    """Divisor of the logits. 0 chooses the most likely token."""
    top_k: int = 0
    """Number of the most likely tokens to sample from. 0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Seed, an unsigned number of 64 bits. The random number of a token depends only on the seed and the token's
    position.
    """
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty allows all."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the request. The ending token is part of the output."""
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int | None = None
    """Number of most likely tokens to report beside the chosen one; None reports nothing."""
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, all not empty, that must not be in the output. The last token of a sequence is not sampled
    after its other tokens, unless a grammar or the allowed tokens leave no other token.
    """
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens to report beside the chosen one, instead of the most likely ones, if `logprobs` is not None."""

    def ends(self, token_id: int, output_len: int) -> bool:
        """Return whether this token is the last if the output has `output_len` tokens, this one included."""
        # Before min_tokens, an ending token is sampled only if a grammar allows no other token.
        return token_id in self.ending_token_ids and (output_len >= self.min_tokens or self.constraint is not None)

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Tokens that may end the request."""
        return self.stop_token_ids if self.constraint is None else self.stop_token_ids | self.constraint.end_token_ids

    def unwanted_ends(self, output_len: int) -> frozenset[int]:
        """Return the tokens that must not follow an output of `output_len` tokens, unless no other token is allowed."""
        unwanted = self.stop_token_ids if output_len < self.min_tokens else frozenset[int]()
        if self.constraint is not None:
            # End tokens that are not stop tokens are unwanted, too: the request has ignore_eos.
            unwanted |= self.constraint.end_token_ids - self.stop_token_ids
        return unwanted

    @property
    def needs_history(self) -> bool:
        """Whether the scores of the next token depend on the earlier tokens, because of penalties."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Logprob(NamedTuple):
    """The logprob of one token at a position. The most likely token has `rank` 1."""

    token_id: int
    logprob: float
    rank: int


class Token(NamedTuple):
    """A token and the requested logprobs: first the logprob of the chosen token, then the logprobs of the most likely
    tokens in order, or of `SamplingParams.logprob_token_ids`.
    """

    id: int
    logprobs: tuple[Logprob, ...] = ()
