"""The claim of a request on the queue: its owner, its priority and, if it has to wait, its demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.request_classes import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The work and the deadlines of a request that has to wait. Instants are on time.monotonic(), in seconds."""

    work: float = 1.0
    """Work of the request in tokens: the uncached tokens of its prompt plus the expected length of its answer."""
    prompt_tokens: int = 0
    """Number of tokens of its prompt that no host has cached."""
    prompt_seconds: float = 0.0
    """Time in which an idle worker would compute the prompt, in seconds."""
    first_token_by: float | None = None
    """Instant until which the first token meets the request's objective; None without an objective."""
    percentile: float = 0.99
    """Share of requests that should meet the objective, from 0 to 1."""
    deadline: float | None = None
    """Instant at which the client gives up; None if the client did not say."""
    waited: float = 0.0
    """Seconds that the request waited for a ready worker before it joined the queue."""
    fingerprint: int = 0
    """A hash of the request, by which it is recognised when its client sends it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClaim:
    """The claim of a request that wants to be admitted."""

    owner: str = ""
    """Digest of the request's API key. Keys of equal priority share the workers by their weights."""
    weight: float = 1.0
    priority: int = 0
    """Lower is more urgent."""
    request_class: str = DEFAULT
    """Name of the request's class, for metrics."""
    first: bool = False
    """Whether the request was admitted before and lost its worker. Such a request waits without a time limit."""
    patient: bool = False
    """Whether the request's client is already being served. Such a request waits without a time limit."""
    background: bool = False
    """Whether it is a background request, which no client waits for. It never joins the queue: it is refused if other
    requests wait or if no worker has room, and its caller tries again later. If it is also `patient`, it tries until a
    worker has room."""
    is_stranded: Callable[[], bool] = lambda: False
    """Function that returns whether no present worker can ever take the request. Then other requests do not wait for
    it, even if it is `first`."""
    measure: Callable[[], Demand] = Demand
    """Function that computes the demand of the request. It is expensive, so it is called only if the request has to
    wait."""

    @property
    def is_ordinary(self) -> bool:
        """Whether the request may be refused while it waits."""
        return not (self.first or self.patient)


ORDINARY = QueueClaim()
"""The claim of a request without an API key and without an objective."""
