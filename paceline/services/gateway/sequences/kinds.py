"""Kinds of work, such as generating: how each kind is placed and run. A new kind needs an entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.core.adapters import short_digest
from paceline.core.telemetry import trace_headers
from paceline.core.types import FinishReason
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.pool_wire import FLOAT_BYTES
from paceline.services.gateway.planning.plan import Kind
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement
from paceline.services.gateway.routing.router import place, place_computing, place_computing_in_turn, place_in_turn
from paceline.services.gateway.sequences.attempt import AnyAttempt, Attempt, scores_of, tokens_of
from paceline.services.gateway.sequences.progress import Ended, Event, PooledRows
from paceline.services.gateway.sequences.worker_call import (
    ADMIT_SECONDS,
    WorkerCall,
    WorkerFailedError,
    answer,
    out_of_turn,
)


class ComputeAttempt(AnyAttempt):
    """One attempt at work that needs no decoding. It consists of one call to one worker.

    Run ─▶ Opened ─▶ (PromptLogprobs | Pooled)… ─▶ Computed
    """

    def _prepare(self, placement: Placement) -> None:
        self._worker = worker = self._fleet.worker(placement.computing.worker_id)
        self.decode = None if placement.decode is None else worker
        adapter = short_digest(self._work.adapter.digest)
        self._resources.enter_context(self._fleet.call(worker, tokens_of(self._work), adapter))
        stub = worker_pb2_grpc.ComputeStub(worker.channel)
        call = stub.Run(self._work, timeout=self._seconds, metadata=trace_headers())
        self._resources.callback(call.cancel)
        self._call = WorkerCall(call, worker, None)
        self._left = set(range(len(self._work.pool.inputs)))
        """Inputs whose results have not come."""

    async def admit(self) -> None:
        event = await answer(self._read(ADMIT_SECONDS), self._worker)
        if not event.HasField("opened"):
            raise out_of_turn(self._worker)
        self.attempt_trace.cached_tokens = event.opened.cached_tokens
        if self._encoding is not None:
            self._encoding.start(self._worker, event.opened.cached_tokens, lambda _: self._call.cancel())

    async def run(self, take: Callable[[Event], object]) -> None:
        while True:
            event = await self._read(self._stall_seconds)
            match event.WhichOneof("event"):
                case "alive":
                    continue
                case "prompt_logprobs":
                    take(scores_of(event.prompt_logprobs))
                case "pooled":
                    take(self._rows_of(event.pooled))
                case "computed" if not self._left:
                    take(Ended(FinishReason.LENGTH))
                    return
                case _:
                    raise out_of_turn(self._worker)

    def _rows_of(self, message: worker_pb2.Pooled) -> PooledRows:
        """Convert a message. Raises WorkerFailedError if its results are not those of inputs that are still missing."""
        inputs = range(message.first, message.first + len(message.rows))
        errors = {error.input: error.message for error in message.errors}
        rows_fit = not any(rows for index, rows in zip(inputs, message.rows) if index in errors)
        size = FLOAT_BYTES * message.dim * sum(message.rows)
        if not inputs or not self._left.issuperset(inputs) or not rows_fit or size != len(message.data):
            raise out_of_turn(self._worker)
        self._left.difference_update(inputs)
        return PooledRows(inputs, tuple(message.rows), message.dim, message.data, errors)

    def leave(self) -> None:
        """Do nothing: a draining worker finishes this work. Another worker would have to repeat nearly all of it."""

    async def _read(self, seconds: float) -> worker_pb2.ComputeEvent:
        try:
            event: worker_pb2.ComputeEvent = await self._call.read(seconds)
        except WorkerFailedError:
            if self._encoding is not None and self._encoding.error is not None:
                raise self._encoding.error from None  # it has cancelled this call
            raise
        if event.HasField("report"):
            self.attempt_trace.take(event.report, self._worker.member.worker_id)
        return event


@dataclass(frozen=True, slots=True)
class KindOfWork:
    """The functions with which the gateway places and runs one kind of work."""

    place: Callable[[Need, Iterable[Candidate]], Placement | None]
    """A function that returns the cheapest placement; None if no worker can take the work now."""
    place_in_turn: Callable[[Need, Iterable[Candidate], int], Placement | None]
    """A function that returns placements in rotation, for round-robin; its last argument is the number of the turn."""
    attempt: type[AnyAttempt]
    decodes: bool
    """Whether this kind of work needs a decode worker."""


KINDS: dict[Kind, KindOfWork] = {
    common_pb2.WORK_KIND_GENERATE: KindOfWork(place, place_in_turn, Attempt, decodes=True),
    common_pb2.WORK_KIND_SCORE: KindOfWork(place_computing, place_computing_in_turn, ComputeAttempt, decodes=False),
    common_pb2.WORK_KIND_POOL: KindOfWork(place_computing, place_computing_in_turn, ComputeAttempt, decodes=False),
}
