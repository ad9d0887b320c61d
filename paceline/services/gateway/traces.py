"""The lives of the newest requests, for who asks what became of one. In memory, bounded, of this gateway alone."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from paceline.services.gateway.plan import Plan
from paceline.services.gateway.record import RequestRecord

KEPT = 1000
"""Sequences of ended requests."""

KEPT_OF_ONE = 100
"""Sequences of one ended request."""

_CHOICE = re.compile(r"(.+)-(\d{1,9})")


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    """One request of a client: what it asked for, and what happened to each of its sequences. No text of anybody's."""

    request_id: str
    """What the client got; it may have chosen it, and have used it before."""
    own_id: str
    """Unique in the cluster; in the keys of holds and in logs of workers each of several sequences adds its index."""
    endpoint: str
    streamed: bool
    asked: dict[str, Any]
    """How tokens are to be chosen."""
    sequences: int
    arrived: float
    """On time.monotonic()."""
    clock: datetime = field(default_factory=lambda: datetime.now(UTC))
    records: list[RequestRecord] = field(default_factory=list)
    """Of sequences that have begun, in the order of their beginning."""
    left_out: int = 0
    ended: float | None = None
    outcome: str = ""
    """finished, failed or "client gone"; empty while it runs."""

    @staticmethod
    def of(plan: Plan, request_id: str, own_id: str, endpoint: str, arrived: float, streamed: bool) -> Trace:
        """A request that is about to run. `arrived` is on time.monotonic()."""
        return Trace(
            request_id=request_id,
            own_id=own_id,
            endpoint=endpoint,
            streamed=streamed,
            asked=_asked(plan),
            sequences=len(plan.prompts) * plan.n,
            arrived=arrived,
        )

    def sequence_id(self, index: int) -> str:
        """The id under which workers know a sequence."""
        return self.own_id if self.sequences == 1 else f"{self.own_id}-{index}"

    def begin(self, index: int, prompt_tokens: int, max_tokens: int) -> RequestRecord:
        """A sequence begins; who runs it fills in the record."""
        record = RequestRecord(index, prompt_tokens, max_tokens)
        self.records.append(record)
        return record

    def end(self) -> None:
        """All that has begun has ended."""
        outcomes = {record.outcome for record in self.records}
        self.ended = time.monotonic()
        if "error" in outcomes:
            self.outcome = "failed"
        else:
            left = outcomes & {"abort", ""} or len(self.records) < self.sequences
            self.outcome = "client gone" if left else "finished"
        self.left_out = max(0, len(self.records) - KEPT_OF_ONE)
        del self.records[KEPT_OF_ONE:]


class TraceBook:
    """Owns the traces of requests that run, and of those that ended last.

    Args:
        kept: sequences of ended requests, at most.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._by_id: dict[str, list[Trace]] = {}
        self._ended: deque[Trace] = deque()
        self._sequences = 0
        """Of ended requests."""
        self._running = 0
        self.idle = asyncio.Event()
        """Set while no request runs, or waits for its client to take what is there."""
        self.idle.set()

    def open(self, trace: Trace) -> None:
        self._running += 1
        self.idle.clear()
        for name in _names(trace):
            self._by_id.setdefault(name, []).append(trace)

    def close(self, trace: Trace) -> None:
        """The request has ended; the oldest ended ones make room for it."""
        trace.end()
        self._running -= 1
        if self._running == 0:
            self.idle.set()
        self._ended.append(trace)
        self._sequences += len(trace.records)
        # A request without any sequence takes room, too.
        while self._sequences > self._kept or len(self._ended) > self._kept:
            oldest = self._ended.popleft()
            self._sequences -= len(oldest.records)
            for name in _names(oldest):
                self._by_id[name].remove(oldest)
                if not self._by_id[name]:
                    del self._by_id[name]

    def find(self, name: str) -> Trace | None:
        """The newest request with this id: the client's, our own, or that of a sequence as workers know it."""
        if traces := self._by_id.get(name):
            return traces[-1]
        if (choice := _CHOICE.fullmatch(name)) is None:
            return None
        own_id, index = choice[1], int(choice[2])
        candidates = (trace for trace in self._by_id.get(own_id, []) if trace.own_id == own_id)
        return next((trace for trace in candidates if index < trace.sequences), None)

    def earlier(self, trace: Trace) -> list[Trace]:
        """Older requests of the client with the same id, the newest first."""
        traces = self._by_id.get(trace.request_id, [])
        return traces[: traces.index(trace)][::-1] if trace in traces else []


def _names(trace: Trace) -> set[str]:
    return {trace.request_id, trace.own_id}


def _asked(plan: Plan) -> dict[str, Any]:
    """What all sequences have in common, without a word of theirs: a constraint may be long, a stop string private."""
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
