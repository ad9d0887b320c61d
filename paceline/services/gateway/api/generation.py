"""Runs the choices of one request, and merges their deltas into one stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator

from paceline.core.adapters import Adapter
from paceline.core.errors import UnavailableError
from paceline.core.telemetry import request_span
from paceline.services.common.tasks import own_cancellation
from paceline.services.gateway.api.choice import Choice, Delta, join_deltas
from paceline.services.gateway.api.resume import StreamIds
from paceline.services.gateway.fleet.event_feed import Mailbox
from paceline.services.gateway.http.request_scope import RequestScope
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.answer_format import name_client_field
from paceline.services.gateway.planning.cache_hints import OPEN_CALL, hints_after
from paceline.services.gateway.planning.chat_prompt import media_tokens
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.sequences.progress import Event
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.traces import RequestTrace, SequenceTrace

log = logging.getLogger(__name__)


class Generation:
    """All choices of one request.

    Args:
        request_trace: trace of the request, which the model's book of traces keeps while it runs and for a while after.
        scope: resources of the request until the generation runs, such as memory for media, and its key's limits.
        ids: ids of the events, if the client can continue the stream at another gateway; else None.
    """

    def __init__(
        self,
        model: ModelFleet,
        plan: Plan,
        request_trace: RequestTrace,
        scope: RequestScope,
        ids: StreamIds | None = None,
    ) -> None:
        self._model = model
        self.plan = plan
        self.ids = ids
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._request_trace = request_trace
        self._scope = scope
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
        self._came: Mailbox[Delta | Exception | None] = Mailbox()
        """Deltas and errors that the client has not read yet; None marks the end of a choice."""
        self._left = len(plan.prompts) * plan.n
        """Number of choices that have not ended."""
        self._has_begun = [asyncio.Event() for _ in plan.prompts]
        self._cached_tokens = [0] * len(plan.prompts)
        self._media_tokens = media_tokens([span for prompt in plan.prompts for span in prompt.media])
        self._tasks: list[asyncio.Task[None]] = []

    def _cache_creation(self) -> dict[str, int]:
        """Return the number of computed tokens before the last cache breakpoint, as a field; {} without breakpoint."""
        marked = [max((mark.tokens for mark in prompt.marks), default=0) for prompt in self.plan.prompts]
        created = sum(max(0, tokens - cached) for tokens, cached in zip(marked, self._cached_tokens))
        return {"cache_creation_tokens": created} if any(marked) else {}

    def usage(self) -> dict[str, object]:
        """Return the `usage` object of a response, with the numbers of tokens up to now."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._cached_tokens),
                **self._cache_creation(),
                **self._media_tokens,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all choices while the context is open. When it closes, cancel choices that have not ended.

        Raises MediaError or BusyError if there is no memory for the plan's media.
        """
        inputs = {
            span.digest: len(own.data)
            for prompt in self.plan.prompts
            for span, own in zip(prompt.media, prompt.inputs, strict=True)
        }
        self._scope.admission.run()
        # Nothing runs in between, so no other request gets the memory.
        self._scope.resources.close()
        try:
            with self._scope.admission, self._model.media.memory.hold(sum(inputs.values())):
                async with self._running():
                    yield
        finally:
            is_computed = any(trace.admitted is not None for trace in self._request_trace.traces)
            self._scope.admission.settle(self._prompt_tokens if is_computed else 0)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self._tasks = [asyncio.create_task(self._run_choice(index)) for index in range(self._left)]
        self._model.traces.open(self._request_trace)
        try:
            with self._model.requests.running(self._request_trace.request_id, self._request_trace.owner, self.abort):
                yield
        finally:
            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                self._model.traces.close(self._request_trace)
                # A task that has failed or was cancelled knows this object by its traceback. So do errors that nobody
                # has read. The cycles would stay in memory until the next full garbage collection.
                self._tasks.clear()
                self._came.clear()

    def abort(self) -> None:
        """End all choices with the tokens generated so far, and with the finish reason "abort"."""
        self._request_trace.is_aborted = True
        for task in self._tasks:
            # Later, because a task that is cancelled before its first step would not report its end.
            asyncio.get_running_loop().call_soon(task.cancel)

    async def batch(self) -> list[Delta]:
        """Wait for new deltas and return them; [] when all choices have ended. Raises errors of SequenceRunner.run."""
        batch: list[Delta] = []
        while self._left and not (batch and self._came.is_empty):
            item = await self._came.get()
            if isinstance(item, Exception):
                try:
                    raise item
                finally:
                    del item  # its traceback has this frame
            if item is None:
                self._left -= 1
            else:
                self.completion_tokens += len(item.tokens)
                self.reasoning_tokens += item.reasoning_tokens
                batch.append(item)
        return batch

    async def whole(self) -> list[Delta]:
        """Run all choices to their ends. Return one delta for each whole choice, in the order of their indexes."""
        choices = defaultdict[int, list[Delta]](list)
        async with self.running():
            while batch := await self.batch():
                for delta in batch:
                    choices[delta.index].append(delta)
        return [join_deltas(choices[index]) for index in sorted(choices)]

    async def _run_choice(self, index: int) -> None:
        choice = Choice(index, self.plan, self._model.tokenizer)
        try:
            await self._generate(index, choice)
        except asyncio.CancelledError:
            if not self._request_trace.is_aborted:
                raise
            if not choice.has_ended:
                self._came.put(choice.end("abort"))
            self._came.put(None)

    async def _generate(self, index: int, choice: Choice) -> None:
        which, sibling = divmod(index, self.plan.n)
        prompt = self.plan.prompts[which]
        if sibling:
            # Once the first choice has begun, the prompt's blocks are cached, so only one choice computes the prompt.
            await self._has_begun[which].wait()
        trace = self._request_trace.begin(index, len(prompt.token_ids), prompt.sampling.max_tokens)
        begun, model, admission = self._has_begun[which], self._model, self._scope.admission

        def take(event: Event) -> None:
            before = choice.tokens
            delta = choice.take(event)
            admission.spend(choice.tokens - before, self._prompt_tokens)
            if not begun.is_set():
                self._cached_tokens[which] = trace.cached_tokens
            if delta is not None:
                self._came.put(delta)
                begun.set()
            if choice.ended_by_text:
                raise _TextEndedError

        sequence_id = self._request_trace.sequence_id(index)
        with request_span("request", sequence_id) as span:
            span.set_attribute("paceline.model", self._request_trace.model)
            sequence: SequenceRun | None = None
            try:
                sequence = SequenceRun(sequence_id, self.plan, trace)
                with contextlib.suppress(_TextEndedError), own_cancellation(_cancelled):
                    await model.runner.run(sequence, take if self.ids is None else self.ids.gathering(index, take))
                learnt = OPEN_CALL if choice.calls_tools else self.plan.learnt
                length = len(sequence.context)
                hints = hints_after(prompt.marks, self.plan.retention, learnt, length, self.plan.owner)
                model.runner.expect(sequence, hints)
                self._came.put(None)
            except Exception as error:
                error = name_client_field(error, prompt.sampling.constraint)
                choice.outcome, choice.why = "error", str(error)
                self._came.put(error)
            finally:
                trace.end_attempt(choice.outcome, choice.why)
                model.metrics.observe(trace, choice.tokens, choice.outcome, background=self.plan.background)
                span.add_event("end", {"outcome": choice.outcome})
                _log(trace, choice, self._request_trace.model, self.plan.adapter)
                if model.recorder is not None and sequence is not None:
                    model.recorder.record(sequence, self._request_trace.arrived, self.plan.session_id, choice.outcome)
                trace.end(choice.outcome, choice.why, choice.tokens)


def _cancelled() -> UnavailableError:
    """Return the error for a choice in which a task was cancelled without a cancellation of the choice."""
    return UnavailableError("the request was cancelled for an unexpected reason; try again")


class _TextEndedError(Exception):
    """A choice ended for a reason that the worker does not know, so its attempt must be ended."""


def _log(trace: SequenceTrace, choice: Choice, model: str, adapter: Adapter | None) -> None:
    seconds = time.monotonic() - trace.arrived
    times = trace.token_times
    first = times[0] - trace.arrived if times else None
    prefill, decode = trace.workers
    log.info(
        "%s after %.3f s: %d prompt tokens (%d cached), %d generated",
        choice.outcome,
        seconds,
        trace.prompt_tokens,
        trace.cached_tokens,
        choice.tokens,
        extra={
            "model": model,
            "adapter_digest": None if adapter is None else adapter.digest.hex(),
            "outcome": choice.outcome,
            "seconds": round(seconds, 6),
            "queue_seconds": None if trace.admitted is None else round(trace.admitted - trace.arrived, 6),
            "first_token_seconds": None if first is None else round(first, 6),
            "prompt_tokens": trace.prompt_tokens,
            "cached_tokens": trace.cached_tokens,
            "generated_tokens": choice.tokens,
            "prefill_worker": prefill,
            "decode_worker": decode,
            "attempts": trace.attempts,
        },
    )
