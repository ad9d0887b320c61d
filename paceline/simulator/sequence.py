"""One request in a simulation: its known facts, its workers, and its tokens so far."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from paceline.core.context import HASH_BYTES
from paceline.core.types import Key
from paceline.engine.prompt_order import Arrival


def block_name(number: int) -> bytes:
    """Return the name of a block of a trace in the ledger's form."""
    return number.to_bytes(HASH_BYTES, "big")


_PRIVATE = itertools.count(1 << 64)
"""Numbers of blocks that no trace names. A number of a trace has at most 64 bits."""


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease of a request's blocks on one host."""

    key: Key
    session: int
    capacity: int
    """Number of tokens that fit into the blocks of the lease."""
    sealed: int
    """Number of blocks, from the first one on, that were published under their names."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from its arrival to its end."""

    number: int
    arrival: float
    prompt_tokens: int
    answer_tokens: int
    group: str
    names: list[bytes]
    """Names of full blocks of the context, as far as they are known."""
    owner: str = ""
    """Name of the API key of the request. Waiting requests of different keys share the free places."""
    priority: int = 0
    """Priority of the request; lower is more urgent."""
    adapter: int = 0
    """Name of the request's adapter; 0 for the model alone."""
    received: float = 0.0
    """Instant at which the client last sent the request."""
    retries: int = 0
    """Number of times that the client sent the request again after a refusal."""
    background: bool = False
    """Whether the request is of the background: nobody waits for its answer."""
    wanted_seconds: float | None = None
    """Objective for the time to first token, in seconds from arrival; None if there is none."""
    waits_since: float = 0.0
    """Instant at which the request last entered the queue."""
    attempt: int = 0
    done: int = 0
    """Number of the answer's tokens that the client has."""
    context: int = 0
    """Number of tokens with which the present attempt began: the prompt, and the tokens of earlier attempts."""
    cached: int = 0
    """Tokens of the context that the computing worker found in its host's cache."""
    computed: int = 0
    """Tokens of the context that are computed or cached."""
    prompt_arrival: Arrival | None = None
    """Arrival of the prompt in the order of its worker's prompts; None until a step could include the prompt."""
    is_handed_over: bool = False
    """Whether, in the present attempt, the decode worker is another worker than the one that computes the prompt."""
    changes_hosts: bool = False
    """Whether the decode worker is on another host than the worker that computes the prompt."""
    held: dict[str, HeldLease] = field(default_factory=dict)
    """Leases of the present attempt, by the host's name."""
    sent: int = 0
    """Number of the attempt's prompt tokens that count as queued on the computing worker."""
    moved: float = 0.0
    """Instant at which the decode worker's host has all blocks except those of the last chunk."""
    adapters_at: float = 0.0
    """Instant at which the workers of the attempt have the request's adapter in memory."""
    failed: frozenset[str] = frozenset()
    first_token: float = -1.0
    """Instant of the first token; negative before it."""
    last_token: float = 0.0
    """Instant of the newest token. It is only updated when the sequence joins or leaves rows, or ends."""
    placed: float = -1.0
    """Instant at which the request was first placed on workers; negative before that."""
    starts: int = 0
    """Number of attempts that got their blocks."""
    first_cached: int = -1
    """Number of tokens that the first attempt found in the cache; -1 before it has its blocks."""
    is_over: bool = False

    @property
    def is_computing(self) -> bool:
        """Whether the prompt of the present attempt is not computed yet."""
        return self.computed < self.context

    @property
    def left_len(self) -> int:
        """Tokens of the present attempt's context that are not computed."""
        return self.context - self.computed

    @property
    def ttft_seconds(self) -> float | None:
        """Limit for the time to first token, in seconds from arrival; 0 if the client already has tokens, None if there
        is no limit.
        """
        return self.wanted_seconds if self.done == 0 else 0.0

    @property
    def left(self) -> int:
        """Number of tokens of the answer that the client does not have yet."""
        return self.answer_tokens - self.done

    def block_names(self, count: int) -> list[bytes]:
        """Return the names of the first `count` blocks. Blocks that the trace does not name get a name of their own."""
        names = self.names
        while len(names) < count:
            names.append(block_name(next(_PRIVATE)))
        return names if len(names) == count else names[:count]
