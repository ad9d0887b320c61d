"""Admission control: measures the load of a fleet, and decides which workers may get more requests.

Pure logic: all instants are arguments, of one clock, in seconds. The gateway passes in the events of its attempts
(`sequences/load.py`), and the simulator passes in simulated events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from paceline.core.request_classes import NO_CLASSES, Classes, RequestClass
from paceline.services.gateway.queueing.fair_order import Demand
from paceline.services.gateway.queueing.forecast import UsualAnswers
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement, Snapshot
from paceline.services.gateway.routing.router import PREFILL_TOKENS_PER_SECOND, computing_of

INTERVAL_SECONDS = 1.0
LEAST_GAPS = 50
"""Least number of gaps between tokens in an interval, which also lasts at least INTERVAL_SECONDS. A worker's limit
changes at the end of an interval."""
MARGIN = 0.9
"""A gap counts as long if it is longer than this share of its objective, so that the limit falls before the objective
is missed."""
DECREASE = 0.9
CREDIT_INTERVALS = 10
"""Number of intervals whose allowance of long gaps can be saved up, because a single late step makes many gaps long at
once."""

FED_SECONDS = 0.25
"""Seconds of work in a worker's own queue with which it has enough prompts."""
FED_TOKENS = 1024
"""Prompt tokens in a worker's own queue with which it has enough prompts, if it has not measured its rate yet."""


@dataclass(slots=True)
class _Worker:
    limit: int | None = None
    """Largest number of requests that the worker may have; None while no objective has been missed."""
    began: float = 0.0
    gaps: int = 0
    allowance: float = 0.0
    """Number of gaps of this interval that may be long by the objectives."""
    credit: float = 0.0
    """Unused allowance of earlier intervals: gaps that could have been long and were not."""
    long: int = 0
    peak: int = 0
    """Largest number of requests that the worker had in the interval."""


