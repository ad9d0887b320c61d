"""The core of a prefill or decode worker: an engine over the arena, and the requests that it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from paceline.core.errors import BusyError, InvalidRequestError, UnavailableError
from paceline.core.metrics import Family, Sample
from paceline.core.turns import RoleTurns
from paceline.core.types import Key
from paceline.engine.engine import Engine
from paceline.engine.limits import Limits
from paceline.engine.loading import Loaded
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Event
from paceline.models.files.weight_maps import WeightMaps
from paceline.models.pooling.pooler import Pooler
from paceline.proto import common_pb2 as pb
from paceline.proto.fleet_pb2 import AdapterReport, LoadReport, Sleep, WorkReport
from paceline.services.common.registry import Role
from paceline.services.common.wire import key_from_pb, load_to_pb, work_model
from paceline.services.worker.adapters import AdapterStore
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.dispatcher import Dispatcher, lost
from paceline.services.worker.encoder import WorkerEncoder
from paceline.services.worker.encoding import EncodeHandler
from paceline.services.worker.encodings import Encodings, HeldEncoding
from paceline.services.worker.event_stream import ALIVE_SECONDS, EventStream, EventStreams
from paceline.services.worker.intake import Intake
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.kv_memory import KVMemory
from paceline.services.worker.pool_counts import PoolCounts
from paceline.services.worker.request_media import RequestMediaTable
from paceline.services.worker.work_check import check_encode, check_pool, check_pool_contexts, check_work
from paceline.services.worker.worker_role import WorkerRole
from paceline.services.worker.worker_sleep import WorkerSleep, check_maps, give_back_weights, take_back_weights

Argument = TypeVar("Argument")

POOL_SECONDS, POOL_PAUSE = 5.0, 0.05
"""Longest wait until nothing uses a block of the worker's own pool, and the time between two looks, in seconds."""

