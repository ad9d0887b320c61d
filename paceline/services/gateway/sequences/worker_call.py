"""Calls to workers. gRPC errors are converted to errors of the gateway, and a long silence of a worker is an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from paceline.core.errors import (
    BusyError,
    DrainingError,
    InvalidRequestError,
    PacelineError,
    RefusedError,
    StaleError,
    TransferError,
    UnavailableError,
    UntrustedError,
)
from paceline.core.telemetry import trace_headers
from paceline.core.types import Token
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc import is_serving
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import StallWatch, end_tasks, heeding_cancellation, is_cancelled, own_cancellation
from paceline.services.gateway.fleet.event_feed import FeedError, Inbox
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.routing.candidates import Link

ADMIT_SECONDS = 10.0
"""Deadline of a worker's answer to an admission, in seconds. The worker computes nothing before it answers."""
QUIET_SECONDS = 1.0
"""Interval of health checks while a worker has not answered an admission, in seconds. Answers usually come within
milliseconds, but a healthy worker that reads a large grammar takes longer."""

Answer = TypeVar("Answer")


class WorkerFailedError(UnavailableError):
    """An attempt ended without a result. Another attempt may succeed.

    Args:
        unreachable: whether the worker itself seems to be gone; false if it answered with an error.
        link: the hosts between which blocks could not be moved; None if the failure has another reason.
        lost_blocks: whether the worker lost the request's blocks because the kvtransfer process of its host ended.
    """

    def __init__(
        self, message: str, worker: RemoteWorker, unreachable: bool, link: Link | None = None, lost_blocks: bool = False
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.unreachable = unreachable
        self.link = link
        self.lost_blocks = lost_blocks


class WorkerDrainingError(WorkerFailedError):
    """A worker drains, so it has refused an attempt, or the attempt leaves the worker. The sequence goes on elsewhere,
    and this does not count as a failure."""

    def __init__(self, worker: RemoteWorker) -> None:
        super().__init__(f"{worker} drains", worker, unreachable=False)


class WorkerBusyError(BusyError):
    """A worker has no room for this request now."""

    def __init__(self, message: str, worker: RemoteWorker) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerCall:
    """One gRPC call to a worker.

    Args:
        link: the hosts between which the worker moves blocks; None if it moves none. Named in errors of transfers.
    """

    def __init__(self, call: Any, worker: RemoteWorker, link: Link | None) -> None:
        self.worker = worker
        self.cancel: Callable[[], object] = call.cancel
        self._call = call
        self._link = link

    async def read(self, seconds: float | None) -> Any:
        """Return the next message. Raises WorkerFailedError, WorkerBusyError or InvalidRequestError.

        Args:
            seconds: longest wait for the message, in seconds; None for no limit.
        """
        try:
            async with asyncio.timeout(seconds):
                message = await reply_of(self._call.read(), self.worker, self._link)
        except TimeoutError:
            raise silence(self.worker, seconds) from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise WorkerFailedError(f"{self.worker} ended the call early", self.worker, True)
        return message

    async def write(self, message: Any) -> None:
        # If the call was cancelled before it began, gRPC would go on waiting for its beginning.
        writing = asyncio.ensure_future(self._call.write(message))
        self._call.add_done_callback(lambda _: writing.cancel())
        # If the call has failed already, `read` gives the better error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ADMIT_SECONDS):
                try:
                    await heeding_cancellation(writing)
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise


async def reply_of(reply: Awaitable[Answer], worker: RemoteWorker, link: Link | None) -> Answer:
    """Wait for a worker's reply. Raises WorkerFailedError, WorkerBusyError or InvalidRequestError.

    Args:
        link: the hosts between which the worker moves blocks; None if it moves none. Named in errors of transfers.
    """
    with own_cancellation(lambda: WorkerFailedError(f"{worker} cancelled the call", worker, True)):
        try:
            return await heeding_cancellation(reply)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, worker, link) from error


def _error_of(error: grpc.aio.AioRpcError, worker: RemoteWorker, link: Link | None) -> PacelineError:
    mapped = unmapped_error(error, str(worker))
    if isinstance(mapped, InvalidRequestError):
        return mapped
    if isinstance(mapped, BusyError):
        return WorkerBusyError(str(mapped), worker)
    if isinstance(mapped, DrainingError):
        worker.note_draining()  # Redis may not have said so yet
        return WorkerDrainingError(worker)
    moved = link if isinstance(mapped, TransferError) else None
    elsewhere = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
    lost_blocks = isinstance(mapped, StaleError)
    reason = f"{worker} lost the blocks of the request" if lost_blocks else str(mapped)
    return WorkerFailedError(reason, worker, error.code() in elsewhere, moved, lost_blocks)


async def answer(asking: Coroutine[Any, Any, Answer], worker: RemoteWorker) -> Answer:
    """Wait for a worker's answer to an admission, and return it. Raises WorkerFailedError, and the errors of `asking`.

    A worker that hangs (stopped, swapped out, its machine gone) counts as failed as soon as it misses a health check,
    because other requests wait for this answer and another worker may have room for this request.
    """
    answer = asyncio.create_task(asking)
    try:
        while not (await asyncio.wait((answer,), timeout=QUIET_SECONDS))[0]:
            try:
                serves = await is_serving(worker.channel, worker.member.worker_id)
            except (RefusedError, UntrustedError) as error:
                raise WorkerFailedError(str(error), worker, True) from error
            if not serves and not answer.done():
                raise WorkerFailedError(f"{worker} hangs: it does not answer health checks", worker, True)
        return await answer
    finally:
        await end_tasks(answer)
        del answer  # the traceback of its error has this frame


