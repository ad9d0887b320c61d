"""One batch and its states, as pure logic.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed | expired
        │              │
        │              ├─▶ cancelling ─▶ cancelled
        └─▶ failed     └─▶ failed: the input file is gone

A batch that is cancelled while it is validated goes to cancelling, too. When a batch's window ends, it is finalized:
lines without an answer get an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]

NEXT: Mapping[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling"}),
    "in_progress": frozenset({"finalizing", "failed", "cancelling"}),
    "finalizing": frozenset({"completed", "expired", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
"""The states that may follow each state."""
ACTIVE: tuple[Status, ...] = tuple(status for status, following in NEXT.items() if following)
"""The states that other states may follow: those of a batch that has not ended."""
STATUSES: tuple[Status, ...] = tuple(NEXT)

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""The routes that the lines of a batch may name."""

_UNITS = {"m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_SECONDS = 30 * 86400


class TransitionError(Exception):
    """A batch cannot go from its state to the wanted one."""


@dataclass(frozen=True, slots=True)
class LineError:
    """A fault of a batch's input file, as clients see it."""

    code: str
    message: str
    line: int | None = None
    """Number of the faulty line, from 1; None if the fault concerns the whole file."""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. Times are seconds since the epoch."""

    id: str
    owner: str
    """Digest of the API key that made it."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created: float
    expires: float
    """End of the completion window."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_seconds: float | None = None
    """Seconds for which the files of answers are kept; None for the time of other files."""
    status: Status = "validating"
    total: int = 0
    completed: int = 0
    """Number of lines that were answered with status 200."""
    failed: int = 0
    """Number of lines that were answered with an error, or not at all before the window ended."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Instant at which the batch entered each of its states."""
    is_expired: bool = False
    """Whether the window ended before all lines had an answer."""
    unanswered: int = 0
    """Number of lines that had no answer when the window ended. `failed` includes them."""
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE

    @property
    def is_answered(self) -> bool:
        """Whether every line of the batch has an answer."""
        return self.completed + self.failed >= self.total

    def asks_the_same(self, other: Batch) -> bool:
        """Return whether another batch comes from an equal request."""
        wanted = ("owner", "endpoint", "input_file_id", "completion_window", "metadata", "output_seconds")
        return all(getattr(self, name) == getattr(other, name) for name in wanted)

    def moved(self, status: Status, now: float, **changes: Any) -> Batch:
        """Return the batch in a new state. Raises TransitionError if this state may not follow the present one.

        Args:
            changes: values of other fields that change, too.
        """
        if status not in NEXT[self.status]:
            raise TransitionError(f"a batch that is {self.status} cannot become {status}")
        return dataclasses.replace(self, status=status, times={**self.times, status: now}, **changes)

    def to_api(self) -> Json:
        """Return the batch as the JSON object of OpenAI's API."""

        def at(status: Status) -> int | None:
            return int(self.times[status]) if status in self.times else None

        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": [dataclasses.asdict(error) for error in self.errors]}
            if self.errors
            else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created),
            "in_progress_at": at("in_progress"),
            "expires_at": int(self.expires),
            "finalizing_at": at("finalizing"),
            "completed_at": at("completed"),
            "failed_at": at("failed"),
            "expired_at": at("expired"),
            "cancelling_at": at("cancelling"),
            "cancelled_at": at("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": dict(self.metadata) or None,
        }


def window_seconds(window: str) -> int | None:
    """Return the seconds of a completion window such as "24h", "90m" or "2d"; None if it is not valid."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    return seconds if 0 < seconds <= MAX_WINDOW_SECONDS else None
