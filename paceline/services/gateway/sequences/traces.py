"""Records of what happened to a request and its sequences.

Log lines, metrics and traces are made from them. All instants are of time.monotonic(), in seconds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline.core.numerics import Numerics
from paceline.services.gateway.http.request_scope import RequestScope
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace

SEQUENCES_KEPT = 100
"""Largest number of sequences of one request whose traces are kept after the request has ended."""
ATTEMPTS_KEPT = 32
"""Number of recorded attempts of a sequence beyond which attempts that no worker admitted are only counted."""
_ABORTED = "the client left, or the request was aborted"


@dataclass(slots=True)
class SequenceTrace:
    """The record of one sequence: its attempts and its end."""

    index: int = 0
    """Index of the sequence among the request's choices."""
    prompt_tokens: int = 0
    max_tokens: int = 0
    arrived: float = field(default_factory=time.monotonic)
    tries: list[AttemptTrace] = field(default_factory=list)
    """The attempts in the order of their starts. A failed attempt may never have been admitted, and the last attempt
    may still wait."""
    left_out: int = 0
    """Number of failed attempts that are not among `tries`."""
    wanted_weights: str = ""
    """`Member.weights` that the first worker must have already; "" if any weights will do."""
    ended: float | None = None
    outcome: str = ""
    """How the sequence ended: a finish reason, "abort" or "error"; empty while the sequence runs."""
    why: str = ""
    """Explanation of the end, for people to read; may be empty."""
    generated_tokens: int = 0

    @property
    def admitted(self) -> float | None:
        """Instant at which workers first admitted an attempt; None if they have admitted no attempt."""
        return next((attempt.admitted for attempt in self.tries if attempt.admitted is not None), None)

    @property
    def attempts(self) -> int:
        """Number of attempts that workers were asked to admit. Attempts for which no worker had room do not count."""
        return self.left_out + sum(attempt.asked is not None for attempt in self.tries)

    @property
    def outcomes(self) -> Counter[str]:
        """Number of attempts that have ended, by their outcome."""
        return Counter({"failed": self.left_out}) + Counter(
            attempt.outcome for attempt in self.tries if attempt.outcome
        )

    @property
    def numerics_changes(self) -> int:
        """Number of attempts that were admitted by workers whose numerics differ from those of the attempts before."""
        return sum(attempt.admitted is not None and bool(attempt.numerics_changes) for attempt in self.tries)

    @property
    def computed_with(self) -> Numerics | None:
        """Numerics of the worker that computed the prompt for the first results; None if unknown or without results."""
        computing = (attempt.prefill or attempt.decode for attempt in self.tries if attempt.tokens or attempt.scores)
        return next((worker.numerics for worker in computing if worker is not None), None)

    @property
    def weights(self) -> str:
        """`Member.weights` of the worker that computed the first results. Without results, the weights that are wanted;
        "" if unknown."""
        computing = (attempt.prefill or attempt.decode for attempt in self.tries if attempt.tokens or attempt.scores)
        found = (worker.weights for worker in computing if worker is not None and worker.weights)
        return next(found, self.wanted_weights)

    @property
    def decoded_with(self) -> Numerics | None:
        """Numerics of the decode worker that sent the newest tokens; None if unknown or without such tokens."""
        decoding = (attempt.decode for attempt in reversed(self.tries) if attempt.decode_tokens)
        return next((worker.numerics for worker in decoding if worker is not None), None)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were cached for the first admitted attempt."""
        return next((attempt.cached_tokens for attempt in self.tries if attempt.admitted is not None), 0)

    @property
    def preemptions(self) -> int:
        """Number of times that a worker preempted the sequence, which then recomputed its blocks, as workers report."""
        return sum(attempt.effort.preemptions for attempt in self.tries if attempt.effort is not None)

    @property
    def token_times(self) -> list[float]:
        """Instants at which messages with tokens came, over all attempts."""
        return list(itertools.chain.from_iterable(attempt.token_times for attempt in self.tries))

    @property
    def token_counts(self) -> list[int]:
        """Number of tokens in each message with tokens, over all attempts."""
        return list(itertools.chain.from_iterable(attempt.token_counts for attempt in self.tries))

    @property
    def handed_over(self) -> float | None:
        """Instant at which a decode worker was last told that the blocks are filled; None if that never happened."""
        told = (attempt.handed_over for attempt in reversed(self.tries))
        return next((instant for instant in told if instant is not None), None)

    @property
    def workers(self) -> tuple[str, str]:
        """Ids of the prefill worker and the decode worker that last admitted the sequence; "" for a missing worker."""
        taken = [attempt for attempt in self.tries if attempt.admitted is not None]
        return taken[-1].worker_ids if taken else ("", "")

    def begin_attempt(self, ahead: int) -> AttemptTrace:
        """Record that an attempt begins to wait, and return its trace.

        Args:
            ahead: number of sequences that wait in front of this one.
        """
        attempt = AttemptTrace(
            ahead=ahead, computed_with=self.computed_with, decoded_with=self.decoded_with, weights=self.weights
        )
        if len(self.tries) >= ATTEMPTS_KEPT and self.tries[-1].admitted is None:
            self.tries.pop()
            self.left_out += 1
        self.tries.append(attempt)
        return attempt

    def end_attempt(self, outcome: str, why: str) -> None:
        """Record the end of the last attempt, because the sequence ends.

        Args:
            outcome: how the sequence ends: a finish reason, "abort" or "error".
        """
        if self.tries:
            own = {"abort": "cancelled", "error": "failed"}.get(outcome, "finished")
            self.tries[-1].end(own, why or (_ABORTED if outcome == "abort" else ""))

    def end(self, outcome: str, why: str, generated_tokens: int) -> None:
        """Record the sequence's end and drop nearly all of `token_times` and `token_counts`. Read both lists before."""
        self.ended, self.outcome, self.why, self.generated_tokens = time.monotonic(), outcome, why, generated_tokens
        for attempt in self.tries:
            attempt.close()


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTrace:
    """Record of one request: its parameters and the traces of its sequences. It contains no text of the client."""

    request_id: str
    """Id of the request in the response. Requests may have the same id, because clients may choose it."""
    own_id: str
    """Id that is unique in the cluster. The ids by which workers know its sequences begin with this id."""
    session_id: str
    """Name that the client gives to the conversation; "" if it gives none."""
    endpoint: str
    streamed: bool
    asked: dict[str, Any]
    """The request's sampling parameters by name, without texts of the client."""
    sequences: int
    owner: str
    """Owner, who may see the trace: the digest of the caller's API key; "" if the caller has no key."""
    model: str
    """Name of the model in the API."""
    arrived: float
    """Instant at which the request arrived, on time.monotonic(). `clock` is the same instant as date and time."""
    clock: datetime = field(default_factory=lambda: datetime.now(UTC))
    traces: list[SequenceTrace] = field(default_factory=list)
    """Traces of the sequences that have begun, in the order in which they began. A bundle of inputs that was computed
    again, because its weights were replaced, has several traces with the same index; the last one counts."""
    left_out: int = 0
    """Number of sequences whose traces were dropped when the request ended."""
    ended: float | None = None
    outcome: str = ""
    """How the request ended: "finished", "failed", "aborted" or "client gone"; empty while it runs."""
    is_aborted: bool = False
    """Whether the request was ended by a call that names its id."""

    @staticmethod
    def of(plan: Plan, scope: RequestScope, *, endpoint: str, model: str, streamed: bool) -> RequestTrace:
        """Return the trace of a request that is about to run."""
        return RequestTrace(
            request_id=scope.id,
            own_id=scope.unique_id(),
            session_id=plan.session_id,
            endpoint=endpoint,
            streamed=streamed,
            asked=_asked(plan),
            sequences=len(plan.prompts) * plan.n,
            owner=scope.owner,
            model=model,
            arrived=scope.arrived,
        )

    def sequence_id(self, index: int) -> str:
        """Return the id that a sequence has at workers: in the keys of leases and in logs.

        Args:
            index: index of the sequence among the request's choices.
        """
        return self.own_id if self.sequences == 1 else f"{self.own_id}-{index}"

    def begin(self, index: int, prompt_tokens: int, max_tokens: int) -> SequenceTrace:
        """Record that a sequence begins, and return its trace, which is filled in while the sequence runs."""
        trace = SequenceTrace(index, prompt_tokens, max_tokens)
        self.traces.append(trace)
        return trace

    def end(self) -> None:
        """Record the end of the request. All sequences that have begun must have ended."""
        newest = {trace.index: trace for trace in self.traces}
        outcomes = {trace.outcome for trace in newest.values()}
        self.ended = time.monotonic()
        if "error" in outcomes:
            self.outcome = "failed"
        elif self.is_aborted:
            self.outcome = "aborted"
        else:
            left = outcomes & {"abort", ""} or len(newest) < self.sequences
            self.outcome = "client gone" if left else "finished"
        self.left_out = max(0, len(self.traces) - SEQUENCES_KEPT)
        del self.traces[SEQUENCES_KEPT:]


def _asked(plan: Plan) -> dict[str, Any]:
    """Return the sampling parameters that all sequences share, without texts: a constraint may be long, and a stop
    string may be private."""
    if plan.prompts[0].pool is not None:
        return _asked_of_pool(plan)
    sampling = plan.prompts[0].sampling
    constraint = sampling.constraint
    return {
        "adapter": None if plan.adapter is None else {"name": plan.adapter.name, "digest": plan.adapter.digest.hex()},
        "prompts": len(plan.prompts),
        "n": plan.n,
        "sampling": "greedy" if sampling.temperature == 0 else "random",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "structured_output": None if constraint is None else constraint.kind.value,
        "stop_strings": len(plan.stop),
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
    }


def _asked_of_pool(plan: Plan) -> dict[str, Any]:
    """Return the options of a request that pools, which all of its bundles share."""
    pools = [prompt.pool for prompt in plan.prompts if prompt.pool is not None]
    first = pools[0]
    return {
        "task": first.wish.task,
        "inputs": sum(len(pool.inputs) for pool in pools),
        "dimensions": first.wish.dimensions,
        "normalize": first.wish.normalize,
        "activation": first.wish.activation,
    }
