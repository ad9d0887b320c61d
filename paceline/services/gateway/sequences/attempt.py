"""One attempt to generate: a call to a decode worker, a call to a prefill worker, and their events in order.

    decode:   Admit ─▶ Admitted ───────────────(Handoff | PrefillHere)─▶ Tokens… ─▶ Finished
    prefill:                    Run ─▶ Opened ─▶ PromptLogprobs… ─▶ FirstToken ─▶ Filled

If the two workers are on different hosts, the gateway sends Fetch to the decode worker after Opened, so that blocks are
moved while the prompt is computed. A worker sends Alive regularly while a request waits there. So a worker counts as
failed only if it sends nothing for longer than that. When one call fails, the other call is cancelled at once.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable

from paceline.core.adapters import short_digest
from paceline.core.errors import PacelineError
from paceline.core.telemetry import trace_headers
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.wire import reason_from_pb, token_from_pb
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.routing.candidates import Link, Placement
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.encode_calls import AttemptMedia, EncodeCalls
from paceline.services.gateway.sequences.progress import Ended, Event, Generated, HandedOver, PromptScores
from paceline.services.gateway.sequences.worker_call import (
    ADMIT_SECONDS,
    DecodeCall,
    WorkerCall,
    WorkerFailedError,
    answer,
    out_of_turn,
)


class NotCachedError(PacelineError):
    """A decode worker has too few tokens of the prompt cached to compute the rest itself."""

    def __init__(self, worker: RemoteWorker, cached_tokens: int) -> None:
        super().__init__(f"{worker} has only {cached_tokens} tokens cached")
        self.worker = worker
        self.cached_tokens = cached_tokens


class AnyAttempt(abc.ABC):
    """One attempt at work of any kind. Call `admit`, then `run`; call `close` at the end in any case.

    Args:
        placement: the workers, and the host from which the computing worker first fetches a prefix.
        seconds: longest duration of each call to a worker, in seconds.
        stall_seconds: seconds without a message after which a worker counts as failed.
        attempt_trace: the trace to which the workers' reports are added.
        media: the encoder's inputs; None if the context has no spans of media.
    """

    decode: RemoteWorker | None
    """The decode worker; None if the work needs no decoding."""

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
        self.attempt_trace = attempt_trace or AttemptTrace()
        self.attempt_trace.ask(placement.decode, placement.prefill, work.key.attempt, tokens_of(work))
        self._work = work
        self._seconds = seconds
        self._stall_seconds = stall_seconds
        self._fleet = fleet
        self._resources = contextlib.ExitStack()
        self._encoding: EncodeCalls | None = None
        if media is not None:
            patience = {"seconds": seconds, "stall_seconds": stall_seconds}
            self._encoding = EncodeCalls(fleet, media, work, **patience, attempt_trace=self.attempt_trace)
            self._resources.callback(self._encoding.close)
        self._prepare(placement)

    @abc.abstractmethod
    def _prepare(self, placement: Placement) -> None:
        """Look up the workers of a placement, and count a call of this gateway at each worker until `close`."""

    @abc.abstractmethod
    async def admit(self) -> None:
        """Wait until workers have accepted the work.

        Raises:
            WorkerBusyError: a worker has no room.
            WorkerFailedError: a worker failed.
            InvalidRequestError: a worker can never serve this request.
        """

    @abc.abstractmethod
    async def run(self, take: Callable[[Event], object]) -> None:
        """Call `take` with each event; the last one is Ended. Raises the errors of `admit` and of `take`."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Make `run` raise WorkerDrainingError soon, because a worker drains. Work that is better finished goes on."""

    def close(self) -> None:
        """End all calls that still run."""
        self._resources.close()


