"""A sequence to generate, and what its attempts have come to: what one leaves to the next."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from opentelemetry import trace

from paceline.core.context import Context
from paceline.core.errors import UnavailableError
from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.gateway.attempt import Event, Generated, HandedOver, PromptScores
from paceline.services.gateway.record import AttemptRecord
from paceline.services.gateway.worker_call import WorkerFailedError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate."""

    request_id: str
    """Unique among all requests that run in the cluster."""
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    """A lower one is more urgent."""
    follows: bool = False
    """Whether another sequence of the same client's request came before it: the client is being served already."""

    @property
    def context_tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens


class Progress:
    """What an attempt leaves to the next one. Make it in the request's span."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._span = trace.get_current_span()
        self.context = Context(request.token_ids, request.cache_salt)
        self.generated: list[int] = []
        self.tries = 0
        self.failures = 0
        """Attempts that failed in a row."""
        self.known = 0
        """Tokens that had come before this attempt."""
        self.last_failure: WorkerFailedError | None = None
        self.unreachable_since: float | None = None
        """On time.monotonic(); set while what keeps the request waiting is not that workers are full."""
        self.scored = 0
        """Prompt tokens whose logprobs have come."""
        self.failed: frozenset[str] = frozenset()

    @property
    def needs_scores(self) -> bool:
        """Whether all of the prompt has to be computed, for its logprobs."""
        asked = self.request.sampling.prompt_logprobs is not None
        return asked and self.scored < len(self.request.token_ids)

    def work(self, model: str) -> common_pb2.Work:
        """What the next try asks of workers."""
        self.tries += 1
        self.known = len(self.generated)
        request, sampling = self.request, self.request.sampling
        if not self.needs_scores:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return common_pb2.Work(
            key=key_to_pb(Key(request.request_id, self.tries, 1)),
            model=model,
            token_ids=self.context.token_ids,
            prompt_tokens=len(request.token_ids),
            sampling=sampling_to_pb(sampling),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def end(self) -> FinishReason | None:
        """The end that a worker may have reached without having been able to say so."""
        sampling = self.request.sampling
        if self.generated and sampling.ends(self.generated[-1], len(self.generated)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= sampling.max_tokens else None

    def unreachable(self) -> UnavailableError:
        """What to say when `unreachable_since` is too long ago."""
        return UnavailableError(f"{self.last_failure or 'no worker has come back in time'}; try again later")

    def note(self, event: Event, record: AttemptRecord) -> Event | None:
        """Remembers what came; returns what of it the client has not seen yet."""
        match event:
            case Generated(tokens):
                if not self.generated:
                    self._span.add_event("first token")
                self.generated += [token.id for token in tokens]
                self.context.token_ids += [token.id for token in tokens]
                record.token_times.append(time.monotonic())
                record.tokens += len(tokens)
            case HandedOver():
                record.handed_over = time.monotonic()
                self._span.add_event("handoff")
            case PromptScores():
                return self._new_scores(event)
        return event

    def _new_scores(self, scores: PromptScores) -> PromptScores | None:
        """The part that no earlier attempt has reported."""
        fresh = scores.tokens[max(0, self.scored - scores.first) :]
        if not fresh:
            return None
        first = scores.first + len(scores.tokens) - len(fresh)
        self.scored = first + len(fresh)
        return PromptScores(first, fresh)
