"""The events of a sequence, its progress, which they advance, and the failures that count against it. Pure.

Instants are of time.monotonic(), in seconds. Before its deadline, a request is given up only if the request itself
seems to cause its failures: several attempts have failed at the same step. The end of a worker process says little
about a request, because workers also end for other reasons. So a worker's end counts against the request only if
nothing else explains it. Both must hold:

- since the request's previous failure, no worker has ended that did not run the request, and
- other requests made progress during the attempt, or there were no other requests.

Two requests that both crash their workers would excuse each other's failures forever. So at most `MOST_EXCUSED` ends at
one step are excused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from paceline.core.types import FinishReason, Token


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of the prompt tokens at positions [first, first + len(tokens))."""

    first: int
    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class Generated:
    """Event: one or more generated tokens that arrived in one message."""

    tokens: list[Token]


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Event: the results of some inputs have come."""

    inputs: Sequence[int]
    """Indices of the inputs. An attempt counts the inputs of its own work, a sequence those of its bundle."""
    rows: Sequence[int]
    """Number of rows of each of these inputs."""
    dim: int
    """Number of values in a row."""
    data: bytes
    """The rows of all these inputs, as 32-bit floats, little endian."""
    errors: Mapping[int, str]
    """Reasons why some of these inputs have no result, by their indices."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Event: the prefill worker has filled the blocks, and the gateway has told the decode worker."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: the sequence has ended. No event follows."""

    reason: FinishReason


Event = PromptScores | PooledRows | Generated | HandedOver | Ended


MOST_EXCUSED = 20
"""Largest number of workers' ends at one step that are excused. It is large, so that a request which is not the cause
makes progress before the limit is reached."""


class ProgressStep(NamedTuple):
    """The progress of a request. Later steps are greater."""

    tokens: int = 0
    """Number of generated tokens that count as progress; `SequenceRun.step` says which ones do."""
    prompt: int = 0
    """Number of prompt tokens that have been computed or were cached."""


class Cause(enum.Enum):
    """The cause of an attempt's end."""

    ELSEWHERE = enum.auto()
    """The request is not the cause: its worker drains or had not begun the request, or a link between hosts failed."""
    WORKER_ENDED = enum.auto()
    """A worker ended, stopped answering, or lost the request's blocks while it ran the request."""
    REQUEST = enum.auto()
    """A worker answered with an error and goes on running."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    step: ProgressStep
    cause: Cause
    others_ended: bool = False
    """Whether workers that did not run the request have ended since the request's previous failure."""
    others_went_on: bool = True
    """Whether other requests made progress during the attempt; also true if there were no other requests."""

    @property
    def is_excused(self) -> bool:
        """Whether something else explains the end of the worker."""
        return self.others_ended or not self.others_went_on


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of one request at its present step that count against it."""

    step: ProgressStep = ProgressStep()
    errors: int = 0
    """Number of attempts that a worker answered with an error and went on running."""
    ends: int = 0
    """Number of attempts during which a worker ended and nothing but the request explains it."""
    excused: int = 0
    """Number of attempts during which a worker ended and something else explains it."""

    @property
    def count(self) -> int:
        return self.errors + self.ends

    def after(self, failure: Failure) -> Failures:
        """Return the failures with one more counted. The counts start at 0 again if the request has made progress."""
        now = Failures(failure.step) if failure.step > self.step else self
        if failure.cause is Cause.ELSEWHERE:
            return now
        if failure.cause is Cause.REQUEST:
            return replace(now, errors=now.errors + 1)
        if failure.is_excused and now.excused < MOST_EXCUSED:
            return replace(now, ends=0 if failure.others_ended else now.ends, excused=now.excused + 1)
        return replace(now, ends=now.ends + 1)


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
