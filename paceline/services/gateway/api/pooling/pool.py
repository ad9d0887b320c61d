"""Runs the inputs of one request on workers that pool, and returns their vectors or labels."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from paceline.core.errors import UnavailableError
from paceline.core.pooling import ROW_TASKS
from paceline.core.telemetry import request_span
from paceline.proto import common_pb2
from paceline.services.common.tasks import end_tasks, own_cancellation
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import until_disconnect
from paceline.services.gateway.http.request_scope import RequestScope, aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.pooling import PoolOptions, PoolPlan, TextInput, plan_pool
from paceline.services.gateway.planning.request_headers import with_headers
from paceline.services.gateway.sequences.attempt import Event, PooledRows
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.traces import RequestTrace, SequenceTrace

Rows = NDArray[np.float32]

RESULT_COST = 4
"""Bytes of memory that are counted for each byte of a result: the message, the array and its text in the answer."""
BUNDLES_PER_WORKER = 2
"""Number of bundles of one request that run or wait at the same time, for each worker: one is computed while the next
one is on its way."""
SMALL_CHARACTERS = 2000
"""Largest number of characters and token ids of inputs that are tokenized on the event loop, in about a millisecond."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one request, in the order of its inputs."""

    rows: list[Rows]
    """Of each input, the values [dim]; [rows, dim] if the task has a row for each token."""
    token_ids: list[Sequence[int]]
    """The tokens of each input that were computed, special tokens included."""
    cut_tokens: list[int]
    """Number of tokens that each input has lost, because it was too long."""

    @property
    def prompt_tokens(self) -> list[int]:
        """Number of tokens of each input that were computed."""
        return [len(ids) for ids in self.token_ids]

    def usage(self) -> dict[str, Any]:
        """Return the `usage` object of a response. It says how many tokens were cut, if some were."""
        tokens = sum(self.prompt_tokens)
        cut = {"prompt_tokens_details": {"truncated_tokens": sum(self.cut_tokens)}} if any(self.cut_tokens) else {}
        return {"prompt_tokens": tokens, "total_tokens": tokens, **cut}


async def pool(model: ModelFleet, request: Request, inputs: Sequence[TextInput], options: PoolOptions) -> Pooled:
    """Compute the inputs of a request on the model's workers, and wait for all results.

    Raises:
        ApiError: the model does not have the task, a header is not valid, the key has no tokens left, or a result is
            not finite.
        InvalidRequestError: an input is empty or too long, or an option does not fit the model.
        BusyError, UnavailableError: no worker had room or was ready in time, or the request failed too often.
        ClientLeftError: the client disconnected.
    """
    if model.adapter is not None:
        raise ApiError(400, f"{model.name!r} is an adapter, which only generates text; name its model", param="model")
    config, scope = model.pooling, scope_of(request)
    if config is None or options.task not in config.tasks:
        raise ApiError(400, f"the model {model.name!r} does not compute {options.task}", param="model")
    served = await model.served_model(request, common_pb2.WORK_KIND_POOL)
    workers = model.fleet.summary.computing_workers
    plan = partial(plan_pool, inputs, options, config, served.tokenizer, served.max_model_len, workers)
    is_small = sum(len(each.content) for each in inputs) <= SMALL_CHARACTERS
    planned = plan() if is_small else await aside(request, plan)
    scope.memory.take(scope.owner, RESULT_COST * planned.result_bytes)
    full = with_headers(planned.plan, request)
    full = dataclasses.replace(full, cache_salt=model.cache_salts.salt(scope.caller, full.cache_salt))
    planned = dataclasses.replace(planned, plan=full)
    scope.admission.charge(sum(map(len, planned.token_ids)), 0)
    scope.resources.callback(scope.admission.refund)
    trace = RequestTrace.of(full, scope, endpoint=request.url.path, model=model.name, streamed=False)
    rows = await until_disconnect(request.receive, _Pooling(model, planned, trace, scope, workers).run())
    return Pooled(rows, planned.token_ids, planned.cut_tokens)


