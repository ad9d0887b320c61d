"""One attempt at one request: the two calls that make it up, and what comes out of them in order.

    decode:   Admit ─▶ Admitted ───────────────(Handoff | PrefillHere)─▶ Tokens… ─▶ Finished
    prefill:                    Run ─▶ Opened ─▶ PromptLogprobs… ─▶ FirstToken ─▶ Filled

Where the two are on different hosts, decode is told with Fetch, behind Opened, to bring the blocks over meanwhile. A
worker says Alive from time to time while a request waits its turn there: only a longer silence is a failure. Both
calls are linked: when one fails, the other is cancelled at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from paceline.core.errors import (
    BusyError,
    InvalidRequestError,
    PacelineError,
    RefusedError,
    TransferError,
    UnavailableError,
)
from paceline.core.telemetry import trace_headers
from paceline.core.types import FinishReason, Token
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc import heeding_cancellation, is_cancelled, is_serving, unmapped_error
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire import reason_from_pb, token_from_pb
from paceline.services.gateway.fleet import Fleet, Worker
from paceline.services.gateway.record import AttemptRecord
from paceline.services.gateway.router import Link

ADMIT_SECONDS = 10.0
"""A worker answers an admission without computing anything, so a longer silence is a failure."""

QUIET_SECONDS = 1.0
"""Every so long without an answer the worker's health is asked. Most answer within milliseconds; one that reads a large
grammar takes longer, and is healthy."""

FAREWELL_SECONDS = 1.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of prompt tokens [first, first + len(tokens))."""

    first: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens that arrived together; at least one."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The prefill worker is done and the decode worker knows."""


@dataclass(frozen=True, slots=True)
class Ended:
    reason: FinishReason


Event = PromptScores | Generated | HandedOver | Ended


