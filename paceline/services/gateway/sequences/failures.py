"""The rule by which a request is given up because of its own failures. Pure.

Before its deadline, a request is given up only if the request itself seems to cause its failures: several attempts have
failed at the same step. The end of a worker process says little about a request, because workers also end for other
reasons. So a worker's end counts against the request only if nothing else explains it. Both must hold:

- since the request's previous failure, no worker has ended that did not run the request, and
- other requests made progress during the attempt, or there were no other requests.

Two requests that both crash their workers would excuse each other's failures forever. So at most `MOST_EXCUSED` ends at
one step are excused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

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
