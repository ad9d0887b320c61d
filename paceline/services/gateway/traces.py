"""Records of what happened to a request, its sequences and their attempts, with the reports of workers.

Log lines, metrics and traces are made from them. All instants are of time.monotonic(), in seconds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline.core.media import MediaSpan
from paceline.core.numerics import Numerics, may_differ
from paceline.proto import worker_pb2
from paceline.services.common.registry import Member
from paceline.services.gateway.plan import Plan
from paceline.services.gateway.trace_facts import ChunkTotals, ChunkTrace, EncodingTrace, Gaps, WorkerName, gaps_of

ENCODINGS_KEPT = 32
"""Encodings of an attempt that are kept one by one; of later ones only the number is kept."""

REASONS_KEPT = 8
"""Largest number of different reasons of one wait. Further ones count as OTHER_REASONS."""

OTHER_REASONS = "other reasons"

_REASON_CHARACTERS = 300

SEQUENCES_KEPT = 100
"""Sequences of one request whose traces are kept after it has ended."""


@dataclass(slots=True)
class AttemptTrace:
    """One attempt, from its place in the queue to its end. Instants that have not come are None."""

    queued: float = field(default_factory=time.monotonic)
    ahead: int = 0
    """Sequences that waited already when this one joined the queue."""
    computed_with: Numerics | None = None
    """`SequenceTrace.computed_with` when this attempt began."""
    decoded_with: Numerics | None = None
    """`SequenceTrace.decoded_with` when this attempt began."""
    waited_for: Counter[str] = field(default_factory=Counter)
    """For each reason why the attempt was not admitted, how often it was the reason."""
    number: int = 0
    """`Key.attempt` of the attempt's messages and leases."""
    decode: WorkerName | None = None
    """The decode worker that was asked last, at `asked`. `prefill` was asked with it."""
    prefill: WorkerName | None = None
    asked: float | None = None
    admitted: float | None = None
    context_tokens: int = 0
    """Tokens of the prompt, and tokens that earlier attempts have generated."""
    cached_tokens: int = 0
    """Tokens of the context that the computing worker found cached on its host."""
    blocks: int = 0
    cached_blocks: int = 0
    encodings: list[EncodingTrace] = field(default_factory=list)
    """The first encodings, in the order of their ends."""
    encodings_left_out: int = 0
    chunks: ChunkTotals = field(default_factory=ChunkTotals)
    filled: float | None = None
    handed_over: float | None = None
    """When the gateway told the decode worker that the blocks are filled."""
    adopted: worker_pb2.Adopted | None = None
    effort: worker_pb2.Effort | None = None
    token_times: list[float] = field(default_factory=list)
    """When each message with tokens came; after `close` only the first two and the last."""
    tokens: int = 0
    scores: int = 0
    """Prompt tokens whose logprobs came."""
    gaps: Gaps | None = None
    """The gaps between `decode_times`; set by `close`."""
    failed: float | None = None
    failure: str = ""

    @property
    def decode_times(self) -> list[float]:
        """When each message with tokens came from the decode worker. A prefill worker sends the first one."""
        return self.token_times if self.prefill is None else self.token_times[1:]

    @property
    def decode_tokens(self) -> int:
        return self.tokens if self.prefill is None else max(0, self.tokens - 1)

    @property
    def worker_ids(self) -> tuple[str, str]:
        """Ids of the prefill and the decode worker; "" if there is none."""
        return self.prefill.worker if self.prefill else "", self.decode.worker if self.decode else ""

    @property
    def numerics_changes(self) -> dict[str, str]:
        """The numerics before this attempt and now, for "prefill" and "decode" if they are not the same."""
        computing = ("prefill", self.computed_with, self.prefill or self.decode)
        return {
            step: f"{before} before, {worker.numerics or 'unknown'} now"
            for step, before, worker in (computing, ("decode", self.decoded_with, self.decode))
            if worker is not None and may_differ(before, worker.numerics)
        }

    def wait_for(self, reason: str) -> None:
        """Record why the attempt was not admitted just now."""
        reason = reason[:_REASON_CHARACTERS]
        if reason not in self.waited_for and len(self.waited_for) >= REASONS_KEPT:
            reason = OTHER_REASONS
        self.waited_for[reason] += 1

    def ask(self, decode: Member | None, prefill: Member | None, number: int, context_tokens: int) -> None:
        """Record that these workers are asked to admit the attempt."""
        self.asked = time.monotonic()
        self.decode = None if decode is None else WorkerName.of(decode)
        self.prefill = None if prefill is None else WorkerName.of(prefill)
        self.number, self.context_tokens = number, context_tokens

    def reserve(self, admitted: worker_pb2.Admitted) -> None:
        """Record that the decode worker has room. The attempt is `admitted` when the prefill worker admits it, too."""
        self.cached_tokens = admitted.cached_tokens
        self.blocks, self.cached_blocks = admitted.blocks, admitted.cached_blocks

    def take(self, report: worker_pb2.Report, worker_id: str) -> None:
        """Add a worker's report on its part of the attempt."""
        now = time.monotonic()
        for chunk in report.chunks:
            self.chunks.add(ChunkTrace(now, worker_id, chunk.first, chunk.tokens, chunk.step_ms / 1000))
        # Copies, because a part of a message keeps the whole message in memory.
        if report.HasField("adopted"):
            self.adopted = worker_pb2.Adopted()
            self.adopted.CopyFrom(report.adopted)
        if report.HasField("effort"):
            self.effort = worker_pb2.Effort()
            self.effort.CopyFrom(report.effort)

    def add_encoding(
        self, span: MediaSpan, worker: Member, began: float, encoded: worker_pb2.Encoded, bytes_moved: int
    ) -> None:
        """Record that the worker that computes the prompt has an encoding now."""
        if len(self.encodings) >= ENCODINGS_KEPT:
            self.encodings_left_out += 1
            return
        times = encoded.queue_ms / 1000, encoded.encode_ms / 1000
        place = worker.worker_id, span.kind.value, span.length, encoded.cached
        self.encodings.append(EncodingTrace(began, time.monotonic(), *place, *times, encoded.bytes, bytes_moved))

    def fail(self, reason: str) -> None:
        self.failed, self.failure = time.monotonic(), reason[:_REASON_CHARACTERS]

    def close(self) -> None:
        """Record the end: keep only a few of the token times, and their gaps as percentiles."""
        self.gaps = gaps_of(self.decode_times)
        if len(self.token_times) > 3:
            self.token_times = [*self.token_times[:2], self.token_times[-1]]


