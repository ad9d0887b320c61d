"""The progress of a sequence: a value that events advance. Pure. Instants are of time.monotonic(), in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from paceline.services.gateway.sequences.attempt import Ended, Generated, HandedOver, PromptScores
from paceline.services.gateway.sequences.failures import Cause, Failure, Failures


@dataclass(frozen=True, slots=True)
class AttemptQueued:
    """An attempt begins to wait for workers."""

    heard: int
    """Tokens of other sequences that this gateway has received up to now."""


@dataclass(frozen=True, slots=True)
class WorkerWaited:
    """A worker is ready, so that the sequence may join the queue."""

    seconds: float
    """Seconds of `--queue-seconds` that the sequence has used up in all, because no worker was ready."""


@dataclass(frozen=True, slots=True)
class NobodyFound:
    """A search for workers has found none that has room."""

    at: float
    is_busy: bool
    """Whether a worker might have room later."""
    is_left_behind: bool
    """Whether there are workers, but none with the weights that computed the first results."""


@dataclass(frozen=True, slots=True)
class AttemptAsked:
    """Workers are asked to admit an attempt."""

    generated: int
    """Tokens that earlier attempts have generated."""


@dataclass(frozen=True, slots=True)
class AttemptAdmitted:
    """Workers have admitted the attempt."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The sequence leaves a worker that drains. This is no failure."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt has failed on a worker."""

    at: float
    failure: Failure
    worker_id: str
    reason: str
    is_of_link: bool = False
    """Whether a link between hosts failed, so that the worker may serve the sequence with other ones."""


@dataclass(frozen=True, slots=True)
class EncodingRefused:
    """No worker had room for an encoding."""

    at: float


ProgressEvent: TypeAlias = (
    Generated
    | PromptScores
    | HandedOver
    | Ended
    | AttemptQueued
    | WorkerWaited
    | NobodyFound
    | AttemptAsked
    | AttemptAdmitted
    | WorkerLeft
    | AttemptFailed
    | EncodingRefused
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceProgress:
    """Everything that a sequence has come to, but its tokens, which it keeps in lists."""

    failed_at: float
    """When the last failure came that may count; before any failure, when the sequence arrived."""
    waited: float = 0.0
    """Seconds of `--queue-seconds` that it has used up so far, because no worker was ready."""
    attempts: int = 0
    """Attempts that have been started, including those that no worker admitted."""
    generated_before: int = 0
    """Tokens that had come before the current attempt."""
    heard_before: int = 0
    """Tokens of other sequences that this gateway had received when the current attempt began."""
    scored: int = 0
    """Prompt tokens whose logprobs have come."""
    failures: Failures = Failures()
    """Failed attempts that count against the sequence."""
    failed_on: str = ""
    """Id of the worker of the last failure that may count."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an attempt failed."""
    last_failure: str = ""
    """Why the last attempt failed; "" if none has. The error itself knows the sequence by its traceback."""
    unreachable_since: float | None = None
    """When it began to wait for a worker to come back; None while workers are only full."""
    is_left_behind: bool = False
    """Whether the last search found workers, but none with the weights that computed the first results."""
    refused_since: float | None = None
    """When workers began to refuse an encoding for lack of room; None if tokens came since."""

    def after(self, event: ProgressEvent) -> SequenceProgress:
        """Return the progress after an event."""
        match event:
            case Generated():  # the first case and without a copy, because it comes for each token
                return self if self.refused_since is None else replace(self, refused_since=None)
            case PromptScores(first, tokens):
                return replace(self, scored=max(self.scored, first + len(tokens)))
            case AttemptQueued(heard):
                return replace(self, heard_before=heard)
            case WorkerWaited(seconds):
                return replace(self, waited=seconds)
            case NobodyFound(at, is_busy, is_left_behind):
                since = None if is_busy else self.unreachable_since or at
                return replace(self, unreachable_since=since, is_left_behind=is_left_behind)
            case AttemptAsked(generated):
                return replace(self, attempts=self.attempts + 1, generated_before=generated)
            case AttemptAdmitted():
                return replace(self, unreachable_since=None)
            case WorkerLeft(worker_id):
                return replace(self, failed=self.failed | {worker_id})
            case AttemptFailed():
                return self._after_failure(event)
            case EncodingRefused(at):
                return replace(self, refused_since=self.refused_since or at)
        return self

    def _after_failure(self, event: AttemptFailed) -> SequenceProgress:
        may_count = event.failure.cause is not Cause.ELSEWHERE
        return replace(
            self,
            failures=self.failures.after(event.failure),
            last_failure=event.reason,
            # Placements without a failed link remain. At worst a decode worker computes the prompt itself.
            failed=self.failed if event.is_of_link else self.failed | {event.worker_id},
            failed_at=event.at if may_count else self.failed_at,
            failed_on=event.worker_id if may_count else self.failed_on,
        )
