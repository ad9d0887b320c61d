"""The decode service: reserves blocks for a request, adopts the KV blocks of its prompt, and generates its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeAlias

import grpc.aio

from paceline.core.context import full_block_names
from paceline.core.errors import BusyError, InvalidRequestError, UnavailableError
from paceline.core.telemetry import carrier_of, request_span
from paceline.core.types import FinishReason, Key
from paceline.engine.chunk_planner import GROWTH_TOKENS
from paceline.engine.constraint import Grammar
from paceline.engine.step import Sampled
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire import context_from_pb, key_from_pb, key_to_pb
from paceline.services.decode.attempt_stream import AttemptStream
from paceline.services.decode.outbox import Outboxes
from paceline.services.worker.event_stream import ALIVE_SECONDS, SHARED_MEMORY, count_blocks
from paceline.services.worker.leases import Adopted, Reservation
from paceline.services.worker.request_media import RequestMedia
from paceline.services.worker.worker import Worker

FIRST_COMMAND_SECONDS = 10.0
ADOPT_SECONDS = 5.0
"""Deadline for kvtransfer to answer `adopt`, in seconds after the handoff has come. The blocks are filled by then."""

log = logging.getLogger(__name__)

CallContext = grpc.aio.ServicerContext[worker_pb2.DecodeCommand, worker_pb2.DecodeEvent]
EventsContext = grpc.aio.ServicerContext[worker_pb2.EventsRequest, worker_pb2.DecodeEvents]
Commands = AsyncIterator[worker_pb2.DecodeCommand]
Adopting: TypeAlias = "asyncio.Task[tuple[Adopted, float]]"


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """The gRPC service `Decode` of one worker, through which gateways run the attempts of requests."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.outboxes = Outboxes(lambda: worker.admission.draining)
        worker.admission.listen(self.outboxes.tell_draining)

    async def Events(  # type: ignore[override]
        self, request: worker_pb2.EventsRequest, context: EventsContext
    ) -> None:
        async with mapped_errors(context):
            await self.outboxes.serve(request.stream, context.write)

    async def Generate(self, commands: Commands, context: CallContext) -> None:  # type: ignore[override]
        # Writing to the context, rather than yielding, lets a cancellation arrive wherever this waits.
        async with mapped_errors(context):
            try:
                async with asyncio.timeout(FIRST_COMMAND_SECONDS):
                    command = await _next(commands, "admit")
            except TimeoutError:
                raise InvalidRequestError("no admit command came") from None
            work, number, outbox = command.admit, command.recipient.attempt, self.outboxes.of(command.recipient)
            carrier = carrier_of(context.invocation_metadata())
            with request_span("decode", work.key.request_id, carrier):
                left = context.time_remaining()
                # Mapped within the span, so that the log line of an unexpected error has the ids of the request.
                async with mapped_errors(context), self._worker.admit(work, "decode", left):
                    self._worker.check(work)
                    events = AttemptStream(outbox, number, lambda: self._worker.goes_on)
                    async with outbox.member(number, events.put), self._worker.intake.compiling(work) as compiled:
                        await _Attempt(self._worker, work, compiled, events).run(commands, context)


