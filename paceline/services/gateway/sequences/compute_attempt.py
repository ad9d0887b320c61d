"""One attempt at work that needs no decoding. It is one call to one worker.

Run ─▶ Opened ─▶ PromptLogprobs… ─▶ Computed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from paceline.core.telemetry import trace_headers
from paceline.core.types import FinishReason
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.routing.candidates import Placement
from paceline.services.gateway.sequences.attempt import Ended, Event, scores_of
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.encode_calls import AttemptMedia, EncodeCalls
from paceline.services.gateway.sequences.worker_call import (
    ADMIT_SECONDS,
    WorkerCall,
    WorkerFailedError,
    answer,
    out_of_turn,
)


class ComputeAttempt:
    """One attempt with the interface of `Attempt`. `close` must always be called."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        work: common_pb2.Work,
        *,
        seconds: float,
        stall_seconds: float,
        attempt_trace: AttemptTrace | None = None,
        media: AttemptMedia | None = None,
    ) -> None:
        member = placement.computing
        self._worker = fleet.worker(member.worker_id)
        self.decode = None if placement.decode is None else self._worker
        self.attempt_trace = attempt_trace or AttemptTrace()
        self.attempt_trace.ask(placement.decode, placement.prefill, work.key.attempt, len(work.token_ids))
        self._stall_seconds = stall_seconds
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(fleet.call(self._worker, len(work.token_ids)))
        stub = worker_pb2_grpc.ComputeStub(self._worker.channel)
        call = stub.Run(work, timeout=seconds, metadata=trace_headers())
        self._resources.callback(call.cancel)
        self._call = WorkerCall(call, self._worker, None)
        self._encoding: EncodeCalls | None = None
        if media is not None:
            patience = {"seconds": seconds, "stall_seconds": stall_seconds}
            self._encoding = EncodeCalls(fleet, media, work, **patience, attempt_trace=self.attempt_trace)
            self._resources.callback(self._encoding.close)

    async def admit(self) -> None:
        """Wait until the worker has accepted the work. Raises the errors of `Attempt.admit`, except NotCachedError."""
        event = await answer(self._read(ADMIT_SECONDS), self._worker)
        if not event.HasField("opened"):
            raise out_of_turn(self._worker)
        self.attempt_trace.cached_tokens = event.opened.cached_tokens
        if self._encoding is not None:
            self._encoding.start(self._worker, event.opened.cached_tokens, lambda _: self._call.cancel())

    async def run(self, take: Callable[[Event], object]) -> None:
        """Give events to `take`, Ended last. Raises the errors of `admit`, and the errors of `take`."""
        while True:
            event = await self._read(self._stall_seconds)
            match event.WhichOneof("event"):
                case "alive":
                    continue
                case "prompt_logprobs":
                    take(scores_of(event.prompt_logprobs))
                case "computed":
                    take(Ended(FinishReason.LENGTH))
                    return
                case _:
                    raise out_of_turn(self._worker)

    def leave(self) -> None:
        """Do nothing: a draining worker finishes this work, because another one would have to repeat most of it."""

    def close(self) -> None:
        """End the call, if it still runs."""
        self._resources.close()

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