OFFLOAD_BYTES = Family(
    "kv_offload_bytes",
    "Bytes of KV blocks copied from a worker's pool to the arena (store), back (load), and from the pool of another "
    "worker on its device (device)",
)
WEIGHT_BYTES = Family(
    "weight_bytes", "Bytes of the model's weights in memory by format; workers of a host may share them", "gauge"
)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker, after "auto" and 0 have been resolved."""

    max_model_len: int
    """Tokens of the longest context."""
    max_batched_tokens: int
    """Largest number of tokens that one step computes."""
    max_seqs: int
    """Largest number of requests that run at the same time."""
    steps_in_flight: int
    itl_target: float | None = None
    """Target for the length of steps with urgent requests, in seconds. None leaves no time to the background."""
    max_adapters: int = 0
    """Largest number of adapters in memory."""


class Worker:
    """A worker that runs requests of one model.

    Args:
        model_id: digest of the model's config and tokenizer.
        role: the worker's role, which may change.
        memory: memory of KV blocks in which the device computes.
        turns: the worker's time slices; None if it shares its cores with no other worker.
        pooler: makes vectors or labels of hidden states; None if the model only generates.
        weight_maps: the files from which the weights are mapped; None if they are in memory of the worker's own.
    """

    def __init__(
        self,
        loaded: Loaded,
        model_id: str,
        role: WorkerRole,
        memory: KVMemory,
        kv: KVClient,
        limits: WorkerLimits,
        turns: RoleTurns | None = None,
        pooler: Pooler | None = None,
        weight_maps: WeightMaps | None = None,
    ) -> None:
        self.model_id = model_id
        self.role = role
        self._weight_bytes = loaded.weight_bytes
        self._turns = turns
        self.kv = kv
        self.memory = memory
        self.layout = loaded.layout
        self.weights = loaded.weights
        self.encodings = Encodings(kv, loaded.layout, memory.arena) if loaded.layout.encodings else None
        """None if the model has no encoders."""
        self.media = RequestMediaTable(self.encodings, kv.session.source)
        self.limits = limits
        self.takes_turns = turns is not None
        self.admission = WorkerAdmission(limits.max_seqs)
        self._weight_maps = weight_maps
        self.sleep = WorkerSleep(self, role)
        self._facts = loaded.model.config
        self.pooler = pooler
        self.adapters = AdapterStore(loaded.adapters, limits.max_adapters)
        self.intake = Intake(loaded, kv, self.adapters)
        self._streams = EventStreams()
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """A future that gets an exception if the engine fails."""
        self.engine_limits = Limits(
            limits.max_batched_tokens,
            limits.max_model_len,
            limits.max_seqs,
            loaded.max_drafts,
            loaded.model.config.whole_media,
            loaded.model.config.bidirectional,
            self.adapters.slots,
        )
        rows = None if self.encodings is None else self.encodings.rows
        self.runner = loaded.runner(memory.pool, self.engine_limits, rows)
        adaptive = loaded.speculative is None or loaded.speculative.adaptive
        self._pool = memory.compute_pool()
        self.engine = Engine(
            Scheduler(self.engine_limits, Speculation(loaded.max_drafts, adaptive), self._pool),
            self.runner,
            on_events=self._on_loop(self._dispatch),
            on_failure=self._on_loop(self._fail),
            steps_in_flight=limits.steps_in_flight,
            turns=turns,
            copies=memory.copies,
            peers=memory.peers,
            itl_target=limits.itl_target,
        )
        self.dispatcher = Dispatcher(self.engine, kv, self._streams, self.media)
        self.pooled = PoolCounts()
        self.encoding: EncodeHandler | None = None
        """None if the model has no encoders."""
        if self.encodings is not None and loaded.load_encoders is not None:
            encoder = WorkerEncoder(loaded.load_encoders, self.engine.encode)
            self.encoding = EncodeHandler(encoder, self.encodings, kv.session.source, lambda: self.goes_on)

    def _on_loop(self, function: Callable[[Argument], None]) -> Callable[[Argument], None]:
        """Return a function for the engine's threads that runs `function` on the event loop."""

        def call(argument: Argument) -> None:
            self._loop.call_soon_threadsafe(function, argument)

        return call

    def _dispatch(self, events: list[Event]) -> None:
        self.dispatcher.take(events)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(UnavailableError(f"the engine failed: {error}"))

    @property
    def only_pools(self) -> bool:
        """Whether the model gives vectors or labels, and no text."""
        return self._facts.only_pools

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest context."""
        return self.limits.max_model_len

    def load(self) -> LoadReport:
        """Return the worker's load, by which the gateway places requests."""
        return LoadReport(
            running=self.admission.active - self.admission.waiting,
            waiting=self.admission.waiting,
            queued_tokens=self._streams.queued_tokens,
            prefill_tokens_per_second=self.engine.stats.prefill_tokens_per_second,
        )

    def lora(self) -> AdapterReport:
        """Return the report about adapters in memory, by which gateways place requests."""
        return self.adapters.report()

    def work(self) -> WorkReport:
        """Return the report for the planner: KV pressure, computed tokens and recent step times."""
        counts = self._pool.counts()
        return WorkReport(
            kv_pressure=(counts.held + counts.in_flight) / counts.total if counts and counts.total else 0.0,
            kv_tokens=int(counts.total * self.layout.slot_bytes / self.layout.token_bytes) if counts else 0,
            computed_tokens=self._streams.computed_tokens,
            shares_cores=self.takes_turns,
            steps=[load_to_pb(load) for load in self.engine.stats.loads.all()],
        )

    def samples(self) -> Iterator[Sample]:
        """Yield the worker's metrics."""
        yield from self.engine.samples()
        for form, size in self._weight_bytes.items():
            yield Sample(f"weight_bytes_{form}", size, WEIGHT_BYTES, {"format": form})
        yield Sample("queued_tokens", self._streams.queued_tokens)
        stats, slot_bytes = self.engine.stats, self.layout.slot_bytes
        yield Sample("loaded_bytes", stats.loaded_blocks * slot_bytes, OFFLOAD_BYTES, {"direction": "load"})
        yield Sample("device_bytes", stats.device_blocks * slot_bytes, OFFLOAD_BYTES, {"direction": "device"})
        yield Sample("stored_bytes", stats.stored_blocks * slot_bytes, OFFLOAD_BYTES, {"direction": "store"})
        if (counts := self._pool.counts()) is not None:
            yield from counts.samples()
        if self.pooler is not None:
            yield from self.pooled.samples()
        if self.encoding is not None:
            yield from self.encoding.encoder.samples()
        yield from self.adapters.samples()

    @property
    def goes_on(self) -> bool:
        """Whether the engine is idle or its step began less than ALIVE_SECONDS ago, so that silent requests are only
        waiting.
        """
        return self.engine.step_seconds < ALIVE_SECONDS

    def admit(
        self, work: pb.Work, role: Role | None = None, seconds: float | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Count work as running, with its adapter in memory, for the body of a `with` statement. Raises the errors of
        `WorkerAdmission` and `AdapterStore.holding`.

        Encodings take no place, because requests that occupy all places may wait for them.

        Args:
            role: the role that the worker needs for this work; None if the worker may have any role but standby.
            seconds: time left until the deadline of the call, in seconds; None if it has none.

        Also raises DrainingError if the worker has another role, or another epoch than the sender knows.
        """
        self.role.check(work.worker_epoch, role)
        if work.kind == pb.WORK_KIND_ENCODE:
            return self.admission.join(continues=self.media.get(key_from_pb(work.key)) is not None)
        return self._admit(work, seconds)

    @contextlib.asynccontextmanager
    async def _admit(self, work: pb.Work, seconds: float | None) -> AsyncIterator[None]:
        async with self.admission.admit(work.background), self.adapters.holding(work, seconds):
            yield

    async def load_for(self, role: Role) -> None:
        """Load the encoders if requests need them in this role. In other roles, the first request that needs them loads
        them.
        """
        if role == "prefill" and self.encoding is not None:
            await self.encoding.encoder.load()  # a decode worker encodes only if there is no prefill worker

    async def take_role(self, role: Role) -> None:
        """Set everything in the worker that depends on its role. The engine must run, and have no requests."""
        await self.load_for(role)
        self.kv.take_role(role)
        if (turns := self._turns) is not None:
            await self._between_steps(lambda: turns.take_role(role == "decode"))

    async def _between_steps(self, act: Callable[[], None]) -> None:
        """Run `act` on the thread that computes, between two steps."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            act()
            self._loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(None))

        self.engine.between_steps(run)
        await done

    def check(self, work: pb.Work) -> None:
        """Refuse work that this worker can never do.

        Raises InvalidRequestError, or UnavailableError if another worker may be able to do it.
        """
        if work.model != work_model(self.model_id, work.HasField("adapter")):
            raise UnavailableError("this worker serves another model")
        if work.kind == pb.WORK_KIND_ENCODE:
            check_encode(work, self.limits.max_model_len)
        elif work.kind == pb.WORK_KIND_POOL:
            if work.HasField("adapter"):
                raise InvalidRequestError("adapters only change models that generate", "model")
            check_pool(work, self.limits.max_model_len)
            check_pool_contexts(work, self._facts.vocab_size, self._facts.has_grids)
        elif self._facts.only_pools:
            raise InvalidRequestError("this model gives vectors or labels, and no text", "model")
        else:
            check_work(work, self.limits.max_model_len, self._facts.vocab_size, self._facts.has_grids)

    def submit(self, request: Request, events: EventStream) -> None:
        """Give a request to the engine, and its events to the stream `events`. Raises StaleError if it lost its
        blocks.
        """
        # Nothing may be awaited between this and `add`: a request that loses its blocks later is stopped.
        if not self.kv.has(request.key):
            raise lost(request.key)
        self.kv.use(request.key)
        self._streams.add(request, events)
        self.engine.add(request)
        if media := self.media.get(request.key):
            media.attach(partial(self._provide, request))

    def _provide(self, request: Request, held: HeldEncoding) -> None:
        """Give an encoding to the engine, for all spans of a request that read it."""
        for index, span in enumerate(request.context.media):
            if span.digest == held.digest:
                self.engine.provide(request.key, index, held.slots)

    def retire(self, key: Key) -> None:
        """Stop a request in any state. Its blocks are released as soon as no step can write to them."""
        self.forget(key)
        self.engine.remove(key)

    def forget(self, key: Key) -> None:
        """Drop the event stream of a request that has left the engine and whose blocks belong to another worker."""
        self._streams.remove(key)

    async def reset_pool(self) -> int:
        """Forget the blocks of the device's own pool that no request uses. Return how many there were."""
        forgotten: asyncio.Future[int] = self._loop.create_future()

        def tell(blocks: int) -> None:
            if not forgotten.done():
                forgotten.set_result(blocks)

        self.engine.forget(self._on_loop(tell))
        return await forgotten

    # ---- sleep, see `Sleeping`

    def check_sleep(self, wish: Sleep) -> None:
        if wish.weights:
            check_maps(self._weight_maps)
        if wish.kv_cache:
            self.memory.check_sleep()

    async def sleep_weights(self, level: int) -> None:
        self.adapters.forget_unused()
        await give_back_weights(self._weight_maps, level)

    async def wake_weights(self) -> None:
        await take_back_weights(self._weight_maps)

    async def sleep_blocks(self) -> None:
        await self._empty_pool()
        self.memory.give_back()
        await self.kv.session.set_asleep(True)

    async def _empty_pool(self) -> None:
        """Forget the blocks of the device's own pool, and wait until no step and no copy uses one. Raises BusyError."""
        for _ in range(round(POOL_SECONDS / POOL_PAUSE)):
            await self.reset_pool()
            counts = self._pool.counts()
            if counts is None or counts.free == counts.total:
                return
            await asyncio.sleep(POOL_PAUSE)
        raise BusyError("blocks of this worker's own KV pool are still in use, so it cannot sleep now")

    async def wake_blocks(self) -> None:
        await self.kv.session.set_asleep(False)
        await asyncio.to_thread(self.memory.take_back)

    @property
    def requests(self) -> int:
        """Number of requests for whose events a handler is waiting."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Tokens of contexts that the engine has not computed yet."""
        return self._streams.queued_tokens
