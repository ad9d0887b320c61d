"""The core of a pool worker: a model without a decoder, whose inputs are computed whole, without KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator

from paceline.core.errors import InvalidRequestError, ModelError, UnavailableError
from paceline.core.machine import trim_heap
from paceline.core.metrics import Sample
from paceline.engine.compute_thread import STEP_SECONDS
from paceline.models.pooling.model import PoolingModel, TextRow
from paceline.proto import common_pb2, worker_pb2
from paceline.proto.fleet_pb2 import AdapterReport, LoadReport, Sleep, WorkReport
from paceline.services.common.pool_wire import wish_from_pb
from paceline.services.common.wire import load_to_pb
from paceline.services.pool.pool_calls import PoolCall, StepPlanner
from paceline.services.pool.steps import PoolSteps
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.bare_engine import BareEngine
from paceline.services.worker.compute import Send
from paceline.services.worker.event_stream import ALIVE_SECONDS
from paceline.services.worker.work_check import check_pool
from paceline.services.worker.worker_setup import WorkerSetup, machine_turns
from paceline.services.worker.worker_sleep import WorkerSleep


class PoolWorker:
    """A worker that computes vectors, scores and labels.

    Its engine has no requests and runs only steps of `PoolSteps`. If workers share the cores of a machine, this worker
    takes turns with them as a prefill worker does.

    Args:
        reload: loads the model and returns it with the digest of its weights, after a sleep has dropped it.
    """

    layout = None

    def __init__(
        self, model: PoolingModel, weights: str, setup: WorkerSetup, reload: Callable[[], tuple[PoolingModel, str]]
    ) -> None:
        self.model_id = setup.model_id
        self.weights = weights
        config = setup.config
        own = model.config.max_tokens
        self.max_model_len = min(config.max_model_len, own) if config.max_model_len else own
        self.admission = WorkerAdmission(config.max_seqs)
        self.sleep = WorkerSleep(self, setup.role)
        self._model: PoolingModel | None = model
        self._reload = reload
        turns = machine_turns(setup)
        self._takes_turns = turns is not None
        self._bare = BareEngine(turns)
        self.engine, self.failed = self._bare.engine, self._bare.failed
        self.steps = PoolSteps(model, StepPlanner(config.max_batched_tokens), self.engine.encode)

    def admit(self, work: common_pb2.Work) -> contextlib.AbstractAsyncContextManager[None]:
        """Count one call for the body of a `with` statement. Raises the errors of `WorkerAdmission.admit`."""
        return self.admission.admit()

    def check(self, work: common_pb2.Work) -> None:
        """Refuse work that this worker can never do.

        Raises InvalidRequestError, or UnavailableError if another worker may be able to do it.
        """
        if work.model != self.model_id:
            raise UnavailableError("this worker serves another model")
        check_pool(work, self.max_model_len)
        if work.media:
            raise InvalidRequestError("this model pools texts, not images or audio", "input")

    async def serve(self, work: common_pb2.Work, send: Send) -> None:
        """Compute the inputs of a call, and send their results as steps end."""
        wish = wish_from_pb(work.pool)
        rows = [TextRow(list(each.token_ids), each.second_start, each.prompt_tokens) for each in work.pool.inputs]
        assert self._model is not None
        self._model.check(rows, wish)
        wanted = work.ttft_seconds if work.HasField("ttft_seconds") else None
        call = PoolCall(rows, wish, work.background, wanted)
        await send(worker_pb2.ComputeEvent(opened=worker_pb2.Opened(key=work.key)))
        running = self.steps.add(call)
        try:
            left = len(rows)
            while left:
                try:
                    async with asyncio.timeout(ALIVE_SECONDS):
                        result = await running.results.get()
                except TimeoutError:
                    if self._bare.goes_on:
                        await send(worker_pb2.ComputeEvent(alive=common_pb2.Alive()))
                    continue
                if isinstance(result, Exception):
                    raise result
                messages, report = result
                for number, message in enumerate(messages):
                    left -= len(message.rows)
                    await send(worker_pb2.ComputeEvent(pooled=message, report=None if number else report))
        finally:
            self.steps.remove(call)

    # ---- sleep, see `Sleeping`

    def check_sleep(self, wish: Sleep) -> None:
        """Return, because every pool worker can drop its model and load it again."""

    async def sleep_weights(self, level: int) -> None:
        self._model = self.steps.model = None
        gc.unfreeze()  # what was there when the worker started counts as garbage now, too
        await asyncio.to_thread(gc.collect)
        trim_heap()

    async def wake_weights(self) -> None:
        model, weights = await asyncio.to_thread(self._reload)
        if weights != self.weights:
            # Answers must not change while the cluster believes that the weights are the same.
            raise ModelError("the model's folder has changed while the worker slept; restart the worker to serve it")
        self._model = self.steps.model = model

    async def sleep_blocks(self) -> None:
        """Return, because a pool worker has no KV blocks."""

    async def wake_blocks(self) -> None:
        """Return, because a pool worker has no KV blocks."""

    def load(self) -> LoadReport:
        """Return the worker's load, by which gateways choose workers."""
        waiting = self.steps.waiting_calls
        return LoadReport(
            running=max(0, self.admission.active - waiting),
            waiting=waiting,
            queued_tokens=self.steps.waiting_tokens,
            prefill_tokens_per_second=self.steps.tokens_per_second,
        )

    def lora(self) -> AdapterReport:
        """Return the report about adapters, which is empty, because the worker takes none."""
        return AdapterReport()

    def work(self) -> WorkReport:
        """Return the report for the planner."""
        return WorkReport(shares_cores=self._takes_turns, steps=[load_to_pb(load) for load in self.steps.loads.all()])

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the steps."""
        # The engine takes the steps for those of an encoder.
        yield Sample("busy_seconds", self.engine.computing.encode_seconds, STEP_SECONDS, {"kind": "busy"})
        yield from self.steps.samples()
