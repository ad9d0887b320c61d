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
"""Sequences of one request whose traces are kept after it has ended."""
ATTEMPTS_KEPT = 32
"""Attempts of a sequence after which further ones that no worker admits are only counted."""
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
    """The attempts in order. An attempt that failed may not have been admitted, and the last one may still wait."""
    left_out: int = 0
    """Failed attempts that are not among `tries`."""
    ended: float | None = None
    outcome: str = ""
    """The finish reason, "abort" or "error"; empty while the sequence runs."""
    why: str = ""
    """More about the end, for people to read."""
    generated_tokens: int = 0

    @property
    def admitted(self) -> float | None:
        """The instant at which the first attempt was admitted."""
        return next((attempt.admitted for attempt in self.tries if attempt.admitted is not None), None)

    @property
    def attempts(self) -> int:
        """Number of attempts that workers were asked for, however these ended; not if the workers only had no room."""
        return self.left_out + sum(attempt.asked is not None for attempt in self.tries)

    @property
    def outcomes(self) -> Counter[str]:
        """Number of attempts that have ended, by outcome."""
        return Counter({"failed": self.left_out}) + Counter(
            attempt.outcome for attempt in self.tries if attempt.outcome
        )

    @property
    def numerics_changes(self) -> int:
        """Number of attempts that workers admitted although their numerics differ from those before."""
        return sum(attempt.admitted is not None and bool(attempt.numerics_changes) for attempt in self.tries)

    @property
    def computed_with(self) -> Numerics | None:
        """Numerics of the worker that computed the prompt for the first results; None if none came, or if unknown."""
        computing = (attempt.prefill or attempt.decode for attempt in self.tries if attempt.tokens or attempt.scores)
        return next((worker.numerics for worker in computing if worker is not None), None)

    @property
    def weights(self) -> str:
        """`Member.weights` of the worker that computed the first results; "" if none came, or if unknown."""
        computing = (attempt.prefill or attempt.decode for attempt in self.tries if attempt.tokens or attempt.scores)
        return next((worker.weights for worker in computing if worker is not None and worker.weights), "")

    @property
    def decoded_with(self) -> Numerics | None:
        """Numerics of the decode worker that sent the newest tokens; None if none did, or if unknown."""
        decoding = (attempt.decode for attempt in reversed(self.tries) if attempt.decode_tokens)
        return next((worker.numerics for worker in decoding if worker is not None), None)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in the cache."""
        return next((attempt.cached_tokens for attempt in self.tries if attempt.admitted is not None), 0)

    @property
    def preemptions(self) -> int:
        """Times that it lost its blocks at a worker and had to compute them again, as far as its workers told."""
        return sum(attempt.effort.preemptions for attempt in self.tries if attempt.effort is not None)

    @property
    def token_times(self) -> list[float]:
        """The instants at which messages with tokens came."""
        return list(itertools.chain.from_iterable(attempt.token_times for attempt in self.tries))

    @property
    def token_counts(self) -> list[int]:
        """Number of tokens in each message with tokens."""
        return list(itertools.chain.from_iterable(attempt.token_counts for attempt in self.tries))

    @property
    def handed_over(self) -> float | None:
        """The instant at which a decode worker was last told that the blocks are filled."""
        told = (attempt.handed_over for attempt in reversed(self.tries))
        return next((instant for instant in told if instant is not None), None)

    @property
    def workers(self) -> tuple[str, str]:
        """Ids of the prefill and decode worker that admitted it last; "" if there is none."""
        taken = [attempt for attempt in self.tries if attempt.admitted is not None]
        return taken[-1].worker_ids if taken else ("", "")

    def begin_attempt(self, ahead: int) -> AttemptTrace:
        """Record that an attempt begins to wait, and return its trace.

        Args:
            ahead: number of sequences that wait already.
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
        """Record the end of the last attempt with that of the sequence.

        Args:
            outcome: the finish reason, "abort" or "error".
        """
        if self.tries:
            own = {"abort": "cancelled", "error": "failed"}.get(outcome, "finished")
            self.tries[-1].end(own, why or (_ABORTED if outcome == "abort" else ""))

    def end(self, outcome: str, why: str, generated_tokens: int) -> None:
        """Record the end. Call this after everything that reads `token_times` or `token_counts`, which it drops."""
        self.ended, self.outcome, self.why, self.generated_tokens = time.monotonic(), outcome, why, generated_tokens
        for attempt in self.tries:
            attempt.close()


@dataclass(slots=True, kw_only=True, eq=False)
class RequestTrace:
    """One request of a client: its parameters, and what happened to its sequences. It has no text of the client."""

    request_id: str
    """The id in the response. If the client chose it, earlier requests may have the same one."""
    own_id: str
    """Unique in the cluster. Workers know sequences by it; see `sequence_id`."""
    session_id: str
    """The client's name of the conversation; "" if there is none."""
    endpoint: str
    streamed: bool
    asked: dict[str, Any]
    """The parameters of sampling."""
    sequences: int
    owner: str
    """Who may see it: the digest of the caller's key; "" if the caller has none."""
    model: str
    """Name of the model."""
    arrived: float
    """When the request arrived, on time.monotonic(). `clock` is the same as date and time."""
    clock: datetime = field(default_factory=lambda: datetime.now(UTC))
    traces: list[SequenceTrace] = field(default_factory=list)
    """Traces of sequences that have begun, in the order of their beginning."""
    left_out: int = 0
    """Number of sequences whose traces were dropped at the end."""
    ended: float | None = None
    outcome: str = ""
    """One of "finished", "failed", "aborted" and "client gone"; empty while it runs."""
    is_aborted: bool = False
    """Whether it was ended by its id."""

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
        """Return the id by which workers know a sequence, in the keys of leases and in logs."""
        return self.own_id if self.sequences == 1 else f"{self.own_id}-{index}"

    def begin(self, index: int, prompt_tokens: int, max_tokens: int) -> SequenceTrace:
        """Record that a sequence begins. Returns its trace, which is filled in while it runs."""
        trace = SequenceTrace(index, prompt_tokens, max_tokens)
        self.traces.append(trace)
        return trace

    def end(self) -> None:
        """Record the end of the request. All sequences that have begun must have ended."""
        outcomes = {trace.outcome for trace in self.traces}
        self.ended = time.monotonic()
        if "error" in outcomes:
            self.outcome = "failed"
        elif self.is_aborted:
            self.outcome = "aborted"
        else:
            left = outcomes & {"abort", ""} or len(self.traces) < self.sequences
            self.outcome = "client gone" if left else "finished"
        self.left_out = max(0, len(self.traces) - SEQUENCES_KEPT)
        del self.traces[SEQUENCES_KEPT:]


def _asked(plan: Plan) -> dict[str, Any]:
    """Return parameters that all sequences share, without texts: a constraint may be long, a stop string private."""
    sampling = plan.prompts[0].sampling
    constraint = sampling.constraint
    return {
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