class _Attempt:
    """One attempt on this worker, from its reservation to its release."""

    def __init__(
        self,
        worker: Worker,
        work: common_pb2.Work,
        compiled: Awaitable[Grammar | None],
        events: AttemptStream,
    ) -> None:
        self._worker = worker
        self._work = work
        self._compiled = compiled
        self._events = events
        self._key = key_from_pb(work.key)
        self._context = context_from_pb(work)
        self._media: RequestMedia | None = None

    async def run(self, commands: Commands, context: CallContext) -> None:
        prefix_came = await self._fetch_prefix(self._work.prefix_source)
        reservation, is_touched = await self._reserve(), False
        try:
            self._media = self._worker.media.open(self._work, reservation.filled_tokens)
            admitted = worker_pb2.Admitted(
                key=key_to_pb(reservation.key),
                cached_tokens=reservation.filled_tokens,
                blocks=sum(map(len, reservation.tables)),
                cached_blocks=count_blocks(self._worker.layout, reservation, reservation.filled_tokens),
                prefix_failed=not prefix_came,
            )
            await context.write(worker_pb2.DecodeEvent(admitted=admitted))
            adopting = asyncio.create_task(self._adopt(reservation.key), name="adoption")
            try:
                # A silent gateway needs no deadline, because the call is cancelled if the gateway ends.
                command = await _next(commands, "handoff", "prefill_here", "fetch")
                is_touched = True
                if command.HasField("fetch"):
                    reservation = await self._fetch(reservation.key, command.fetch, commands, adopting)
                elif command.HasField("handoff"):
                    reservation = await self._take_over(command.handoff, adopting)
            finally:
                await end_tasks(adopting)
            reason = await self._generate(reservation)
            log.info("decoded to the end: %s", reason.value)
        finally:
            if not is_touched:
                self._worker.intake.give_back_tail(reservation)
            self._worker.retire(self._key)

    async def _fetch_prefix(self, source: str = "") -> bool:
        return await self._worker.intake.fetch_prefix(self._work, self._key, self._context, source)

    async def _reserve(self) -> Reservation:
        """Reserve blocks for the context and the first output tokens. Raises BusyError if too few are free."""
        context = len(self._context)
        output_left = self._work.sampling.max_tokens - (context - self._work.prompt_tokens)
        token_count = min(context + min(output_left, GROWTH_TOKENS), self._worker.limits.max_model_len)
        reservation = await self._worker.intake.reserve(self._work, self._key, self._context, token_count)
        self._key = reservation.key
        return reservation

    async def _adopt(self, key: Key) -> tuple[Adopted, float]:
        """Wait until the prompt's blocks are filled and adopt them. Return them with the time, on time.monotonic().

        The wait starts with the reservation, because kvtransfer learns sooner than the gateway that the blocks are
        filled.
        """
        adopted = await self._worker.kv.adopt(key)
        self._key = adopted.reservation.key
        log.info("adopted the blocks of %d tokens", adopted.reservation.filled_tokens)
        return adopted, time.monotonic()

    async def _fetch(self, key: Key, fetch: worker_pb2.Fetch, commands: Commands, adopting: Adopting) -> Reservation:
        """Fetch the prompt's blocks while another host computes them. Take them over when the handoff has come, too."""
        fetching = asyncio.create_task(self._worker.kv.fetch(key, fetch.source, key_from_pb(fetch.key)))
        handoff = asyncio.create_task(_next(commands, "handoff"))
        told = 0.0
        pending: set[asyncio.Task[Any]] = {fetching, handoff}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if handoff in done:
                    told = time.monotonic()
                if not done and handoff.done():
                    self._events.tell_alive()
            fetched = fetching.result()
            return await self._take_over(handoff.result().handoff, adopting, told, fetched.bytes, fetched.path)
        finally:
            await end_tasks(fetching, handoff)

    async def _take_over(
        self,
        handoff: worker_pb2.Handoff,
        adopting: Adopting,
        told: float | None = None,
        moved: int = 0,
        path: str = SHARED_MEMORY,
    ) -> Reservation:
        """Wait for the blocks that a prefill worker has filled, check them, and return them.

        Args:
            told: time at which the handoff came, on time.monotonic(); None means now.
            moved: bytes that came from another host.
            path: name of the transport over which the blocks came.
        """
        told = time.monotonic() if told is None else told
        self._worker.intake.check_handoff(self._work, handoff)
        try:
            async with asyncio.timeout(ADOPT_SECONDS):
                adopted, came = await adopting
        except TimeoutError:
            raise UnavailableError(f"kvtransfer did not hand over {self._key} within {ADOPT_SECONDS:g} s") from None
        layout, reservation = self._worker.layout, adopted.reservation
        if reservation.filled_tokens != len(self._context):
            filled = reservation.filled_tokens
            raise UnavailableError(f"{reservation.key} has {filled} tokens, not {len(self._context)}")
        reservation.check_context(self._context, layout.fingerprint)
        links = self._context.links(layout.fingerprint)
        names = [full_block_names(group, links, reservation.filled_tokens) for group in layout.groups]
        self._worker.kv.seal_adopted(adopted, names)
        blocks = count_blocks(layout, reservation, len(self._context))
        self._events.reporter.adopted(blocks, moved, path, max(0.0, came - told))
        self._context.token_ids.append(handoff.first_token_id)
        if self._media is not None:
            self._media.finish()
        return reservation

    async def _generate(self, reservation: Reservation) -> FinishReason:
        """Run the request in the engine until it ends, and again after each preemption. Return why it ended."""
        intake, grammar = self._worker.intake, await self._compiled
        spare = await intake.reserve_spare(self._work, reservation)
        while True:
            request = intake.make_request(self._work, reservation, self._context, grammar, spare=spare)
            request.stats = self._events.reporter.effort
            self._worker.submit(request, self._events)
            event = await self._events.end()
            if isinstance(event, Sampled):
                assert event.reason is not None
                return event.reason
            reservation, spare = await self._reserve_again(), []  # memory is short
            if self._media is not None:
                await self._media.resume(reservation.filled_tokens)

    async def _reserve_again(self) -> Reservation:
        """Wait after a preemption until blocks are free, and reserve them. Blocks that are still cached are reused."""
        with self._worker.admission.waiting_for_blocks(self._key, self._work.background) as is_first:
            while True:
                give_up = time.monotonic() + ALIVE_SECONDS
                while time.monotonic() < give_up:
                    if is_first():
                        # A key can be reserved only once, even if it was refused.
                        self._key = self._key._replace(generation=self._key.generation + 1)
                        await self._fetch_prefix()
                        with contextlib.suppress(BusyError):
                            return await self._reserve()
                    await asyncio.sleep(random.uniform(0.01, 0.05))
                self._events.tell_alive()


async def _next(commands: Commands, *expected: str) -> worker_pb2.DecodeCommand:
    """Return the next command. Raises InvalidRequestError if it is not one of the expected commands."""
    command = await anext(commands, None)
    if command is None:
        raise InvalidRequestError(f"the stream of commands ended before {' or '.join(expected)}")
    if command.WhichOneof("command") not in expected:
        raise InvalidRequestError(f"expected {' or '.join(expected)}, got {command.WhichOneof('command')}")
    return command
