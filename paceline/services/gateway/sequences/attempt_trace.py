"""The record of one attempt of a sequence, with the reports of its workers.

All instants are of time.monotonic(), in seconds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.media import MediaSpan
from paceline.core.numerics import Numerics, may_differ
from paceline.proto import worker_pb2
from paceline.services.common.registry import Member

CHUNKS_KEPT = 32
"""Largest number of chunks of an attempt that are recorded one by one. Later chunks only count in the totals."""
ENCODINGS_KEPT = 32
"""Largest number of encodings of an attempt that are recorded one by one. Later encodings are only counted."""

REASONS_KEPT = 8
"""Largest number of different reasons that are recorded for one wait. Further reasons count as OTHER_REASONS."""

OTHER_REASONS = "other reasons"

_REASON_CHARACTERS = 300


class WorkerName(NamedTuple):
    worker: str
    host: str
    numerics: Numerics | None
    """The worker's numerics; None if unknown."""
    weights: str = ""
    """The worker's weights, as in `Member.weights`; "" if unknown."""

    @staticmethod
    def of(member: Member) -> WorkerName:
        return WorkerName(member.worker_id, member.host_id, member.numerics, member.weights)


class ChunkTrace(NamedTuple):
    """One step of a worker that computed tokens [first, first + tokens) of the context."""

    at: float
    """Instant at which the worker's report arrived at the gateway."""
    worker: str
    first: int
    tokens: int
    step_seconds: float


class EncodingTrace(NamedTuple):
    """One encoding that a worker has computed or found for an attempt."""

    began: float
    """Instant at which the gateway asked for the encoding."""
    ended: float
    """Instant at which the worker that computes the prompt had received the encoding."""
    worker: str
    kind: str
    tokens: int
    cached: bool
    """Whether the host of `worker` had the encoding already."""
    queue_seconds: float
    encode_seconds: float
    bytes: int
    bytes_moved: int
    """Number of bytes that the worker that computes the prompt fetched from another host."""


class Gaps(NamedTuple):
    """Percentiles and maximum of the times between successive messages with tokens, in seconds."""

    p50: float
    p99: float
    longest: float


@dataclass(slots=True)
class ChunkTotals:
    """Totals of all chunks of an attempt, and the first chunks one by one."""

    count: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    began: float = 0.0
    """Instant at which the first chunk's step began: the time of its report minus the duration of the step."""
    ended: float = 0.0
    kept: list[ChunkTrace] = field(default_factory=list)

    def add(self, chunk: ChunkTrace) -> None:
        if not self.count:
            self.began = chunk.at - chunk.step_seconds
        self.count += 1
        self.tokens += chunk.tokens
        self.step_seconds += chunk.step_seconds
        self.ended = chunk.at
        if len(self.kept) < CHUNKS_KEPT:
            self.kept.append(chunk)


def gaps_of(times: Sequence[float]) -> Gaps | None:
    """Return figures of the gaps between sorted instants; None if there are fewer than two instants.

    Percentiles are by nearest rank.
    """
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    if not gaps:
        return None
    p50, p99 = (gaps[math.ceil(share * len(gaps)) - 1] for share in (0.5, 0.99))
    return Gaps(p50, p99, gaps[-1])


