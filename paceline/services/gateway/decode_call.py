"""An attempt on a decode worker: the call by which it is told what to do, and the events that come by its feed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.core.telemetry import trace_headers
from paceline.core.types import Token
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.gateway.event_feed import FeedError, Inbox
from paceline.services.gateway.fleet_worker import Worker
from paceline.services.gateway.router import Link
from paceline.services.gateway.stall_watch import StallWatch
from paceline.services.gateway.worker_call import (
    ADMIT_SECONDS,
    WorkerCall,
    WorkerFailedError,
    out_of_turn,
    silence,
)

FAREWELL_SECONDS = 1.0
"""Between the last event and the end of the call, whichever comes first."""


class DecodeCall:
    """Must always be closed. `admit` and `next` raise WorkerFailedError, WorkerBusyError or InvalidRequestError.

    Args:
        link: between which hosts a failed transfer was to go.
        stall_seconds: longest silence, of an admission and between events.
    """

    def __init__(self, worker: Worker, link: Link | None, stall_seconds: float) -> None:
        self._worker = worker
        self._link = link
        self._stall_seconds = stall_seconds
        self._inbox = Inbox(on_broken=self._abandon)
        self._recipient = worker_pb2.Recipient()
        self._call: WorkerCall | None = None
        self._ending: asyncio.Task[object] | None = None
        self._watch = StallWatch(stall_seconds, lambda: self._inbox.put(silence(worker, stall_seconds)))

    async def admit(self, work: common_pb2.Work, seconds: float) -> worker_pb2.Admitted:
        """Begins the call, which lives so long at most."""
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

    def divert(self, take: Callable[[list[Token]], object]) -> None:
        """See `Inbox.divert`."""

        def heard(tokens: list[Token]) -> None:
            self._watch.begin()
            take(tokens)

        self._inbox.divert(heard)

    async def next(self) -> list[Token] | worker_pb2.DecodeEvent:
        """The next event, or tokens of which nothing else is told."""
        if self._inbox.is_empty:
            self._watch.begin()
        event = await self._inbox.get()
        self._watch.end()
        if isinstance(event, FeedError):
            raise WorkerFailedError(str(event), self._worker, True) from event
        if isinstance(event, Exception):
            raise event
        return event

    @property
    def has_ended(self) -> bool:
        """Whether the call has. Why, `error` tells."""
        return self._ending is not None and self._ending.done()

    def when_ended(self, act: Callable[[], object]) -> None:
        """Behind the admission."""
        assert self._ending is not None
        self._ending.add_done_callback(lambda _: act())

    async def error(self) -> BaseException:
        """Why the call has ended, or is just about to."""
        await self.farewell()
        assert self._ending is not None
        ended = self._ending.done() and not self._ending.cancelled()
        return (ended and self._ending.exception()) or out_of_turn(self._worker)

    async def farewell(self) -> None:
        """After the last event: lets the worker end the call itself; `close` would make it an abort."""
        assert self._ending is not None
        await asyncio.wait((self._ending,), timeout=FAREWELL_SECONDS)

    def close(self) -> None:
        """Ends whatever still runs; `next` fails from now on."""
        self._watch.close()
        if self._ending is not None:
            self._ending.cancel()
        if self._call is not None:
            self._call.cancel()
        self._worker.feed.leave(self._recipient)
        self._inbox.put(WorkerFailedError(f"the call to {self._worker} was cancelled", self._worker, True))

    def _abandon(self) -> None:
        """Nothing is heard of the attempt any more. While its prompt is computed elsewhere nobody would notice."""
        if self._call is not None:
            self._call.cancel()

    def _end(self, ending: asyncio.Task[object]) -> None:
        """The call has ended. The feed says so, too, behind all that it has to tell; it should, at least."""
        if not ending.cancelled():
            error = ending.exception() or out_of_turn(self._worker)
            assert isinstance(error, Exception)
            asyncio.get_running_loop().call_later(FAREWELL_SECONDS, self._inbox.put, error)
