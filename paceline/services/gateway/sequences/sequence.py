"""One sequence and its progress, from which the next attempt goes on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span, get_current_span

from paceline.core.context import Context
from paceline.core.errors import UnavailableError
from paceline.core.media import MediaInput, MediaSpan
from paceline.core.request_classes import DEFAULT
from paceline.core.types import FinishReason, Key, SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.wire import key_to_pb, sampling_to_pb, span_to_pb
from paceline.services.gateway.sequences.attempt import Event, Generated, HandedOver, PromptScores
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.failures import Failures, ProgressStep
from paceline.services.gateway.sequences.kinds import Kind
from paceline.services.gateway.sequences.traces import SequenceTrace


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceRun:
    """One sequence from its arrival to its end. Create it inside the sequence's trace span."""

    request_id: str
    """Unique among all sequences that run in the cluster."""
    prompt_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests with different salts share no block; see `planning/sharing.py`."""
    shared_tokens: int = 0
    """Tokens at the front whose blocks all owners share, a multiple of BASE_TOKENS."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens in the prompt, in order."""
    media_inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`. Kept until the sequence ends, because any attempt may need them."""
    priority: int = 0
    """Lower is more urgent."""
    owner: str = ""
    """Digest of the client's key; "" if it has none."""
    request_class: str = DEFAULT
    """Class of the request, which has objectives and a weight; see `core/request_classes.py`."""
    seconds: float | None = None
    """Time from its arrival after which its client gives up; None if the client did not say."""
    waited: float = 0.0
    """Seconds of `--queue-seconds` that it has used up so far, because no worker was ready."""
    ttft_seconds: float | None = None
    """Time from its arrival until which its client wants the first token; None if the client did not say."""
    cache_key: str = ""
    """The client's `prompt_cache_key`; "" if there is none."""
    background: bool = False
    """Whether nobody waits for the sequence, so that it may only use what is idle."""
    dropped_tokens: int = 0
    """Number of the prompt's last tokens that later prompts probably do not have."""
    kind: Kind = common_pb2.WORK_KIND_GENERATE
    follows: bool = False
    """Whether another sequence of the same request was started before, so that its client is being served already."""
    trace: SequenceTrace = field(default_factory=SequenceTrace)
    span: Span = field(default_factory=get_current_span)
    context: Context = field(init=False)
    """The prompt and all tokens that have come."""
    generated: list[int] = field(default_factory=list)
    attempts: int = 0
    """Attempts that have been started, including those that no worker admitted."""
    failures: Failures = Failures()
    """Failed attempts that count against the sequence."""
    failed_at: float = 0.0
    """When the last failure came that may count, on time.monotonic(); before any failure, when the sequence arrived."""
    failed_on: str = ""
    """Id of the worker of this failure."""
    generated_before: int = 0
    """Tokens that had come before the current attempt."""
    heard_before: int = 0
    """Tokens of other sequences that this gateway had received when the current attempt began."""
    last_failure: str = ""
    """Why the last attempt failed; "" if none has. The error itself knows the sequence by its traceback."""
    unreachable_since: float | None = None
    """When it began to wait for a worker to come back, on time.monotonic(); None while workers are only full."""
    is_left_behind: bool = False
    """Whether the last search found workers, but none with the weights that computed the first results."""
    refused_since: float | None = None
    """When workers began to refuse an encoding for lack of room, on time.monotonic(); None if tokens came since."""
    scored: int = 0
    """Prompt tokens whose logprobs have come."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an attempt failed."""

    def __post_init__(self) -> None:
        self.context = Context(self.prompt_ids, self.cache_salt, self.media, shared_tokens=self.shared_tokens)
        self.failed_at = self.trace.arrived

    @property
    def context_tokens(self) -> int:
        """Tokens of the prompt and the longest answer together."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def kept_tokens(self) -> int:
        """Tokens of the prompt with which later prompts probably begin; 0 if none are expected."""
        if self.background or self.kind != common_pb2.WORK_KIND_GENERATE:
            return 0
        return len(self.prompt_ids) - self.dropped_tokens

    @property
    def needs_scores(self) -> bool:
        """Whether the whole prompt has to be computed, because its logprobs are requested and have not all come."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and self.scored < len(self.prompt_ids)

    def work(self, model: str, tails: Sequence[int] = (), ttft_seconds: float | None = None) -> common_pb2.Work:
        """Begin the next attempt and return its work for the workers.

        Args:
            tails: lengths at which requests ended.
            ttft_seconds: time from now within which the first token is wanted; None if there is no objective.
        """
        self.attempts += 1
        self.generated_before = len(self.generated)
        sampling = self.sampling
        if not self.needs_scores:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return common_pb2.Work(
            key=key_to_pb(Key(self.request_id, self.attempts, 1)),
            model=model,
            token_ids=self.context.token_ids,
            prompt_tokens=len(self.prompt_ids),
            sampling=sampling_to_pb(sampling),
            cache_salt=self.cache_salt,
            shared_tokens=self.shared_tokens,
            priority=self.priority,
            background=self.background,
            ttft_seconds=ttft_seconds,
            kind=self.kind,
            media=[span_to_pb(span) for span in self.media],
            tails=tails,
            kept_tokens=0 if self.generated else self.kept_tokens,  # an earlier attempt has kept them
        )

    def end(self) -> FinishReason | None:
        """Return the finish reason that the tokens imply, if a worker failed before it could report it."""
        if self.kind == common_pb2.WORK_KIND_SCORE:
            return None if self.needs_scores else FinishReason.LENGTH
        if self.generated and self.sampling.ends(self.generated[-1], len(self.generated)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= self.sampling.max_tokens else None

    def step(self, attempt: AttemptTrace) -> ProgressStep:
        """Return how far the sequence has got after an attempt.

        The first token of an attempt counts only if others followed. It comes from a prefill worker, so a sequence at
        which decode workers fail would get on by one token with each attempt.
        """
        decoded = len(self.generated) if len(self.generated) > self.generated_before + 1 else self.failures.step.tokens
        prompt = len(self.prompt_ids)
        return ProgressStep(
            decoded, prompt if self.generated else min(prompt, attempt.cached_tokens + attempt.chunks.tokens)
        )

    def place(self) -> str:
        """Return where in its answer the sequence is, for messages."""
        return f"after {len(self.generated)} tokens" if self.generated else "before its first token"

    def unreachable(self) -> UnavailableError:
        """Return the error for a sequence if no worker that fits could be reached in time."""
        if self.is_left_behind:
            return UnavailableError(
                f"the request was given up {self.place()}, because no worker has the weights that began its answer: "
                "the model has been replaced; send the request again"
            )
        return UnavailableError(f"{self.last_failure or 'no worker has come back in time'}; try again later")

    def note(self, event: Event, trace: AttemptTrace) -> Event | None:
        """Record an event and return the part that the client has not seen yet; None if there is none."""
        match event:
            case Generated(tokens):
                if not self.generated:
                    self.span.add_event("first token")
                token_ids = [token.id for token in tokens]
                self.refused_since = None
                self.generated += token_ids
                self.context.token_ids += token_ids
                trace.token_times.append(time.monotonic())
                trace.token_counts.append(len(tokens))
                trace.tokens += len(tokens)
            case HandedOver():
                trace.handed_over = time.monotonic()
                self.span.add_event("handoff")
            case PromptScores():
                trace.scores += len(event.tokens)
                return self._new_scores(event)
        return event

    def _new_scores(self, scores: PromptScores) -> PromptScores | None:
        """Return the scores that no earlier attempt has reported; None if there are none."""
        fresh = scores.tokens[max(0, self.scored - scores.first) :]
        if not fresh:
            return None
        first = scores.first + len(scores.tokens) - len(fresh)
        self.scored = first + len(fresh)
        return PromptScores(first, fresh)
