"""The rule by which a request is given up because of its own failures. Pure.

A request whose deadline has not come is given up only if the request itself seems to be the reason of its failures: if
attempts failed again and again at the same step of it. The end of a worker says little about a request, because workers
also end for other reasons. So it counts against the request only if nothing else explains it:

- no worker that did not run the request has ended since the request's failure before, and
- other requests went on during the attempt, or there were no others.

Two requests that both end their workers explain each other's failures in this way. So only the first `MOST_EXCUSED`
ends at a step can be explained.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import NamedTuple

MOST_EXCUSED = 20
"""Largest number of ends of workers at one step that can be explained by something else. It is so large that a request
which is not the reason has made progress before."""


class ProgressStep(NamedTuple):
    """The progress of a request. Later steps are greater."""

    tokens: int = 0
    """Tokens of the answer that count as progress; see `SequenceRun.step`."""
    prompt: int = 0
    """Tokens of the prompt that have been computed."""


class Cause(enum.Enum):
    """The cause of an attempt's end."""

    ELSEWHERE = enum.auto()
    """Nothing that the request did: its worker drains or had not begun, or a link between hosts failed."""
    WORKER_ENDED = enum.auto()
    """A worker ended, stopped answering, or lost the request's blocks while it ran the request."""
    REQUEST = enum.auto()
    """A worker that goes on answered with an error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt."""

    step: ProgressStep
    cause: Cause
    others_ended: bool = False
    """Whether workers that did not run the request have ended since the request's failure before."""
    others_went_on: bool = True
    """Whether other requests made progress during the attempt, or there were none."""

    @property
    def is_excused(self) -> bool:
        """Whether something else explains the end of the worker."""
        return self.others_ended or not self.others_went_on


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of one request at its present step that count against it."""

    step: ProgressStep = ProgressStep()
    errors: int = 0
    """Attempts that ended with an error of a worker that goes on."""
    ends: int = 0
    """Attempts during which a worker ended for no other reason than the request, as far as is known."""
    excused: int = 0
    """Attempts during which a worker ended and something else explained it."""

    @property
    def count(self) -> int:
        return self.errors + self.ends

    def after(self, failure: Failure) -> Failures:
        """Return the failures with one more. A request that has made progress starts again."""
        now = Failures(failure.step) if failure.step > self.step else self
        if failure.cause is Cause.ELSEWHERE:
            return now
        if failure.cause is Cause.REQUEST:
            return replace(now, errors=now.errors + 1)
        if failure.is_excused and now.excused < MOST_EXCUSED:
            return replace(now, ends=0 if failure.others_ended else now.ends, excused=now.excused + 1)
        return replace(now, ends=now.ends + 1)
