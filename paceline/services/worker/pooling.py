"""The handler of work of the kind POOL on a worker with a decoder: each input is a request of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.core.context import Context
from paceline.core.errors import BusyError, ModelError, UnavailableError
from paceline.core.types import Key
from paceline.engine.step import Preempted, States
from paceline.models.pooling.causal import Begin, RunningPool, beginner
from paceline.models.pooling.model import PoolResult
from paceline.models.pooling.pooler import Pooler
from paceline.proto import common_pb2, worker_pb2
from paceline.services.common.pool_wire import wish_from_pb
from paceline.services.common.wire import key_from_pb, spans_from_pb
from paceline.services.worker.event_stream import ALIVE_SECONDS, EventStream
from paceline.services.worker.leases import Reservation
from paceline.services.worker.pool_messages import to_messages
from paceline.services.worker.worker import Worker

Send = Callable[[worker_pb2.ComputeEvent], Awaitable[None]]


_Numbered = tuple[int, PoolResult]
"""The index of an input, and its result."""


@dataclass(slots=True)
class _Job:
    """The work of one call."""

    work: common_pb2.Work
    begin: Begin
    places: asyncio.Semaphore
    """Bounds the inputs that run at the same time."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after the first input has got its blocks."""
    cached_tokens: int = 0
    """Number of tokens of an input with media whose KV was cached. Spans within them need no encodings."""
    results: asyncio.Queue[_Numbered | None] = field(default_factory=asyncio.Queue)
    """Results that were not sent yet; None after the last one."""


class PoolHandler:
    """Runs the inputs of work as requests of the engine, as many of one work at the same time as the engine has rows.

    Args:
        pooler: makes results of hidden states.
        most: number of rows.
    """

    def __init__(self, worker: Worker, pooler: Pooler, most: int) -> None:
        self._worker = worker
        self._pooler = pooler
        self._most = most
        self._running = 0
        """Number of inputs with blocks, of all work."""
        self._freed = asyncio.Event()
        """Set if an input has given its blocks back since this was cleared."""

    async def serve(self, work: common_pb2.Work, send: Send) -> None:
        """Compute the inputs in blocks that this worker reserves, and send results as they come.

        Raises:
            InvalidRequestError: the model does not have the task, or cannot cut vectors to this length.
            BusyError: there are not enough free blocks.
            UnavailableError: an input was preempted, because a request that decodes here needs its blocks.
        """
        job = _Job(work, beginner(self._pooler, wish_from_pb(work.pool)), asyncio.Semaphore(self._most))
        try:
            async with asyncio.TaskGroup() as group:
                inputs = [group.create_task(self._compute(job, index)) for index in range(len(work.pool.inputs))]
                group.create_task(self._end_results(job, inputs))
                await self._send_results(job, send)
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from None

    async def _end_results(self, job: _Job, inputs: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*inputs)
        job.results.put_nowait(None)

    # ---- one input

    async def _compute(self, job: _Job, index: int) -> None:
        """Run one input, and put its result into the queue of results."""
        asked = job.work.pool.inputs[index]
        context = Context(list(asked.token_ids), job.work.cache_salt, spans_from_pb(job.work.media))
        running = job.begin(context.token_ids, asked.prompt_tokens)
        async with job.places, self._blocks(job, index, context, running) as lease:
            events = EventStream()
            request = self._worker.intake.make_pool_request(job.work, lease, context, running.states)
            self._worker.submit(request, events)
            try:
                while not running.is_complete:
                    for event in await events.batch():
                        if isinstance(event, Preempted):
                            raise UnavailableError("the worker needs the memory of this input for other requests")
                        if isinstance(event, States) and running.states == "last":
                            running.add(event.first, event.rows)
                        elif isinstance(event, States):
                            await asyncio.to_thread(running.add, event.first, event.rows)
                result = PoolResult(await asyncio.to_thread(running.result))
            except ModelError as error:
                result = PoolResult(None, str(error))
        self._worker.pooled.add(1, len(context))
        job.results.put_nowait((index, result))

    @contextlib.asynccontextmanager
    async def _blocks(
        self, job: _Job, index: int, context: Context, running: RunningPool
    ) -> AsyncIterator[Reservation]:
        """Reserve the blocks of an input for the body of a `with` statement.

        If too few are free, wait until another input ends. Raises BusyError if there is none.
        """
        key = key_from_pb(job.work.key)
        # Encodings are announced to the attempt's own key. No request has an id like the other one.
        own = key if context.media else Key(f"{key.request_id} input {index}", key.attempt, key.generation)
        while True:
            self._freed.clear()
            try:
                lease = await self._worker.intake.reserve_input(job.work, own, context, running.reusable)
                break
            except BusyError:
                if not self._running:
                    raise
                own = own._replace(generation=own.generation + 1)  # a key that was refused is not taken again
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._freed.wait()
        self._running += 1
        try:
            self._worker.media.open(job.work, lease.filled_tokens)
            job.cached_tokens = lease.filled_tokens if context.media else 0
            job.opened.set()
            yield lease
        finally:
            self._worker.retire(lease.key)
            self._running -= 1
            self._freed.set()

    # ---- results

    async def _send_results(self, job: _Job, send: Send) -> None:
        """Send results as they come, several in one event if they came together."""
        await job.opened.wait()
        opened = worker_pb2.Opened(key=job.work.key, cached_tokens=job.cached_tokens)
        await send(worker_pb2.ComputeEvent(opened=opened))
        while True:
            found: list[_Numbered | None] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    found.append(await job.results.get())
            while not job.results.empty():
                found.append(job.results.get_nowait())
            for first, results in _runs([numbered for numbered in found if numbered is not None]):
                for message in to_messages(first, results):
                    await send(worker_pb2.ComputeEvent(pooled=message))
            if None in found:
                return
            if not found and self._worker.goes_on:
                await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive()))


def _runs(results: Sequence[_Numbered]) -> Iterator[tuple[int, list[PoolResult]]]:
    """Yield the results of inputs that follow one another, with the index of the first one."""
    together: list[PoolResult] = []
    first = 0
    for index, result in sorted(results, key=lambda numbered: numbered[0]):
        if together and index != first + len(together):
            yield first, together
            together = []
        first = first if together else index
        together.append(result)
    if together:
        yield first, together


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is not a cancellation which another error has caused."""
    found = errors.exceptions[0]
    return _first_of(found) if isinstance(found, BaseExceptionGroup) else found
