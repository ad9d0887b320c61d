"""Runs the inputs of one request on workers that pool, and returns their vectors or labels."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
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
from paceline.services.common.registry import Member
from paceline.services.common.tasks import end_tasks, own_cancellation
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import until_disconnect
from paceline.services.gateway.http.request_scope import RequestScope, aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.plan import with_headers
from paceline.services.gateway.planning.pooling import (
    PoolOptions,
    PoolPlan,
    TextInput,
    effort,
    join_plans,
    plan_pool,
)
from paceline.services.gateway.sequences.progress import Event, PooledRows
from paceline.services.gateway.sequences.sequence import ReplacedError, SequenceRun
from paceline.services.gateway.sequences.traces import RequestTrace, SequenceTrace

Rows = NDArray[np.float32]

MOST_ROUNDS = 4
"""Number of times that bundles are computed, before a request fails because workers keep getting other weights."""
RESULT_COST = 12
"""Bytes of memory that are counted for each byte of a result: the message, and about twenty characters for each number
in the answer, once in pieces and once as a whole."""
TOKEN_COST = 48
"""Bytes of memory that are counted for each token of an input, which is in lists of the request and of its bundle."""
BUNDLES_PER_WORKER = 2
"""Number of bundles of one request that run or wait at the same time, for each worker: one is computed while the next
one is on its way."""
SMALL_CHARACTERS = 2000
"""Largest effort of a request that is planned on the event loop, in about a millisecond."""

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
    (pooled,) = await pool_parts(model, request, [(inputs, options)])
    return pooled


async def pool_parts(
    model: ModelFleet, request: Request, parts: Sequence[tuple[Sequence[TextInput], PoolOptions]]
) -> list[Pooled]:
    """Compute inputs with different options, such as queries and documents, and return the results of each part.

    All parts are checked before anything is computed, and the results of all parts are of one model. Raises the errors
    of `pool`.
    """
    if model.adapter is not None:
        raise ApiError(400, f"{model.name!r} is an adapter, which only generates text; name its model", param="model")
    config, scope = model.pooling, scope_of(request)
    for _, options in parts:
        if config is None or options.task not in config.tasks:
            raise ApiError(400, f"the model {model.name!r} does not compute {options.task}", param="model")
    assert config is not None
    served = await model.served_model(request, common_pb2.WORK_KIND_POOL)
    workers = model.fleet.summary.computing_workers
    given = config, served.tokenizer, served.max_model_len, workers
    plans = await _planned(request, parts, lambda inputs, options: plan_pool(inputs, options, *given))
    planned = join_plans(plans)
    tokens = sum(map(len, planned.token_ids))
    scope.memory.take(scope.owner, RESULT_COST * planned.result_bytes + TOKEN_COST * tokens)
    full = with_headers(planned.plan, request)
    full = dataclasses.replace(full, cache_salt=model.cache_salts.salt(scope.caller, full.cache_salt))
    planned = dataclasses.replace(planned, plan=full)
    scope.admission.charge(tokens, 0)
    scope.resources.callback(scope.admission.refund)
    trace = RequestTrace.of(full, scope, endpoint=request.url.path, model=model.name, streamed=False)
    rows = iter(await until_disconnect(request.receive, _Pooling(model, planned, trace, scope, workers).run()))
    return [Pooled(list(itertools.islice(rows, len(own.places))), own.token_ids, own.cut_tokens) for own in plans]


async def _planned(
    request: Request,
    parts: Sequence[tuple[Sequence[TextInput], PoolOptions]],
    plan: Callable[[Sequence[TextInput], PoolOptions], PoolPlan],
) -> list[PoolPlan]:
    """Return the plan of each part. It is made on a thread unless the texts are short."""

    def plan_all() -> list[PoolPlan]:
        return [plan(inputs, options) for inputs, options in parts]

    is_small = sum(effort(inputs, options) for inputs, options in parts) <= SMALL_CHARACTERS
    return plan_all() if is_small else await aside(request, plan_all)


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
        self._weights = [""] * len(planned.plan.prompts)
        """`Member.weights` of the worker that computed each bundle; "" if unknown, or if it is not computed."""
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
        model.traces.open(trace)
        try:
            with scope.admission, model.requests.running(trace.request_id, trace.owner, self._abort):
                await self._run_all()
        finally:
            model.traces.close(trace)
            is_computed = any(each.admitted is not None for each in trace.traces)
            scope.admission.settle(self._tokens if is_computed else 0, has_answer=False)
        if trace.is_aborted:
            raise UnavailableError("the request was aborted")
        return [rows for rows in self._rows if rows is not None]

    async def _run_all(self) -> None:
        """Compute all bundles with the same weights. If the model is replaced meanwhile, bundles that have the weights
        from before are computed again.

        Raises the first error of a bundle, and UnavailableError if the model is replaced again and again.
        """
        indices, weights = list(range(len(self._plan.prompts))), ""
        for number in range(MOST_ROUNDS):
            await self._run_bundles(indices, weights, number)
            found = {*filter(None, self._weights)}
            if len(found) < 2 or self._request_trace.is_aborted:
                return
            weights = newest_weights((each.member for each in self._model.fleet.snapshot()), found)
            indices = [index for index, own in enumerate(self._weights) if own not in ("", weights)]
        raise UnavailableError("the model was replaced again and again while the request was computed; send it again")

    async def _run_bundles(self, indices: Sequence[int], weights: str, number: int) -> None:
        self._tasks = [asyncio.create_task(self._run_bundle(index, weights, number)) for index in indices]
        try:
            await _all_of(self._tasks)
        finally:
            await end_tasks(*self._tasks)
            self._tasks.clear()  # an error's traceback knows this object

    def _abort(self) -> None:
        self._request_trace.is_aborted = True
        for task in self._tasks:
            asyncio.get_running_loop().call_soon(task.cancel)

    async def _run_bundle(self, index: int, weights: str, number: int) -> None:
        """Compute a bundle with these weights, or with any if they are "" or no worker has them any more.

        Args:
            number: number of the round.
        """
        async with self._places_at_workers:
            try:
                await self._run_sequence(index, weights, f".{number}" if number else "")
            except ReplacedError:
                await self._run_sequence(index, "", f".{number}.any")

    async def _run_sequence(self, index: int, weights: str, suffix: str) -> None:
        """Compute all inputs of a bundle. `suffix` distinguishes this from earlier times, at workers."""
        model, prompt = self._model, self._plan.prompts[index]
        trace = self._request_trace.begin(index, len(prompt.token_ids), 0)
        trace.arrived, trace.wanted_weights = self._request_trace.arrived, weights
        sequence_id = self._request_trace.sequence_id(index) + suffix
        outcome, why = "abort", ""
        with request_span("request", sequence_id) as span:
            span.set_attribute("paceline.model", self._request_trace.model)
            try:
                sequence = SequenceRun(sequence_id, self._plan, trace)
                with own_cancellation(_cancelled):
                    await model.runner.run(sequence, partial(self._take, index))
                outcome, self._weights[index] = "stop", trace.weights
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


def newest_weights(members: Iterable[Member], found: Collection[str]) -> str:
    """Return those of the weights `found` that the member has which started last. If no member has any of them, return
    the first one by name: then bundles are computed with whatever weights there are.
    """
    started = {each.epoch: each.weights for each in members if each.weights in found}
    return started[max(started)] if started else min(found)


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
