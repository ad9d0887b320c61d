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
"""Chunks of an attempt that are kept one by one. Later ones only count in the totals."""
ENCODINGS_KEPT = 32
"""Encodings of an attempt that are kept one by one; of later ones only the number is kept."""

REASONS_KEPT = 8
"""Largest number of different reasons of one wait. Further ones count as OTHER_REASONS."""

OTHER_REASONS = "other reasons"

_REASON_CHARACTERS = 300


class WorkerName(NamedTuple):
    worker: str
    host: str
    numerics: Numerics | None
    """None if unknown."""
    weights: str = ""
    """See `Member.weights`."""

    @staticmethod
    def of(member: Member) -> WorkerName:
        return WorkerName(member.worker_id, member.host_id, member.numerics, member.weights)


class ChunkTrace(NamedTuple):
    """One step of a worker that computed tokens [first, first + tokens) of the context."""

    at: float
    """Instant at which the worker's report came."""
    worker: str
    first: int
    tokens: int
    step_seconds: float


class EncodingTrace(NamedTuple):
    """One encoding that a worker has computed or found for an attempt."""

    began: float
    """Instant at which the gateway asked for the encoding."""
    ended: float
    """Instant at which the worker that computes the prompt had the encoding."""
    worker: str
    kind: str
    tokens: int
    cached: bool
    """Whether the host of `worker` had the encoding already."""
    queue_seconds: float
    encode_seconds: float
    bytes: int
    bytes_moved: int
    """Bytes that the worker that computes the prompt fetched from another host."""


class Gaps(NamedTuple):
    """Times between two messages with tokens, in seconds."""

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
    """When the first chunk's step began, estimated from the time of its report."""
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
    """Return the gaps between sorted instants; None if there are fewer than two. Percentiles are by nearest rank."""
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    if not gaps:
        return None
    p50, p99 = (gaps[math.ceil(share * len(gaps)) - 1] for share in (0.5, 0.99))
    return Gaps(p50, p99, gaps[-1])


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
    weights: str = ""
    """`SequenceTrace.weights` when this attempt began."""
    waited_for: Counter[str] = field(default_factory=Counter)
    """For each reason why the attempt was not admitted, how often it was the reason."""
    number: int = 0
    """`Key.attempt` of the attempt's messages and leases."""
    decode: WorkerName | None = None
    """The decode worker that was asked last. `prefill` was asked with it."""
    prefill: WorkerName | None = None
    asked: float | None = None
    """When the workers were asked that admitted the attempt, or under which it ended. None if all had no room."""
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
    """Instant at which the gateway told the decode worker that the blocks are filled."""
    adopted: worker_pb2.Adopted | None = None
    effort: worker_pb2.Effort | None = None
    token_times: list[float] = field(default_factory=list)
    """When each message with tokens came; after `close` only the first two and the last."""
    token_counts: list[int] = field(default_factory=list)
    """Number of tokens in each message, until `close`."""
    tokens: int = 0
    scores: int = 0
    """Prompt tokens whose logprobs came."""
    gaps: Gaps | None = None
    """The gaps between `decode_times`; set by `close`."""
    ended: float | None = None
    """Instant at which the attempt ended. None before, and if it ended while no worker was asked."""
    outcome: str = ""
    """One of "finished", "failed" and "cancelled"; empty until the end."""
    failure: str = ""
    """Why it failed or was cancelled."""

    @property
    def decode_times(self) -> list[float]:
        """The instants at which tokens came from the decode worker. A prefill worker sends the first one."""
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
        """Record why no worker had room just now. So the attempt waits on."""
        self.asked = None
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

    def end(self, outcome: str, reason: str = "") -> None:
        """Record the end, unless it has come already or no worker has begun the attempt."""
        if self.asked is not None and self.ended is None:
            self.ended, self.outcome, self.failure = time.monotonic(), outcome, reason[:_REASON_CHARACTERS]

    def close(self) -> None:
        """Keep only a few of the token times, and their gaps as percentiles."""
        self.gaps = gaps_of(self.decode_times)
        if len(self.token_times) > 3:
            self.token_times = [*self.token_times[:2], self.token_times[-1]]
        self.token_counts = []
