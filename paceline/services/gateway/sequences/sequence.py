"""One sequence with its tokens and its progress. The next attempt goes on from there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span, get_current_span

from paceline.core.context import Context
from paceline.core.errors import UnavailableError
from paceline.core.types import FinishReason, Key
from paceline.proto import common_pb2
from paceline.services.common.wire import adapter_to_pb, key_to_pb, sampling_to_pb, span_to_pb, work_model
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.pool_bundle import PoolBundle
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.progress import (
    AttemptAsked,
    Event,
    Generated,
    HandedOver,
    PooledRows,
    ProgressEvent,
    ProgressStep,
    PromptScores,
    SequenceProgress,
)
from paceline.services.gateway.sequences.traces import SequenceTrace


class ReplacedError(UnavailableError):
    """No worker has the weights that began a sequence: the model was replaced."""


@dataclass(slots=True, eq=False)
class SequenceRun:
    """One sequence from its arrival to its end. Create it inside the sequence's trace span.

    Only its own methods change its progress and its tokens.
    """

    request_id: str
    """Id of the sequence at workers, unique among all sequences that run in the cluster."""
    plan: Plan
    """The plan of the request. It is kept until the sequence ends, because any attempt may need its media."""
    trace: SequenceTrace = field(default_factory=SequenceTrace)
    """The record of the sequence. Its `index` is the index of the sequence among the choices of the plan."""
    span: Span = field(default_factory=get_current_span)
    prompt: PromptPlan = field(init=False)
    """The prompt and the sampling of this choice, with a seed of its own."""
    context: Context = field(init=False)
    """The prompt, followed by all tokens that have been generated."""
    generated: list[int] = field(default_factory=list, init=False)
    """The tokens that have been generated."""
    progress: SequenceProgress = field(init=False)
    missing: list[int] = field(default_factory=list, init=False)
    """Indices of the inputs of the prompt's bundle that have no results yet; empty if the prompt is no bundle."""
    _asked: list[int] = field(default_factory=list, init=False)
    """Indices of the inputs that the present attempt computes, in the order of its work."""

    def __post_init__(self) -> None:
        self.prompt = prompt = self.plan.prompt_of(self.trace.index)
        salt, adapter, shared = self.plan.cache_salt, self.plan.adapter_digest, prompt.shared_tokens
        self.context = Context(prompt.token_ids, salt, prompt.media, shared_tokens=shared, adapter=adapter)
        self.missing = [] if prompt.pool is None else list(range(len(prompt.pool.inputs)))
        self.progress = SequenceProgress(failed_at=self.trace.arrived, waited=self.plan.waited)

    @property
    def follows(self) -> bool:
        """Whether a sequence of the same request was started before, so that its client is being served already."""
        return self.trace.index > 0

    @property
    def needs_scores(self) -> bool:
        """Whether the whole prompt has to be computed, because its logprobs are requested and have not all come."""
        asked = self.prompt.sampling.prompt_logprobs is not None
        return asked and self.progress.scored < len(self.prompt.token_ids)

    @property
    def results(self) -> int:
        """Number of results that have come: generated tokens, or inputs that are pooled."""
        pool = self.prompt.pool
        return len(self.generated) if pool is None else len(pool.inputs) - len(self.missing)

    def advance(self, event: ProgressEvent) -> None:
        """Record an event between attempts or at their start. `note` takes the events of a running attempt."""
        self.progress = self.progress.after(event)

    def work(self, model: str, tails: Sequence[int] = (), ttft_seconds: float | None = None) -> common_pb2.Work:
        """Begin the next attempt and return its work for the workers.

        Args:
            tails: lengths in tokens at which other requests with the same beginning of the context ended.
            ttft_seconds: time left until the first token is wanted, in seconds; None if there is no objective.
        """
        self.advance(AttemptAsked(len(self.generated)))
        plan, prompt, sampling = self.plan, self.prompt, self.prompt.sampling
        if prompt.pool is not None:
            return self._pool_work(prompt.pool, model, ttft_seconds)
        if not self.needs_scores:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return common_pb2.Work(
            key=key_to_pb(Key(self.request_id, self.progress.attempts, 1)),
            model=work_model(model, plan.adapter is not None),
            adapter=None if plan.adapter is None else adapter_to_pb(plan.adapter),
            token_ids=self.context.token_ids,
            prompt_tokens=len(prompt.token_ids),
            sampling=sampling_to_pb(sampling),
            cache_salt=plan.cache_salt,
            shared_tokens=prompt.shared_tokens,
            priority=plan.priority,
            background=plan.background,
            ttft_seconds=ttft_seconds,
            kind=plan.kind,
            media=[span_to_pb(span) for span in prompt.media],
            tails=tails,
            kept_tokens=0 if self.generated else plan.kept_tokens(prompt),  # an earlier attempt has kept them
        )

    def _pool_work(self, pool: PoolBundle, model: str, ttft_seconds: float | None) -> common_pb2.Work:
        """Return the work for the inputs that have no results yet."""
        plan, self._asked = self.plan, list(self.missing)
        return common_pb2.Work(
            key=key_to_pb(Key(self.request_id, self.progress.attempts, 1)),
            model=model,
            cache_salt=plan.cache_salt,
            priority=plan.priority,
            background=plan.background,
            ttft_seconds=ttft_seconds,
            kind=plan.kind,
            media=[span_to_pb(span) for span in self.prompt.media],
            pool=pool.work(self._asked),
        )

    def end(self) -> FinishReason | None:
        """Return the finish reason that the tokens imply; None if the sequence goes on. A worker may have failed after
        the last token and before it reported the end."""
        if self.prompt.pool is not None:
            return None if self.missing else FinishReason.STOP
        if self.plan.kind == common_pb2.WORK_KIND_SCORE:
            return None if self.needs_scores else FinishReason.LENGTH
        sampling = self.prompt.sampling
        if self.generated and sampling.ends(self.generated[-1], len(self.generated)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= sampling.max_tokens else None

    def step(self, attempt_trace: AttemptTrace) -> ProgressStep:
        """Return how far the sequence has got after an attempt.

        The first token of an attempt counts only if other tokens followed. A prefill worker can send this token, so a
        sequence that crashes all decode workers would otherwise make one token of progress with each attempt.
        """
        progress, tokens, prompt = self.progress, len(self.generated), len(self.prompt.token_ids)
        if self.prompt.pool is not None:
            return ProgressStep(0, self.results)
        decoded = tokens if tokens > progress.generated_before + 1 else progress.failures.step.tokens
        computed = attempt_trace.cached_tokens + attempt_trace.chunks.tokens
        return ProgressStep(decoded, prompt if self.generated else min(prompt, computed))

    def place(self) -> str:
        """Return a phrase that says how far the answer has come, for error messages: "after 12 tokens"."""
        if self.prompt.pool is not None:
            return f"after {self.results} of {len(self.prompt.pool.inputs)} inputs"
        return f"after {len(self.generated)} tokens" if self.generated else "before its first token"

    def unreachable(self) -> UnavailableError:
        """Return the error for a sequence that is given up because no fitting worker could be reached in time."""
        if self.progress.is_left_behind:
            return ReplacedError(
                f"the request was given up {self.place()}, because no worker has the weights that began its answer: "
                "the model has been replaced; send the request again"
            )
        reason = self.progress.last_failure or "no worker has come back in time"
        return UnavailableError(f"{reason}; try again later")

    def note(self, event: Event, attempt_trace: AttemptTrace) -> Event | None:
        """Record an event of a running attempt, and return its part that the client has not received yet; None if the
        client has received all of it."""
        before = self.progress
        self.progress = before.after(event)
        match event:
            case Generated(tokens):
                if not self.generated:
                    self.span.add_event("first token")
                token_ids = [token.id for token in tokens]
                self.generated += token_ids
                self.context.token_ids += token_ids
                attempt_trace.token_times.append(time.monotonic())
                attempt_trace.token_counts.append(len(tokens))
                attempt_trace.tokens += len(tokens)
            case HandedOver():
                attempt_trace.handed_over = time.monotonic()
                self.span.add_event("handoff")
            case PooledRows(inputs):
                own = [self._asked[index] for index in inputs]
                self.missing = sorted(set(self.missing).difference(own))
                attempt_trace.scores += len(own)
                errors = {self._asked[index]: reason for index, reason in event.errors.items()}
                return dataclasses.replace(event, inputs=own, errors=errors)
            case PromptScores(first, tokens):
                attempt_trace.scores += len(tokens)
                known = max(0, before.scored - first)
                return PromptScores(first + known, tokens[known:]) if tokens[known:] else None
        return event
