"""The claims of requests on the queue, and their order: by priority, and fair among the keys of one priority. Pure.

Among requests of equal priority this is start-time fair queueing (Goyal, Vin and Cheng, 1996). Each key has a virtual
time, which grows by work / weight whenever one of its requests is served. The key with the least virtual time is served
next. A key that begins to wait starts at the virtual time of the queue. So it pays nothing for work that was served
while the queue was empty, and gains nothing from a time in which it sent no requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

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


_TICKETS = itertools.count()


def next_ticket() -> int:
    """Return a ticket for an arriving request: a number that is larger than all tickets before."""
    return next(_TICKETS)


@dataclass(slots=True, eq=False)
class WaitingEntry:
    """A request in the queue."""

    owner: str = ""
    """Owner of the request: the digest of its API key. Requests of the same owner and priority keep their order."""
    weight: float = 1.0
    """Weight of the owner: its share of the served work is in proportion to this, among owners that wait."""
    priority: int = 0
    """Lower is more urgent."""
    work: float = 1.0
    """Work of the request in tokens: the uncached tokens of its prompt plus the expected length of its answer."""
    ticket: int = field(default_factory=next_ticket)
    """Number that orders requests by their arrival; the smaller one came earlier."""


E = TypeVar("E", bound=WaitingEntry)

Lane = tuple[int, str]
"""A priority and an owner, whose requests are served in the order of their arrival."""


class Expected(NamedTuple):
    """Work of one lane that is expected to join the queue, because its requests were told to come back."""

    work: float
    weight: float


NOTHING_EXPECTED: Mapping[Lane, Expected] = {}


class _Flow(Generic[E]):
    """The waiting requests of one owner and priority."""

    def __init__(self, start: float) -> None:
        self.start = start
        """The owner's virtual time, at which its first request will be served."""
        self.entries: dict[E, None] = {}
        """The owner's waiting requests, in the order of arrival."""
        self.work = 0.0
        self.weight = 1.0

    def last_start(self) -> float:
        """Return the virtual time at which the last request will be served."""
        last = next(reversed(self.entries))
        return self.start + (self.work - last.work) / self.weight


class _Level(Generic[E]):
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        self.virtual = 0.0
        """Virtual time of the request that was served last."""
        self.flows: dict[str, _Flow[E]] = {}
        self.finished: dict[str, float] = {}
        """Virtual times of owners that have no waiting requests now and whose time is later than `virtual`."""

    def start_of(self, owner: str) -> float:
        flow = self.flows.get(owner)
        return max(self.virtual, self.finished.get(owner, 0.0)) if flow is None else flow.start


class FairOrder(Generic[E]):
    """Waiting requests in the order in which they are served.

    While requests of several owners with one priority wait, the work that an owner has been served, divided by its
    weight, differs between two of them by at most one request of each.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level[E]] = {}

    def __len__(self) -> int:
        return sum(len(flow.entries) for level in self._levels.values() for flow in level.flows.values())

    def __iter__(self) -> Iterator[E]:
        """Iterate over the waiting requests, in no particular order."""
        for level in self._levels.values():
            for flow in level.flows.values():
                yield from flow.entries

    def add(self, entry: E) -> None:
        """Add a request. It waits behind earlier requests of the same owner and priority."""
        level = self._levels.setdefault(entry.priority, _Level())
        flow = level.flows.get(entry.owner)
        if flow is None:
            flow = level.flows[entry.owner] = _Flow(level.start_of(entry.owner))
            level.finished.pop(entry.owner, None)
        in_order = not flow.entries or next(reversed(flow.entries)).ticket < entry.ticket
        flow.entries[entry] = None
        if not in_order:
            flow.entries = dict.fromkeys(sorted(flow.entries, key=lambda each: each.ticket))
        flow.work += entry.work
        flow.weight = entry.weight

    def serve(self, entry: E) -> None:
        """Take a request out because it is served, and charge its work to its owner."""
        level = self._levels[entry.priority]
        flow = level.flows[entry.owner]
        level.virtual = max(level.virtual, flow.start)
        flow.start += entry.work / entry.weight
        level.finished = {owner: at for owner, at in level.finished.items() if at > level.virtual}
        self.remove(entry)

    def remove(self, entry: E) -> None:
        """Take a request out that is not served. Its owner is not charged."""
        level = self._levels[entry.priority]
        flow = level.flows[entry.owner]
        del flow.entries[entry]
        flow.work -= entry.work
        if not flow.entries:
            del level.flows[entry.owner]
            level.finished[entry.owner] = flow.start
            if not level.flows:
                del self._levels[entry.priority]

    def first(self, may: Callable[[E], bool] = lambda _: True) -> E | None:
        """Return the request to serve next among those for which `may` is true; None if there is no such request."""
        for priority in sorted(self._levels):
            found = [head for flow in self._levels[priority].flows.values() if (head := _head(flow, may)) is not None]
            if found:
                return min(found, key=lambda head: (head[0], head[1].ticket))[1]
        return None

    def last(self, may: Callable[[E], bool] = lambda _: True) -> E | None:
        """Return the request to refuse if there are too many requests; None if `may` is false for all of them.

        The request has the least urgent priority, and is the last request of the owner whose waiting work is largest
        in relation to its weight. Requests for which `may` is false are passed over.
        """
        for priority in sorted(self._levels, reverse=True):
            flows = sorted(self._levels[priority].flows.values(), key=_Flow.last_start, reverse=True)
            for flow in flows:
                found = next((entry for entry in reversed(flow.entries) if may(entry)), None)
                if found is not None:
                    return found
        return None

    def ahead(self, entry: E, expected: Mapping[Lane, Expected] = NOTHING_EXPECTED) -> float:
        """Return the work in tokens that is served before a request if no other request arrives.

        The request may be in the queue or not. The result is exact up to one request of each owner.

        Args:
            expected: work that will join the queue, by lane, behind the requests of the lane that wait now.
        """
        ahead = sum(work for (priority, _), (work, _) in expected.items() if priority < entry.priority)
        for priority, level in self._levels.items():
            if priority < entry.priority:
                ahead += sum(flow.work for flow in level.flows.values())
        level = self._levels.get(entry.priority) or _Level()
        own, flow = 0.0, level.flows.get(entry.owner)
        if flow is not None and entry in flow.entries:
            own = sum(each.work for each in itertools.takewhile(lambda each: each is not entry, flow.entries))
        else:
            own = (flow.work if flow else 0.0) + expected.get((entry.priority, entry.owner), Expected(0, 1)).work
        at = level.start_of(entry.owner) + own / entry.weight
        ahead += own
        lanes = {*level.flows, *(owner for priority, owner in expected if priority == entry.priority)} - {entry.owner}
        for owner in lanes:
            other = level.flows.get(owner)
            later = expected.get((entry.priority, owner), Expected(0, 1))
            all_work = other.work if other else 0.0
            part = (at - level.start_of(owner)) * (other.weight if other else later.weight)
            if part >= 0:
                one = other.work / len(other.entries) if other else 0.0  # the request that has begun by then
                # An owner whose requests were refused wants more than its share, so it will use all of that.
                ahead += part + one if later.work else min(all_work, part + one)
        return ahead


def _head(flow: _Flow[E], may: Callable[[E], bool]) -> tuple[float, E] | None:
    """Return the first request of a flow for which `may` is true, after the virtual time at which it is served."""
    at = flow.start
    for entry in flow.entries:
        if may(entry):
            return at, entry
        at += entry.work / entry.weight
    return None