class WorkerFailedError(UnavailableError):
    """An attempt ended without a result; another one may succeed.

    `unreachable` says that the worker itself seems to be gone, rather than to have failed at this request. `link` names
    two hosts where it is between them that blocks did not get through.
    """

    def __init__(self, message: str, worker: Worker, unreachable: bool, link: Link | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.unreachable = unreachable
        self.link = link


class WorkerBusyError(BusyError):
    """A worker has no room for this request now."""

    def __init__(self, message: str, worker: Worker) -> None:
        super().__init__(message)
        self.worker = worker


class NotCachedError(PacelineError):
    """A decode worker was to compute the little that is not cached, and it is more: this is not the place."""

    def __init__(self, worker: Worker, cached_tokens: int) -> None:
        super().__init__(f"{worker} has only {cached_tokens} tokens cached")
        self.worker = worker
        self.cached_tokens = cached_tokens


class Attempt:
    """One attempt, from `admit` to `close`, which must always be called.

    Args:
        work: what to admit.
        source: kvtransfer from which whoever computes the prompt brings over a prefix first.
        cached_tokens: that this worker will probably find then.
        least_cached_tokens: see NotCachedError.
        seconds: longest life of the calls.
        stall_seconds: longest silence before a worker counts as failed.
        record: takes what workers report.
    """

    def __init__(
        self,
        fleet: Fleet,
        decode: Worker,
        prefill: Worker | None,
        work: common_pb2.Work,
        *,
        seconds: float,
        stall_seconds: float,
        record: AttemptRecord | None = None,
        source: Worker | None = None,
        cached_tokens: int = 0,
        least_cached_tokens: int = 0,
    ) -> None:
        self.decode = decode
        self.prefill = prefill
        self.record = record or AttemptRecord()
        self.record.ask(
            decode.member, prefill.member if prefill is not None else None, work.key.attempt, len(work.token_ids)
        )
        self._work = work
        self._seconds = seconds
        self._stall_seconds = stall_seconds
        self._links = fleet.links
        self._source = source
        self._least_cached_tokens = least_cached_tokens
        self._resources = contextlib.ExitStack()
        self._prefill_work = self._resources.enter_context(contextlib.ExitStack())
        """Open until the prefill worker is done with the request, which leaves its place to another one then."""
        self._decode_call: Any = None
        self._prefill_call: Any = None
        """Set until the handoff."""
        self._first: worker_pb2.FirstToken | None = None
        self._finished = False
        left = len(work.token_ids) - cached_tokens
        self._resources.enter_context(fleet.call(decode, left if prefill is None else 0))
        if prefill is not None:
            self._prefill_work.enter_context(fleet.call(prefill, left))

    async def admit(self) -> None:
        """Reserves room on the decode worker and starts the prefill.

        Raises:
            WorkerBusyError: there is no room.
            WorkerFailedError: the worker failed.
            InvalidRequestError: the worker can never serve this.
            NotCachedError: there is room, but this is not the place.
        """
        self._decode_call = worker_pb2_grpc.DecodeStub(self.decode.channel).Generate(  # type: ignore[call-arg]  # a wrong stub
            timeout=self._seconds, metadata=trace_headers()
        )
        self._resources.callback(self._decode_call.cancel)
        event = await self._answer(self._ask_decode(), self.decode)
        if not event.HasField("admitted"):
            raise self._out_of_turn(self.decode)
        if event.admitted.cached_tokens < self._least_cached_tokens:
            raise NotCachedError(self.decode, event.admitted.cached_tokens)
        self.record.reserve(event.admitted)
        self._note_prefix(self.decode, event.admitted.prefix_failed)
        if self.prefill is None:
            await self._command(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
        else:
            await self._start_prefill(event.admitted.key)

    async def _ask_decode(self) -> worker_pb2.DecodeEvent:
        await self._command(worker_pb2.DecodeCommand(admit=self._work_with_source(self._link is None)))
        event: worker_pb2.DecodeEvent = await self._read(
            self._decode_call, self.decode, min(ADMIT_SECONDS, self._stall_seconds)
        )
        return event

    async def _answer(self, asking: Coroutine[Any, Any, Answer], worker: Worker) -> Answer:
        """What a worker answers to an admission.

        One that stands still (stopped, swapped out, its machine gone) fails soon: others wait behind this request, and
        there may be room for it elsewhere.
        """
        answer = asyncio.create_task(asking)
        try:
            while not (await asyncio.wait((answer,), timeout=QUIET_SECONDS))[0]:
                try:
                    serves = await is_serving(worker.channel, worker.member.worker_id)
                except RefusedError as error:
                    raise WorkerFailedError(str(error), worker, True) from error
                if not serves and not answer.done():
                    raise WorkerFailedError(f"{worker} stands still: it does not answer", worker, True)
            return await answer
        finally:
            await end_tasks(answer)

    async def _start_prefill(self, key: common_pb2.Key) -> None:
        assert self.prefill is not None
        work = self._work_with_source(self._link is not None)
        work.key.CopyFrom(key)
        self._prefill_call = worker_pb2_grpc.PrefillStub(self.prefill.channel).Run(
            worker_pb2.PrefillRequest(work=work, host_id=self.decode.member.host_id),
            timeout=self._seconds,
            metadata=trace_headers(),
        )
        self._resources.callback(self._prefill_call.cancel)
        prefill_call = self._prefill_call
        self._decode_call.add_done_callback(lambda _: prefill_call.cancel())
        event = await self._answer(self._read_prefill(ADMIT_SECONDS), self.prefill)
        if not event.HasField("opened"):
            raise self._out_of_turn(self.prefill)
        self.record.cached_tokens = event.opened.cached_tokens
        self._note_prefix(self.prefill, event.opened.prefix_failed)
        if self._link is not None:
            fetch = worker_pb2.Fetch(key=event.opened.key, source=event.opened.source)
            await self._command(worker_pb2.DecodeCommand(fetch=fetch))

    def _work_with_source(self, computes: bool) -> common_pb2.Work:
        """What to admit; tells from where to fetch a prefix to the worker on whose host it is needed."""
        work = common_pb2.Work()
        work.CopyFrom(self._work)
        if computes and self._source is not None:
            work.prefix_source = self._source.member.address
        return work

    def _note_prefix(self, worker: Worker, failed: bool) -> None:
        if failed and self._source is not None:
            self._links.avoid((self._source.member.host_id, worker.member.host_id))

    async def next(self) -> Event:
        """What happens next. Raises what `admit` does. Behind Ended comes nothing."""
        event = None
        while event is None:
            event = await (self._next_of_decode() if self._prefill_call is None else self._next_of_prefill())
        return event

    async def farewell(self) -> None:
        """After Ended: lets a decode worker that has finished end its call itself; `close` would make it an abort."""
        if self._finished:
            with contextlib.suppress(WorkerFailedError, WorkerBusyError, InvalidRequestError):
                await self._read(self._decode_call, self.decode, FAREWELL_SECONDS)

    def close(self) -> None:
        """Ends whatever still runs."""
        self._resources.close()

    async def _next_of_prefill(self) -> Event | None:
        assert self.prefill is not None
        if self._first is not None and (reason := reason_from_pb(self._first.finish_reason)):
            self._prefill_work.close()
            return Ended(reason)
        event = await self._read_prefill(self._stall_seconds)
        match event.WhichOneof("event"):
            case "alive":
                return None
            case "prompt_logprobs":
                return _scores(event.prompt_logprobs)
            case "first_token" if self._first is None:
                self._first = event.first_token
                return Generated([token_from_pb(event.first_token.token)])
            case "filled" if self._first is not None:
                self.record.filled = time.monotonic()
                self._prefill_work.close()
                handoff = worker_pb2.Handoff(key=event.filled.key, first_token_id=self._first.token.id)
                await self._command(worker_pb2.DecodeCommand(handoff=handoff))
                self._prefill_call = None
                return HandedOver()
        raise self._out_of_turn(self.prefill)

    async def _next_of_decode(self) -> Event | None:
        event = await self._read(self._decode_call, self.decode, self._stall_seconds)
        match event.WhichOneof("event"):
            case "alive":
                return None
            case "tokens" if event.tokens.tokens:
                return Generated([token_from_pb(token) for token in event.tokens.tokens])
            case "prompt_logprobs":
                return _scores(event.prompt_logprobs)
            case "finished" if reason := reason_from_pb(event.finished.reason):
                self._finished = True
                return Ended(reason)
        raise self._out_of_turn(self.decode)

    async def _read_prefill(self, seconds: float) -> worker_pb2.PrefillEvent:
        assert self.prefill is not None
        try:
            event: worker_pb2.PrefillEvent = await self._read(self._prefill_call, self.prefill, seconds)
        except WorkerFailedError:
            if self._decode_call.done():
                # That is why the prefill was cancelled; reading the decode call tells what happened.
                await self._read(self._decode_call, self.decode, seconds)
                raise self._out_of_turn(self.decode) from None
            raise
        return event

    async def _command(self, command: worker_pb2.DecodeCommand) -> None:
        # A call that has failed already says so better when it is read.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ADMIT_SECONDS):
                try:
                    await heeding_cancellation(self._decode_call.write(command))
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise

    async def _read(self, call: Any, worker: Worker, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                message = await heeding_cancellation(call.read())
        except TimeoutError:
            raise WorkerFailedError(f"{worker} was silent for {seconds:g} seconds", worker, True) from None
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error, worker) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerFailedError(f"{worker} cancelled the call", worker, True) from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise WorkerFailedError(f"{worker} ended the call early", worker, True)
        if message.HasField("report"):
            self.record.take(message.report, worker.member.worker_id)
        return message

    @property
    def _link(self) -> Link | None:
        """From where to where blocks have to be moved."""
        if self.prefill is None or self.prefill.member.host_id == self.decode.member.host_id:
            return None
        return self.prefill.member.host_id, self.decode.member.host_id

    def _error_of(self, error: grpc.aio.AioRpcError, worker: Worker) -> PacelineError:
        mapped = unmapped_error(error, str(worker))
        if isinstance(mapped, InvalidRequestError):
            return mapped
        if isinstance(mapped, BusyError):
            return WorkerBusyError(str(mapped), worker)
        link = self._link if isinstance(mapped, TransferError) else None
        elsewhere = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        return WorkerFailedError(str(mapped), worker, error.code() in elsewhere, link)

    @staticmethod
    def _out_of_turn(worker: Worker) -> WorkerFailedError:
        return WorkerFailedError(f"{worker} said something that was not its turn to say", worker, False)


def _scores(message: common_pb2.PromptLogprobs) -> PromptScores:
    return PromptScores(message.first, [token_from_pb(token) for token in message.tokens])
