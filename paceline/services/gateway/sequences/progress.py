"""The progress of a sequence: a value that events advance. Pure. Instants are of time.monotonic(), in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from paceline.services.gateway.sequences.attempt import Ended, Generated, HandedOver, PooledRows, PromptScores
from paceline.services.gateway.sequences.failures import Cause, Failure, Failures


@dataclass(frozen=True, slots=True)
class AttemptQueued:
    """Event: an attempt begins to wait for workers."""

    heard: int
    """Number of tokens of other sequences that this gateway has received since its start."""


@dataclass(frozen=True, slots=True)
class WorkerWaited:
    """Event: a worker is ready, so the sequence may join the queue."""

    seconds: float
    """Part of `--queue-seconds` that the sequence has spent waiting for a ready worker, in all its attempts, in
    seconds."""


@dataclass(frozen=True, slots=True)
class NobodyFound:
    """Event: a search has found no worker that has room for the sequence."""

    at: float
    is_busy: bool
    """Whether a worker that fits the sequence exists and might have room later."""
    is_left_behind: bool
    """Whether there are workers, but none with the weights that computed the first results."""


@dataclass(frozen=True, slots=True)
class AttemptAsked:
    """Event: workers are asked to admit an attempt."""

    generated: int
    """Number of tokens that earlier attempts have generated."""


@dataclass(frozen=True, slots=True)
class AttemptAdmitted:
    """Event: workers have admitted the attempt."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """Event: the sequence leaves a worker that drains. It does not count as a failure."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """Event: an attempt has failed on a worker."""

    at: float
    failure: Failure
    worker_id: str
    reason: str
    is_of_link: bool = False
    """Whether a link between hosts failed. Then the worker may serve the sequence together with workers elsewhere."""


@dataclass(frozen=True, slots=True)
class EncodingRefused:
    """Event: no worker had room for an encoding of the sequence."""

    at: float


ProgressEvent: TypeAlias = (
    Generated
    | PromptScores
    | PooledRows
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
    """The progress of a sequence. Its tokens are not here but in lists of `SequenceRun`."""

    failed_at: float
    """Instant of the last failure that may count against the sequence; its arrival if there was no failure."""
    waited: float = 0.0
    """Part of `--queue-seconds` that the sequence has spent waiting for a ready worker so far, in seconds."""
    attempts: int = 0
    """Number of attempts that have been started, including attempts that no worker admitted."""
    generated_before: int = 0
    """Number of tokens that earlier attempts have generated."""
    heard_before: int = 0
    """Number of tokens of other sequences that this gateway had received when the current attempt began."""
    scored: int = 0
    """Number of prompt tokens whose logprobs have come."""
    failures: Failures = Failures()
    """Failed attempts that count against the sequence."""
    failed_on: str = ""
    """Id of the worker at the last failure that may count against the sequence; "" if there was none."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an attempt failed."""
    last_failure: str = ""
    """Reason why the last attempt failed; "" if no attempt has failed. Only the text is kept, because the error's
    traceback would keep the sequence in memory."""
    unreachable_since: float | None = None
    """Instant since which no worker that fits the sequence can be reached; None if such workers exist but are full."""
    is_left_behind: bool = False
    """Whether the last search found workers, but none with the weights that computed the first results."""
    refused_since: float | None = None
    """Instant since which workers have refused an encoding for lack of room; None if tokens have come since then."""

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