@dataclass(slots=True)
class AttemptTrace:
    """Record of one attempt, from its place in the queue to its end. Instants that have not come yet are None."""

    queued: float = field(default_factory=time.monotonic)
    ahead: int = 0
    """Number of sequences that were waiting when this sequence joined the queue."""
    computed_with: Numerics | None = None
    """Value of `SequenceTrace.computed_with` at the start of this attempt: numerics of the first results."""
    decoded_with: Numerics | None = None
    """Value of `SequenceTrace.decoded_with` at the start of this attempt: numerics of the newest tokens."""
    weights: str = ""
    """Value of `SequenceTrace.weights` at the start of this attempt."""
    waited_for: Counter[str] = field(default_factory=Counter)
    """How often the attempt was not admitted, by the reason."""
    number: int = 0
    """Number of the attempt in its sequence, from 1. It is `Key.attempt` in the attempt's messages and leases."""
    decode: WorkerName | None = None
    """The decode worker that was asked last. `prefill` is the prefill worker that was asked together with it."""
    prefill: WorkerName | None = None
    asked: float | None = None
    """Instant at which the last workers were asked: those that admitted the attempt or on which it ended. None if all
    workers had no room."""
    admitted: float | None = None
    context_tokens: int = 0
    """Number of tokens of the prompt, plus tokens that earlier attempts have generated."""
    cached_tokens: int = 0
    """Number of tokens of the context that the computing worker found cached on its host."""
    blocks: int = 0
    cached_blocks: int = 0
    encodings: list[EncodingTrace] = field(default_factory=list)
    """The first ENCODINGS_KEPT encodings, in the order in which they were completed."""
    encodings_left_out: int = 0
    chunks: ChunkTotals = field(default_factory=ChunkTotals)
    filled: float | None = None
    handed_over: float | None = None
    """Instant at which the gateway told the decode worker that the blocks are filled; None before the handoff."""
    adopted: worker_pb2.Adopted | None = None
    effort: worker_pb2.Effort | None = None
    token_times: list[float] = field(default_factory=list)
    """Instants at which messages with tokens arrived; after `close` only the first two and the last one."""
    token_counts: list[int] = field(default_factory=list)
    """Number of tokens in each message of `token_times`; empty after `close`."""
    tokens: int = 0
    scores: int = 0
    """Number of prompt tokens whose logprobs have come, or of pooled inputs whose results have come."""
    gaps: Gaps | None = None
    """Figures of the gaps between `decode_times`; None before `close`."""
    ended: float | None = None
    """Instant at which the attempt ended; None while it runs, and if it ended before any worker was asked."""
    outcome: str = ""
    """How the attempt ended: "finished", "failed" or "cancelled"; empty until its end."""
    failure: str = ""
    """Reason why the attempt failed or was cancelled; empty otherwise."""

    @property
    def decode_times(self) -> list[float]:
        """Instants at which tokens came from the decode worker; a first token from a prefill worker is left out."""
        return self.token_times if self.prefill is None else self.token_times[1:]

    @property
    def decode_tokens(self) -> int:
        return self.tokens if self.prefill is None else max(0, self.tokens - 1)

    @property
    def worker_ids(self) -> tuple[str, str]:
        """Ids of the prefill worker and the decode worker, in this order; "" for a worker that the attempt lacks."""
        return self.prefill.worker if self.prefill else "", self.decode.worker if self.decode else ""

    @property
    def numerics_changes(self) -> dict[str, str]:
        """Texts about numerics that differ from those of earlier attempts, under the keys "prefill" and "decode"."""
        computing = ("prefill", self.computed_with, self.prefill or self.decode)
        return {
            step: f"{before} before, {worker.numerics or 'unknown'} now"
            for step, before, worker in (computing, ("decode", self.decoded_with, self.decode))
            if worker is not None and may_differ(before, worker.numerics)
        }

    def wait_for(self, reason: str) -> None:
        """Record a reason why no worker has admitted the attempt, which goes on waiting."""
        self.asked = None
        reason = reason[:_REASON_CHARACTERS]
        if reason not in self.waited_for and len(self.waited_for) >= REASONS_KEPT:
            reason = OTHER_REASONS
        self.waited_for[reason] += 1

    def ask(self, decode: Member | None, prefill: Member | None, number: int, context_tokens: int) -> None:
        """Record that these workers are asked to admit the attempt.

        Args:
            number: number of the attempt in its sequence, from 1.
            context_tokens: number of tokens of the prompt, plus tokens that earlier attempts have generated.
        """
        self.asked = time.monotonic()
        self.decode = None if decode is None else WorkerName.of(decode)
        self.prefill = None if prefill is None else WorkerName.of(prefill)
        self.number, self.context_tokens = number, context_tokens

    def reserve(self, admitted: worker_pb2.Admitted) -> None:
        """Record that the decode worker has room. `admitted` stays None until the prefill worker admits it, too."""
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
        """Record an encoding that the worker that computes the prompt has just received.

        Args:
            worker: the worker that computed the encoding or had it cached.
            began: instant at which the gateway asked for the encoding.
            bytes_moved: bytes that the worker that computes the prompt fetched from another host.
        """
        if len(self.encodings) >= ENCODINGS_KEPT:
            self.encodings_left_out += 1
            return
        times = encoded.queue_ms / 1000, encoded.encode_ms / 1000
        place = worker.worker_id, span.kind.value, span.length, encoded.cached
        self.encodings.append(EncodingTrace(began, time.monotonic(), *place, *times, encoded.bytes, bytes_moved))

    def end(self, outcome: str, reason: str = "") -> None:
        """Record the attempt's end. Do nothing if it is recorded already or if no worker was asked."""
        if self.asked is not None and self.ended is None:
            self.ended, self.outcome, self.failure = time.monotonic(), outcome, reason[:_REASON_CHARACTERS]

    def close(self) -> None:
        """Set `gaps` from the token times, then drop nearly all of these times and the token counts to save memory."""
        self.gaps = gaps_of(self.decode_times)
        if len(self.token_times) > 3:
            self.token_times = [*self.token_times[:2], self.token_times[-1]]
        self.token_counts = []
