"""Single facts in the traces of requests. All instants are of time.monotonic(), in seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.numerics import Numerics
from paceline.services.common.registry import Member

CHUNKS_KEPT = 32
"""Chunks of an attempt that are kept one by one. Later ones only count in the totals."""


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
    """When the worker's report came."""
    worker: str
    first: int
    tokens: int
    step_seconds: float


class EncodingTrace(NamedTuple):
    """One encoding that a worker has computed or found for an attempt."""

    began: float
    """When the gateway asked for it. An instant, as `ended`."""
    ended: float
    """When the worker that computes the prompt had it."""
    worker: str
    kind: str
    tokens: int
    cached: bool
    """Whether the worker's host had it already."""
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