class Attempt(AnyAttempt):
    """One attempt to generate tokens, on a decode worker and perhaps a prefill worker."""

    decode: RemoteWorker

    def _prepare(self, placement: Placement) -> None:
        assert placement.decode is not None
        fleet, work = self._fleet, self._work
        self.decode = decode = fleet.worker(placement.decode.worker_id)
        self.prefill = prefill = None if placement.prefill is None else fleet.worker(placement.prefill.worker_id)
        self._source = fleet.host(placement.source)
        self._least_cached_tokens = placement.least_cached_tokens
        self._prefill_work = self._resources.enter_context(contextlib.ExitStack())
        """Counts the call at the prefill worker. It is closed when this worker is done with the request, and so has
        room for another one."""
        self._decode_call = DecodeCall(decode, self._link, self._stall_seconds)
        self._resources.callback(self._decode_call.close)
        self._prefill_call: WorkerCall | None = None
        """The call to the prefill worker; None before `admit` starts it and after the handoff."""
        self._first: worker_pb2.FirstToken | None = None
        left, adapter = len(work.token_ids) - placement.cached_tokens, short_digest(work.adapter.digest)
        calling = fleet.call(decode, left if prefill is None else 0, adapter)
        self._prompt_computed = self._resources.enter_context(calling)
        if prefill is not None:
            self._prefill_work.enter_context(fleet.call(prefill, left, adapter))

    async def admit(self) -> None:
        """Reserve room on the decode worker, and start the prefill.

        Raises the errors of `AnyAttempt.admit`. Raises NotCachedError if the decode worker has room, but too few cached
        tokens to compute the rest of the prompt itself.
        """
        asking = self._decode_call.admit(self._work_for(self.decode, computes=self._link is None), self._seconds)
        admitted = await answer(asking, self.decode)
        if admitted.cached_tokens < self._least_cached_tokens:
            raise NotCachedError(self.decode, admitted.cached_tokens)
        self.attempt_trace.reserve(admitted)
        self._note_prefix(self.decode, admitted.prefix_failed)
        if self.prefill is None:
            await self._decode_call.tell(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
            if self._encoding is not None:
                self._encoding.start(self.decode, admitted.cached_tokens, self._decode_call.fail)
        else:
            await self._start_prefill(self.prefill, admitted.key)

    async def _start_prefill(self, worker: RemoteWorker, key: common_pb2.Key) -> None:
        work = self._work_for(worker, computes=self._link is not None)
        work.key.CopyFrom(key)
        call = worker_pb2_grpc.PrefillStub(worker.channel).Run(
            worker_pb2.PrefillRequest(work=work, host_id=self.decode.member.host_id),
            timeout=self._seconds,
            metadata=trace_headers(),
        )
        self._prefill_call = WorkerCall(call, worker, self._link)
        self._resources.callback(call.cancel)
        self._decode_call.when_ended(call.cancel)
        event = await answer(self._read_prefill(self._prefill_call, ADMIT_SECONDS), worker)
        if not event.HasField("opened"):
            raise out_of_turn(worker)
        self.attempt_trace.cached_tokens = event.opened.cached_tokens
        self._note_prefix(worker, event.opened.prefix_failed)
        if self._link is not None:
            fetch = worker_pb2.Fetch(key=event.opened.key, source=event.opened.source)
            await self._decode_call.tell(worker_pb2.DecodeCommand(fetch=fetch))
        if self._encoding is not None:
            self._encoding.start(worker, event.opened.cached_tokens, lambda _: call.cancel())

    def _work_for(self, worker: RemoteWorker, computes: bool) -> common_pb2.Work:
        """Return the work for one worker. If `computes`, the work names the host from which to fetch a prefix.

        `computes` is true if the prompt is computed into the arena of the worker's host.
        """
        work = common_pb2.Work()
        work.CopyFrom(self._work)
        work.worker_epoch = worker.member.epoch
        if computes and self._source is not None:
            work.prefix_source = self._source.member.address
        return work

    def _note_prefix(self, worker: RemoteWorker, failed: bool) -> None:
        if failed and self._source is not None:
            self._fleet.avoid_link((self._source.member.host_id, worker.member.host_id))

    async def run(self, take: Callable[[Event], object]) -> None:
        """Call `take` with each event; the last one is Ended.

        Raises the errors of `admit` and of `take`, and WorkerDrainingError after `leave`.
        """
        event: Event | None = None
        while (prefill := self._prefill_call) is not None and not isinstance(event, Ended):
            if (event := await self._next_of_prefill(prefill)) is not None:
                take(event)
        if isinstance(event, Ended):
            return

        def deliver(event: Event) -> None:
            self._prompt_computed()
            take(event)

        self._decode_call.divert(lambda tokens: deliver(Generated(tokens)))
        while not isinstance(event, Ended):
            if (event := await self._next_of_decode()) is not None:
                deliver(event)
        await self._decode_call.wait_until_ended()  # to close at once would make the worker count an abort

    def leave(self) -> None:
        """Make `run` raise WorkerDrainingError after the events that have come, but only once the handoff is done."""
        self._decode_call.leave()

    async def _next_of_prefill(self, call: WorkerCall) -> Event | None:
        if self._first is not None and (reason := reason_from_pb(self._first.finish_reason)):
            self._prefill_work.close()
            return Ended(reason)
        event = await self._read_prefill(call, self._stall_seconds)
        match event.WhichOneof("event"):
            case "alive":
                return None
            case "prompt_logprobs":
                return scores_of(event.prompt_logprobs)
            case "first_token" if self._first is None:
                self._first = event.first_token
                return Generated([token_from_pb(event.first_token.token)])
            case "filled" if self._first is not None:
                self.attempt_trace.filled = time.monotonic()
                self._prefill_work.close()
                handoff = worker_pb2.Handoff(key=event.filled.key, first_token_id=self._first.token.id)
                await self._decode_call.tell(worker_pb2.DecodeCommand(handoff=handoff))
                self._prefill_call = None
                return HandedOver()
        raise out_of_turn(call.worker)

    async def _next_of_decode(self) -> Event | None:
        event = await self._decode_call.next()
        if isinstance(event, list):
            return Generated(event)
        if event.HasField("report"):
            self.attempt_trace.take(event.report, self.decode.member.worker_id)
        match event.WhichOneof("event"):
            case "tokens" if event.tokens.tokens:
                return Generated([token_from_pb(token) for token in event.tokens.tokens])
            case "alive":
                return None
            case "prompt_logprobs":
                return scores_of(event.prompt_logprobs)
            case "finished" if reason := reason_from_pb(event.finished.reason):
                return Ended(reason)
            case None:
                raise await self._decode_call.error()
        raise out_of_turn(self.decode)

    async def _read_prefill(self, call: WorkerCall, seconds: float) -> worker_pb2.PrefillEvent:
        try:
            event: worker_pb2.PrefillEvent = await call.read(seconds)
        except WorkerFailedError:
            if self._encoding is not None and self._encoding.error is not None:
                raise self._encoding.error from None  # it has cancelled this call
            if self._decode_call.has_ended:
                # The decode call failed first and cancelled this one, so its error is the cause.
                raise await self._decode_call.error() from None
            raise
        if event.HasField("report"):
            self.attempt_trace.take(event.report, call.worker.member.worker_id)
        return event

    @property
    def _link(self) -> Link | None:
        """The host that blocks have to be moved from and the host they go to; None if the workers share a host."""
        if self.prefill is None or self.prefill.member.host_id == self.decode.member.host_id:
            return None
        return self.prefill.member.host_id, self.decode.member.host_id


def tokens_of(work: common_pb2.Work) -> int:
    """Return the number of tokens of a work's context, or of all inputs that it pools."""
    return len(work.token_ids) + sum(len(each.token_ids) for each in work.pool.inputs)


def scores_of(message: common_pb2.PromptLogprobs) -> PromptScores:
    """Convert a worker's message with prompt logprobs to an event."""
    return PromptScores(message.first, [token_from_pb(token) for token in message.tokens])