class DecodeLimits:
    """Limits of the number of requests on each decode worker, by its id, so that times between tokens meet objectives.

    A decode step takes longer the more requests it serves. How much longer depends on the model, the contexts and the
    other load of the machine. So the limit is found by measuring, as TCP finds its window. It falls by a tenth if too
    many gaps between tokens have been long lately. It grows by one after an interval in which the worker had as many
    requests as the limit allows and few gaps were long.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def limited(self) -> list[str]:
        """Return the ids of workers that have a limit."""
        return [worker_id for worker_id, worker in self._workers.items() if worker.limit is not None]

    def has_room(self, worker_id: str, running: int) -> bool:
        """Return whether a worker that now has `running` requests may get another request."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.limit is None:
            return True
        worker.peak = max(worker.peak, min(running, worker.limit))
        return running < worker.limit

    def note(
        self,
        worker_id: str,
        running: int,
        gap: float,
        objective: float,
        percentile: float,
        now: float,
        times: int = 1,
    ) -> None:
        """Count a gap: the time between two successive messages with tokens of one request.

        Args:
            running: number of requests that the worker has now.
            gap: the gap, in seconds.
            objective: longest gap that the request's class wants for a share `percentile` of gaps, in seconds.
            percentile: share of gaps that should meet the objective, from 0 to 1.
            times: number of gaps of this length to count.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(began=now)
        worker.gaps += times
        worker.allowance += times * (1 - percentile)
        worker.long += times * (gap > MARGIN * objective)
        worker.peak = max(worker.peak, running)
        if worker.gaps >= LEAST_GAPS and now >= worker.began + INTERVAL_SECONDS:
            self._workers[worker_id] = _after_interval(worker, now)

    def keep(self, worker_ids: Set[str]) -> None:
        """Forget all workers except these."""
        self._workers = {worker_id: worker for worker_id, worker in self._workers.items() if worker_id in worker_ids}


def _after_interval(worker: _Worker, now: float) -> _Worker:
    """Return the state of a worker at the beginning of its next interval, with the new limit."""
    limit, credit = worker.limit, worker.credit + worker.allowance - worker.long
    if credit < 0:
        credit, limit = 0.0, max(1, int(DECREASE * min(worker.peak, limit or worker.peak)))
    elif limit is not None and worker.peak >= limit and worker.long <= worker.allowance:
        limit += 1
    return _Worker(limit, now, credit=min(credit, CREDIT_INTERVALS * worker.allowance))


def is_fed(worker: Candidate, prompt_tokens: float = math.inf) -> bool:
    """Return whether a worker's own queue has enough prompts that the worker computes before a prompt of this length.

    Requests should wait in the gateway's queue, which is fair. A worker computes the shortest prompts of its own queue
    first. So a worker gets just enough prompts that it never runs out of work. Longer prompts in its queue do not
    count: the worker would compute the new prompt before them, so it should not wait for them in the gateway.

    Args:
        prompt_tokens: length of the new prompt, in tokens.
    """
    return worker.queued_before(prompt_tokens) >= (FED_SECONDS * worker.tokens_per_second or FED_TOKENS)


def are_fed(need: Need, snapshot: Iterable[Candidate]) -> bool:
    """Return whether all workers that could compute a prompt have enough prompts in their own queues. False if there is
    no such worker."""
    if isinstance(snapshot, Snapshot):
        hungriest = snapshot.hungriest(need, FED_SECONDS, FED_TOKENS)
        return hungriest is not None and is_fed(hungriest)
    fitting = [c for c in snapshot if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]
    computing = computing_of(fitting)
    return bool(computing) and all(map(is_fed, computing))


class AdmissionControl:
    """Limits the load of workers, so that the objectives of request classes can be met.

    Args:
        shedder: the load shedder, to which measured times to first token are passed.
        find: function that returns a worker by its id; None if the worker is gone.
        queue_seconds: longest wait in the queue, in seconds.
        classes: objectives and weights of each request class.
    """

    def __init__(
        self,
        shedder: LoadShedder,
        find: Callable[[str], Candidate | None],
        queue_seconds: float,
        classes: Classes = NO_CLASSES,
    ) -> None:
        self._shedder = shedder
        self._find = find
        # Without classes, a request that a worker has room for must not be refused after a wait for its turn.
        self._hold_seconds = queue_seconds / 2 if classes is NO_CLASSES else float("inf")
        self._classes = classes
        self._limits = DecodeLimits()
        self._answers = UsualAnswers()
        self._prefill_rate = PREFILL_TOKENS_PER_SECOND
        """Prefill rate that was reported last by a worker, in tokens per second."""

    def class_of(self, name: str) -> RequestClass:
        """Return a request class by its name. A class that has been removed has no objectives."""
        return self._classes.get(name, RequestClass())

    def demand(
        self,
        *,
        request_class: str,
        owner: str,
        uncached: int,
        max_tokens: int,
        arrived: float,
        deadline: float | None,
        fingerprint: int,
        ttft_seconds: float | None = None,
        waited: float = 0.0,
    ) -> Demand:
        """Return the demand of a request that has to wait: its work and its deadlines.

        Args:
            uncached: number of tokens of the request's context that no host has cached.
            max_tokens: largest number of tokens that the answer may still get.
            ttft_seconds: the request's own objective for its time to first token, in seconds; None if it has none.
            waited: seconds that the request has already waited for a ready worker.
        """
        return Demand(
            work=uncached + self._answers.tokens(owner, max_tokens),
            prompt_tokens=uncached,
            prompt_seconds=uncached / self._prefill_rate,
            first_token_by=self.first_token_by(request_class, arrived, ttft_seconds),
            percentile=self.class_of(request_class).percentile,
            deadline=deadline,
            waited=waited,
            fingerprint=fingerprint,
        )

    def first_token_by(self, request_class: str, arrived: float, ttft_seconds: float | None) -> float | None:
        """Return the instant until which a request's first token is wanted; None without an objective.

        Args:
            arrived: instant at which the request arrived; the result is on the same clock.
            ttft_seconds: the request's own objective for its time to first token, in seconds; None if it has none.
        """
        limits = (self.class_of(request_class).ttft_seconds, ttft_seconds)
        return min((arrived + each for each in limits if each is not None), default=None)

    def full_workers(self) -> frozenset[str]:
        """Return ids of decode workers that must not get more requests, so that running requests meet their objectives.

        A request that lost its worker may go to these workers nevertheless, because its client is already being served.
        """
        limited = [(worker_id, self._find(worker_id)) for worker_id in self._limits.limited()]
        return frozenset(
            worker_id
            for worker_id, worker in limited
            if worker is not None and not self._limits.has_room(worker_id, worker.requests)
        )

    def is_premature(self, need: Need, placement: Placement, snapshot: Iterable[Candidate], waited: float) -> bool:
        """Return whether a prompt should wait in the gateway's queue, because all workers have enough prompts in their
        own queues.

        Args:
            waited: seconds since the request began to wait in the queue.
        """
        if waited > self._hold_seconds:
            return False
        computing = placement.computing
        self._prefill_rate = computing.load.prefill_tokens_per_second or self._prefill_rate
        left = need.prompt_tokens - max(need.cached.values(), default=0)
        if left <= need.local_tokens:
            return False
        # Usually the worker of the placement has little to do, and the others need not be looked at.
        own = self._find(computing.worker_id)
        return (own is None or is_fed(own, left)) and are_fed(need, snapshot)

    def note_first_token(self, seconds: float, uncached: int, now: float) -> None:
        """Count a request that got its first token.

        Args:
            seconds: time from the request's admission to its first token, in seconds.
            uncached: number of tokens of the request's context that were not cached.
        """
        self._shedder.first_tokens.note(seconds, uncached / self._prefill_rate, now)

    def note_gap(
        self, worker_id: str, running: int, gap: float, request_class: str, now: float, times: int = 1
    ) -> None:
        """Count the time between two successive messages with tokens of a request, if its class limits this time.

        Args:
            running: number of requests that the decode worker has now.
            gap: the time between the messages, in seconds.
            times: number of gaps of this length to count.
        """
        wanted = self.class_of(request_class)
        if wanted.itl_seconds is not None:
            self._limits.note(worker_id, running, gap, wanted.itl_seconds, wanted.percentile, now, times)

    def note_answer(self, owner: str, tokens: int) -> None:
        """Count an answer that has ended, to predict the lengths of later answers of the same owner.

        Args:
            tokens: length of the answer.
        """
        self._answers.note(owner, tokens)

    def keep(self, worker_ids: Set[str]) -> None:
        """Forget the measurements of all workers except these."""
        self._limits.keep(worker_ids)