def silence(worker: RemoteWorker, seconds: float | None) -> WorkerFailedError:
    return WorkerFailedError(f"{worker} was silent for {seconds:g} seconds", worker, True)


def out_of_turn(worker: RemoteWorker) -> WorkerFailedError:
    return WorkerFailedError(f"{worker} sent a message out of turn", worker, False)


ENDING_SECONDS = 1.0
"""Longest time between a call's last event and its end, whichever comes first, in seconds."""


class DecodeCall:
    """A call to a decode worker, with the inbox of its events. Call `close` at the end in any case.

    `admit` and `next` raise WorkerFailedError, WorkerBusyError or InvalidRequestError.

    Args:
        link: the hosts between which the worker moves blocks; None if it moves none. Named in errors of transfers.
        stall_seconds: seconds without an answer or an event after which the worker counts as failed.
    """

    def __init__(self, worker: RemoteWorker, link: Link | None, stall_seconds: float) -> None:
        self._worker = worker
        self._link = link
        self._stall_seconds = stall_seconds
        self._resources = contextlib.ExitStack()
        # Nobody would notice a broken stream while the prompt is computed on another worker, because no task reads the
        # inbox then.
        self._inbox = inbox = Inbox(on_broken=self._resources.close)
        self._recipient = worker_pb2.Recipient()
        self._call: WorkerCall | None = None
        self._ending: asyncio.Task[object] | None = None
        self._watch = StallWatch(stall_seconds, lambda: inbox.put(silence(worker, stall_seconds)))

    async def admit(self, work: common_pb2.Work, seconds: float) -> worker_pb2.Admitted:
        """Begin the call and return the worker's answer to the admission.

        Args:
            seconds: longest duration of the whole call, in seconds.
        """
        patience = min(ADMIT_SECONDS, self._stall_seconds)
        try:
            async with asyncio.timeout(patience):
                self._recipient = await self._worker.feed.join(self._inbox)
        except TimeoutError:
            raise silence(self._worker, patience) from None
        except FeedError as error:
            raise WorkerFailedError(str(error), self._worker, True) from error
        stub = worker_pb2_grpc.DecodeStub(self._worker.channel)
        call = stub.Generate(timeout=seconds, metadata=trace_headers())  # type: ignore[call-arg]  # a wrong stub
        self._resources.callback(call.cancel)
        self._call = WorkerCall(call, self._worker, self._link)
        await self.tell(worker_pb2.DecodeCommand(admit=work, recipient=self._recipient))
        event: worker_pb2.DecodeEvent = await self._call.read(patience)
        if not event.HasField("admitted"):
            raise out_of_turn(self._worker)
        self._ending = asyncio.create_task(self._call.read(None))
        self._ending.add_done_callback(self._end)
        return event.admitted

    async def tell(self, command: worker_pb2.DecodeCommand) -> None:
        assert self._call is not None
        await self._call.write(command)

    def leave(self) -> None:
        """Make `next` raise WorkerDrainingError after the events that have come."""
        self._inbox.put(WorkerDrainingError(self._worker))

    def fail(self, error: Exception) -> None:
        """Make `next` raise this error after the events that have come."""
        self._inbox.put(error)

    def divert(self, take: Callable[[list[Token]], object]) -> None:
        """Call `take` with tokens as soon as they come, instead of keeping them for `next`, as `Inbox.divert` does."""
        watch = self._watch

        def heard(tokens: list[Token]) -> None:
            watch.begin()
            take(tokens)

        self._inbox.divert(heard)

    async def next(self) -> list[Token] | worker_pb2.DecodeEvent:
        """Return the next event. A list of tokens stands for an event that contains nothing but token ids."""
        if self._inbox.is_empty:
            self._watch.begin()
        event = await self._inbox.get()
        self._watch.end()
        if isinstance(event, FeedError):
            raise WorkerFailedError(str(event), self._worker, True) from event
        if isinstance(event, Exception):
            try:
                raise event
            finally:
                del event  # its traceback has this frame
        return event

    @property
    def has_ended(self) -> bool:
        """Whether the call has ended. `error` returns the reason why."""
        return self._ending is not None and self._ending.done()

    def when_ended(self, act: Callable[[], object]) -> None:
        """Call `act` when the call has ended. The call must have been admitted by `admit`."""
        assert self._ending is not None
        self._ending.add_done_callback(lambda _: act())

    async def error(self) -> BaseException:
        """Return the reason why the call has ended or is about to end."""
        await self.wait_until_ended()
        assert self._ending is not None
        ended = self._ending.done() and not self._ending.cancelled()
        return (ended and self._ending.exception()) or out_of_turn(self._worker)

    async def wait_until_ended(self) -> None:
        """Wait after the last event until the worker ends the call. Closing it before would count as an abort."""
        assert self._ending is not None
        await asyncio.wait((self._ending,), timeout=ENDING_SECONDS)

    def close(self) -> None:
        """End the call, if it still runs, and make `next` raise WorkerFailedError from now on."""
        self._watch.close()
        if self._ending is not None:
            self._ending.cancel()
        self._resources.close()
        self._worker.feed.leave(self._recipient)
        self._inbox.put(WorkerFailedError(f"the call to {self._worker} was cancelled", self._worker, True))

    def _end(self, ending: asyncio.Task[object]) -> None:
        """Make `next` fail, because the call has ended, after a delay in which the feed can deliver its last events."""
        if not ending.cancelled():
            error = ending.exception() or out_of_turn(self._worker)
            assert isinstance(error, Exception)
            asyncio.get_running_loop().call_later(ENDING_SECONDS, self._inbox.put, error)