class _Pooling:
    """All bundles of one request.

    Args:
        workers: number of workers among which the request is divided.
    """

    def __init__(
        self, model: ModelFleet, planned: PoolPlan, request_trace: RequestTrace, scope: RequestScope, workers: int
    ) -> None:
        self._model = model
        self._plan = planned.plan
        self._places = planned.places
        self._tokens = sum(map(len, planned.token_ids))
        self._rows: list[Rows | None] = [None] * len(planned.places)
        self._request_trace = request_trace
        self._scope = scope
        sizes = [len(prompt.pool.inputs) for prompt in self._plan.prompts if prompt.pool is not None]
        self._begins = list(itertools.accumulate(sizes, initial=0))
        """Index of the first input of each bundle among all inputs."""
        self._places_at_workers = asyncio.Semaphore(BUNDLES_PER_WORKER * max(1, workers))
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> list[Rows]:
        """Run all bundles and return the results of all inputs. Raises the first error of a bundle."""
        model, trace, scope = self._model, self._request_trace, self._scope
        scope.admission.run()
        scope.resources.close()
        self._tasks = [asyncio.create_task(self._run_bundle(index)) for index in range(len(self._plan.prompts))]
        model.traces.open(trace)
        try:
            with scope.admission, model.requests.running(trace.request_id, trace.owner, self._abort):
                await _all_of(self._tasks)
        finally:
            await end_tasks(*self._tasks)
            self._tasks.clear()  # an error's traceback knows this object
            model.traces.close(trace)
            is_computed = any(each.admitted is not None for each in trace.traces)
            scope.admission.settle(self._tokens if is_computed else 0, has_answer=False)
        if trace.is_aborted:
            raise UnavailableError("the request was aborted")
        if len({each.weights for each in trace.traces if each.weights}) > 1:
            raise UnavailableError("the model was replaced while the request was computed; send it again")
        return [rows for rows in self._rows if rows is not None]

    def _abort(self) -> None:
        self._request_trace.is_aborted = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)

    async def _run_bundle(self, index: int) -> None:
        model, prompt = self._model, self._plan.prompts[index]
        async with self._places_at_workers:
            trace = self._request_trace.begin(index, len(prompt.token_ids), 0)
            trace.arrived = self._request_trace.arrived
            sequence_id = self._request_trace.sequence_id(index)
            outcome, why = "abort", ""
            with request_span("request", sequence_id) as span:
                span.set_attribute("paceline.model", self._request_trace.model)
                try:
                    sequence = SequenceRun(sequence_id, self._plan, trace)
                    with own_cancellation(_cancelled):
                        await model.runner.run(sequence, partial(self._take, index))
                    outcome = "stop"
                except Exception as error:
                    outcome, why = "error", str(error)
                    raise
                finally:
                    trace.end_attempt(outcome, why)
                    model.metrics.observe(trace, 0, outcome, background=self._plan.background)
                    span.add_event("end", {"outcome": outcome})
                    trace.end(outcome, why, 0)
                    _log(trace, outcome, self._request_trace.model)

    def _take(self, index: int, event: Event) -> None:
        """Keep the results in an event. Raises ApiError if an input has none."""
        if not isinstance(event, PooledRows):
            return
        pool, begin = self._plan.prompts[index].pool, self._begins[index]
        assert pool is not None
        for own, reason in event.errors.items():
            place = self._places[begin + own]
            raise ApiError(500, f"{place}: {reason}", type="server_error", param=place, code="not_finite")
        values = np.frombuffer(event.data, dtype="<f4").reshape(-1, max(event.dim, 1))
        row = 0
        for own, count in zip(event.inputs, event.rows, strict=True):
            part = values[row : row + count]
            self._rows[begin + own] = part if pool.wish.task in ROW_TASKS else part.reshape(-1)
            row += count


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until all tasks have ended. Raises the error of the first one that fails, as soon as it fails."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame


def _cancelled() -> UnavailableError:
    """Return the error for a bundle in which a task was cancelled without a cancellation of the bundle."""
    return UnavailableError("the request was cancelled for an unexpected reason; try again")


def _log(trace: SequenceTrace, outcome: str, model: str) -> None:
    worker, decode = trace.workers
    log.info(
        "%s after %.3f s: %d tokens pooled",
        outcome,
        time.monotonic() - trace.arrived,
        trace.prompt_tokens,
        extra={
            "model": model,
            "outcome": outcome,
            "seconds": round(time.monotonic() - trace.arrived, 6),
            "prompt_tokens": trace.prompt_tokens,
            "worker": worker or decode,
            "attempts": trace.attempts,
        },
    )