@dataclass(slots=True)
class SequenceTrace:
    """The record of one sequence: its attempts and its end."""

    index: int = 0
    """Index of the sequence among the request's choices."""
    prompt_tokens: int = 0
    max_tokens: int = 0
    arrived: float = field(default_factory=time.monotonic)
    tries: list[AttemptTrace] = field(default_factory=list)
    """All attempts in order; the last one may not have been admitted."""
    ended: float | None = None
    outcome: str = ""
    """The finish reason, "abort" or "error"; empty while the sequence runs."""
    why: str = ""
    """More about the end, for people to read."""
    generated_tokens: int = 0

    @property
    def admitted(self) -> float | None:
        """When the first attempt was admitted."""
        return next((attempt.admitted for attempt in self.tries if attempt.admitted is not None), None)

    @property
    def attempts(self) -> int:
        """Number of attempts that workers admitted."""
        return sum(attempt.admitted is not None for attempt in self.tries)

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
    def decoded_with(self) -> Numerics | None:
        """Numerics of the decode worker that sent the newest tokens; None if none did, or if unknown."""
        decoding = (attempt.decode for attempt in reversed(self.tries) if attempt.decode_tokens)
        return next((worker.numerics for worker in decoding if worker is not None), None)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first attempt found in the cache."""
        return next((attempt.cached_tokens for attempt in self.tries if attempt.admitted is not None), 0)

    @property
    def token_times(self) -> list[float]:
        """When each message with tokens came."""
        return list(itertools.chain.from_iterable(attempt.token_times for attempt in self.tries))

    @property
    def handed_over(self) -> float | None:
        """When a decode worker was last told that the blocks are filled."""
        told = (attempt.handed_over for attempt in reversed(self.tries))
        return next((instant for instant in told if instant is not None), None)

    @property
    def workers(self) -> tuple[str, str]:
        """Ids of the prefill and decode worker that admitted it last; "" if there is none."""
        taken = [attempt for attempt in self.tries if attempt.admitted is not None]
        return taken[-1].worker_ids if taken else ("", "")

    def end(self, outcome: str, why: str, generated_tokens: int) -> None:
        """Record the end. Call this after everything that reads `token_times`, because it drops most of them."""
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
    records: list[SequenceTrace] = field(default_factory=list)
    """Traces of sequences that have begun, in the order of their beginning."""
    left_out: int = 0
    """Number of sequences whose traces were dropped at the end."""
    ended: float | None = None
    outcome: str = ""
    """One of "finished", "failed", "aborted" and "client gone"; empty while it runs."""
    is_aborted: bool = False
    """Whether it was ended by its id."""

    @staticmethod
    def of(
        plan: Plan,
        request_id: str,
        own_id: str,
        endpoint: str,
        arrived: float,
        streamed: bool,
        owner: str = "",
        model: str = "",
    ) -> RequestTrace:
        """Return the trace of a request that is about to run. `arrived` is on time.monotonic()."""
        return RequestTrace(
            request_id=request_id,
            own_id=own_id,
            session_id=plan.session_id,
            endpoint=endpoint,
            streamed=streamed,
            asked=_asked(plan),
            sequences=len(plan.prompts) * plan.n,
            owner=owner,
            model=model,
            arrived=arrived,
        )

    def sequence_id(self, index: int) -> str:
        """Return the id by which workers know a sequence, in the keys of leases and in logs."""
        return self.own_id if self.sequences == 1 else f"{self.own_id}-{index}"

    def begin(self, index: int, prompt_tokens: int, max_tokens: int) -> SequenceTrace:
        """Record that a sequence begins. Returns its trace, which is filled in while it runs."""
        record = SequenceTrace(index, prompt_tokens, max_tokens)
        self.records.append(record)
        return record

    def end(self) -> None:
        """Record the end of the request. All sequences that have begun must have ended."""
        outcomes = {record.outcome for record in self.records}
        self.ended = time.monotonic()
        if "error" in outcomes:
            self.outcome = "failed"
        elif self.is_aborted:
            self.outcome = "aborted"
        else:
            left = outcomes & {"abort", ""} or len(self.records) < self.sequences
            self.outcome = "client gone" if left else "finished"
        self.left_out = max(0, len(self.records) - SEQUENCES_KEPT)
        del self.records[SEQUENCES_KEPT:]


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
