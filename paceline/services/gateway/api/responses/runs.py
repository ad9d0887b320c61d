"""Responses while this gateway computes them: for a client that waits, and in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple

from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.respond import event_stream
from paceline.services.gateway.api.responses.builder import Json, ResponseBuilder, encode
from paceline.services.gateway.api.responses.store import Record, ResponseStore
from paceline.services.gateway.http.errors import ApiError, to_api_error
from paceline.services.gateway.store.database import StoreError
from paceline.services.gateway.store.store import Check

LEASE_SECONDS = 60.0
"""Seconds for which a gateway's sign of life holds. After them the gateway has ended, and its responses have failed."""
_KEEP_ALIVE_SECONDS = 5.0
_ENDED_KEPT = 32
"""Number of ended responses whose events are kept for clients that read late."""

log = logging.getLogger(__name__)

RESTARTED = "the gateway that computed this response has ended; send the request again"


async def generate(generation: Generation, builder: ResponseBuilder, tell: Callable[[list[Json]], None]) -> None:
    """Run a generation to its end, and pass the events of its response to `tell`. Raises errors of the generation."""
    tell(builder.begin())
    async with generation.running():
        while batch := await generation.batch():
            for delta in batch:
                tell(builder.add(delta))
    tell(builder.end())


class ResponseWriter:
    """Converts deltas into the events of a response; a `StreamWriter`. `response_events` adds the last events."""

    def __init__(self, builder: ResponseBuilder) -> None:
        self._builder = builder
        self._beginning = _encoded(builder.begin())

    def begin(self) -> bytes:
        return self._beginning

    def write(self, delta: Delta) -> bytes:
        return _encoded(self._builder.add(delta))

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return _encoded(self._builder.fail(error))


async def response_events(
    generation: Generation, builder: ResponseBuilder, writer: ResponseWriter, keep: Callable[[Json], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """Yield the events of a response. The response is stored before the client sees its last event.

    A caller that stops early must close the generator.
    """
    has_begun = False
    try:
        async with contextlib.aclosing(event_stream(generation, writer)) as events:
            async for data in events:
                if data:
                    has_begun = True
                    yield data
        last = builder.end()
    except Exception as error:
        if not has_begun:
            raise
        last = builder.fail(to_api_error(error))
    await keep(last[-1]["response"])
    yield _encoded(last)


async def whole_response(generation: Generation, builder: ResponseBuilder) -> Json:
    """Run a generation and return its response. Raises errors of the generation."""
    await generate(generation, builder, lambda events: None)
    return builder.response


class BackgroundRun:
    """One background response that is being computed, and its events so far.

    The event with sequence number i is the one at index i.
    """

    def __init__(self, builder: ResponseBuilder) -> None:
        self.builder = builder
        self.is_cancelled = False
        """Whether a client has cancelled the response."""
        self.has_ended = False
        self._events: list[bytes] = []
        self._grown = asyncio.Event()

    def tell(self, events: list[Json]) -> None:
        """Add events to the response, for all clients that read it."""
        self._events += encode(events)
        self._wake()

    def end(self) -> None:
        """Mark the events as complete, which ends all streams that read them."""
        self.has_ended = True
        self._wake()

    async def read(self, first: int) -> AsyncGenerator[bytes]:
        """Yield the events from index `first` on, until the end. Events that are ready together are joined."""
        while True:
            if events := self._events[first:]:
                first += len(events)
                yield b"".join(events)
            elif self.has_ended:
                return
            else:
                await self._grown.wait()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class _Tasks(NamedTuple):
    """The tasks of a run. Only the task that generates is ever cancelled, so the response so far is always written."""

    generating: asyncio.Task[None]
    keeping: asyncio.Task[None]


class BackgroundRuns:
    """The responses that this gateway computes in the background.

    Args:
        name: unique name of this gateway.
    """

    def __init__(self, store: ResponseStore, name: str) -> None:
        self._store = store
        self._name = name
        self._tasks: dict[str, _Tasks] = {}
        self._runs: OrderedDict[str, BackgroundRun] = OrderedDict()
        self._keeping_alive: asyncio.Task[None] | None = None

    async def start(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        owner: str,
        items: list[Json],
        also: Callable[[Json], Check | None],
    ) -> BackgroundRun:
        """Begin to compute a response, and return it. Raises StoreError if it cannot be kept.

        Args:
            also: returns a function that writes more in the transaction that stores the response's end; or None.
        """
        response = {**builder.response, "status": "in_progress"}
        until = time.time() + LEASE_SECONDS
        previous = response["previous_response_id"] or ""
        await self._store.put(Record(builder.id, owner, previous, "in_progress", self._name, until, response, items))
        run = self._runs[builder.id] = BackgroundRun(builder)
        generating = asyncio.create_task(generate(generation, builder, run.tell))
        self._tasks[builder.id] = _Tasks(generating, asyncio.create_task(self._keep(run, generating, also)))
        if self._keeping_alive is None:
            self._keeping_alive = asyncio.create_task(self._keep_alive())
        return run

    def find(self, response_id: str) -> BackgroundRun | None:
        """Return the run of a response; None if this gateway does not run it, or no longer keeps its events."""
        return self._runs.get(response_id)

    async def cancel(self, response_id: str) -> None:
        """Cancel a run for its client, and wait until its response is stored. Does nothing for unknown ids."""
        if (tasks := self._tasks.get(response_id)) is not None:
            self._runs[response_id].is_cancelled = True
            tasks.generating.cancel()
            await asyncio.wait([tasks.keeping])

    async def close(self) -> None:
        """End all runs, and wait until their responses are stored, incomplete ones as failed."""
        if self._keeping_alive is not None:
            await end_tasks(self._keeping_alive)
        for tasks in self._tasks.values():
            tasks.generating.cancel()
        await asyncio.gather(*(tasks.keeping for tasks in self._tasks.values()), return_exceptions=True)

    async def _keep(
        self, run: BackgroundRun, generating: asyncio.Task[None], also: Callable[[Json], Check | None]
    ) -> None:
        """Wait for the end of a run, and store its response."""
        builder = run.builder
        try:
            await generating
        except asyncio.CancelledError:
            restarted = ApiError(503, RESTARTED, type="server_error")
            run.tell(builder.cancel() if run.is_cancelled else builder.fail(restarted))
        except Exception as error:
            run.tell(builder.fail(to_api_error(error)))
        finally:
            del generating  # the traceback of its error has this frame
        try:
            await self._store.finish(builder.response, also(builder.response))
        except StoreError as error:
            log.error("a response in the background is lost: %s", error)
        finally:
            run.end()
            del self._tasks[builder.id]
            self._forget()

    def _forget(self) -> None:
        ended = [response_id for response_id, run in self._runs.items() if run.has_ended]
        for response_id in ended[:-_ENDED_KEPT]:
            del self._runs[response_id]

    async def _keep_alive(self) -> None:
        """Renew this gateway's sign of life in the store regularly, and end runs that other gateways have cancelled."""
        while True:
            await asyncio.sleep(_KEEP_ALIVE_SECONDS)
            if not self._tasks:
                continue
            running = set(self._tasks)
            with contextlib.suppress(StoreError):
                wanted = await self._store.keep_alive(self._name, time.time() + LEASE_SECONDS, running)
                for response_id in running - wanted:
                    await self.cancel(response_id)


def _encoded(events: list[Json]) -> bytes:
    return b"".join(encode(events))
