"""A record of decisions with their inputs, and its replay. A record is text, one JSON value a line.

The first line is a `Start`: objectives, and the state that the planner began with. Every further line is an `Entry`: a
report, the decision from it, and a digest of the state after it. A planner that starts again writes a new `Start`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import InvalidRequestError
from paceline.core.planner.actions import Decision
from paceline.core.planner.memory import PlanningState
from paceline.core.planner.objectives import Objectives
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report

T = TypeVar("T")

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader and writer of a type. Making one takes milliseconds, so it is cached."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(value: object) -> str:
    """Return a value of the planner as one line of JSON."""
    return _adapter(type(value)).dump_json(value).decode()


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value of type `kind` that `to_json` wrote. Raises InvalidRequestError if the text is not such a
    value.
    """
    try:
        value: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"this is no {kind.__name__}: {place or 'the text'}: {first['msg']}") from None
    return value


@dataclass(frozen=True, slots=True)
class Start:
    """The first line of a record: the arguments with which the planner was constructed."""

    objectives: Objectives
    state: PlanningState
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a record after the first one: a report and the decision from it."""

    report: Report
    decision: Decision
    digest: str
    """Digest of the planner's state after the decision."""
    kind: Literal["entry"] = "entry"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A recorded decision, and the decision of this release's planner from the same inputs."""

    line: int
    """Number of the line in the record, from 1."""
    recorded: Decision
    decided: Decision
    same_state: bool
    """Whether the planner's state after the decision also equals the recorded state."""

    @property
    def same(self) -> bool:
        return self.recorded == self.decided and self.same_state


def digest(state: PlanningState) -> str:
    """Return a short digest of a state: equal states have equal digests."""
    return hashlib.sha256(to_json(state).encode()).hexdigest()[:16]


class Recorder:
    """A planner whose decisions are recorded. The caller writes the lines to a file.

    Args:
        planner: the planner, as it is when the record begins.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def start(self) -> str:
        """Return the first line of the record."""
        return to_json(Start(self.planner.objectives, self.planner.state))

    def decide(self, report: Report) -> tuple[Decision, str]:
        """Return the decision from a report, and the line of the record."""
        decision = self.planner.decide(report)
        return decision, to_json(Entry(report, decision, digest(self.planner.state)))


def replay(lines: Iterable[str]) -> Iterator[Replayed]:
    """Decide again from the recorded reports. Yield each new decision together with the recorded decision.

    After a decision that differs, the replay continues with its own state.

    Raises:
        InvalidRequestError: a line does not belong in a record; the message has the line's number.
    """
    planner: Planner | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = from_json(Start, line) if '"kind":"start"' in line[-20:] else from_json(Entry, line)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"line {number}: {error}") from None
        if isinstance(value, Start):
            planner = Planner(value.objectives, value.state)
        elif planner is None:
            raise InvalidRequestError(f"line {number}: a record begins with a line of the kind start")
        else:
            decided = planner.decide(value.report)
            yield Replayed(number, value.decision, decided, digest(planner.state) == value.digest)
