"""The claim of a request on the queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.request_classes import DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The needs of a request that has to wait, with their deadlines. Instants are of time.monotonic()."""

    work: float = 1.0
    """Tokens of its prompt that are not cached, and tokens of its answer as far as they can be expected."""
    prompt_tokens: int = 0
    """Tokens of its prompt that are cached nowhere."""
    prompt_seconds: float = 0.0
    """Time to compute its prompt if a worker had nothing else to do."""
    first_token_by: float | None = None
    """Instant after which the first token misses the objective of the request's class; None without an objective."""
    percentile: float = 0.99
    """Share of requests that meet the objective."""
    deadline: float | None = None
    """Instant at which the client gives up; None if the client did not say."""
    waited: float = 0.0
    """Seconds for which it has waited before it came into the queue, because no worker was ready."""
    fingerprint: int = 0
    """A hash by which the request is recognised if it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueClaim:
    """A request that wants to be admitted."""

    owner: str = ""
    """Digest of its key. Keys of equal priority share what there is by their weights."""
    weight: float = 1.0
    priority: int = 0
    """Lower is more urgent."""
    request_class: str = DEFAULT
    """Name of its class, for metrics."""
    first: bool = False
    """Whether the request was admitted before and lost its worker. Such a request waits without a time limit."""
    patient: bool = False
    """Whether the request's client is already being served. Such a request waits without a time limit."""
    background: bool = False
    """Whether nobody waits for it. Then it is never in the queue: it is refused if others wait or if there is no room,
    and its caller tries again later. A patient one tries until there is room."""
    is_stranded: Callable[[], bool] = lambda: False
    """Function that returns whether none of the present workers can ever take the request, though they may serve other
    requests. If the request is `first`, the others do not wait for it then."""
    measure: Callable[[], Demand] = Demand
    """Function that returns the demand of the request. The call takes some time, so it is made only if the request has
    to wait."""

    @property
    def is_ordinary(self) -> bool:
        """Whether the request may be refused while it waits."""
        return not (self.first or self.patient)


ORDINARY = QueueClaim()
"""A request without a key and without an objective."""
