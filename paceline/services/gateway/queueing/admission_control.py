"""Measures of the load of a fleet, and their consequences for requests that want to be admitted.

Pure logic: all instants are arguments, of one clock, in seconds. The gateway feeds it with events of its attempts
(`load_control.py`), and the simulator with events of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from paceline.core.request_classes import NO_CLASSES, Classes, RequestClass
from paceline.services.gateway.queueing.claim import Demand
from paceline.services.gateway.queueing.forecast import UsualAnswers
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement, Snapshot
from paceline.services.gateway.routing.router import PREFILL_TOKENS_PER_SECOND

INTERVAL_SECONDS = 1.0
LEAST_GAPS = 50
"""An interval lasts at least INTERVAL_SECONDS and has at least LEAST_GAPS gaps."""
MARGIN = 0.9
"""A gap above this part of its objective is long, so that the limit is found before the objective is missed."""
DECREASE = 0.9
CREDIT_INTERVALS = 10
"""Intervals for which allowance that was not used is kept. A single late step makes many gaps long at once."""

FED_SECONDS = 0.25
"""Time for which the prompts in a worker's own queue keep it busy."""
FED_TOKENS = 1024
"""Tokens of prompts that keep a worker busy if it has not measured its rate yet."""


@dataclass(slots=True)
class _Worker:
    limit: int | None = None
    """None while no objective has been missed."""
    began: float = 0.0
    gaps: int = 0
    allowance: float = 0.0
    """Number of gaps of the interval that may be long."""
    credit: float = 0.0
    """Number of gaps that might have been long in earlier intervals and were not."""
    long: int = 0
    peak: int = 0
    """Largest number of requests that the worker had in the interval."""


class DecodeLimits:
    """The most requests of each decode worker for which the time between tokens stays within objectives.

    A decode step takes longer the more requests it serves, and how much longer depends on the model, the contexts and
    what else the machine does. So the limit is found by measuring, as TCP finds its window: it falls by a tenth when
    too many gaps between tokens have been long lately, and grows by one after an interval in which it was used and they
    were not. All workers are known by their ids.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def limited(self) -> list[str]:
        """Return the workers that have a limit."""
        return [worker_id for worker_id, worker in self._workers.items() if worker.limit is not None]

    def has_room(self, worker_id: str, running: int) -> bool:
        """Return whether a worker that has `running` requests may get another one."""
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
        """Count times between two messages with tokens of a request.

        Args:
            running: requests that the worker has now.
            gap: seconds.
            objective: seconds that a share `percentile` of the request's gaps may take at most.
            times: number of gaps that took so long.
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
        """Forget all other workers."""
        self._workers = {worker_id: worker for worker_id, worker in self._workers.items() if worker_id in worker_ids}


def _after_interval(worker: _Worker, now: float) -> _Worker:
    """Return the beginning of the next interval, with its limit."""
    limit, credit = worker.limit, worker.credit + worker.allowance - worker.long
    if credit < 0:
        credit, limit = 0.0, max(1, int(DECREASE * min(worker.peak, limit or worker.peak)))
    elif limit is not None and worker.peak >= limit and worker.long <= worker.allowance:
        limit += 1
    return _Worker(limit, now, credit=min(credit, CREDIT_INTERVALS * worker.allowance))


def is_fed(worker: Candidate, prompt_tokens: float = math.inf) -> bool:
    """Return whether a worker has enough prompts in its own queue that go before a prompt of so many tokens.

    Requests wait in the gateway's queue, which is fair, and not in the workers', where the shortest prompts go first.
    So a worker gets just enough prompts that it never waits for the next one. Only prompts that go before a new one
    count. So a short prompt does not wait here until a worker has computed a long one, before which it would be
    computed there.
    """
    return worker.queued_before(prompt_tokens) >= (FED_SECONDS * worker.tokens_per_second or FED_TOKENS)


def are_fed(need: Need, snapshot: Iterable[Candidate]) -> bool:
    """Return whether all workers that could compute a prompt have enough prompts. False if there is no such worker."""
    if isinstance(snapshot, Snapshot):
        hungriest = snapshot.hungriest(need, FED_SECONDS, FED_TOKENS)
        return hungriest is not None and is_fed(hungriest)
    fitting = [c for c in snapshot if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]
    computing = [c for c in fitting if c.member.role == "prefill"] or [c for c in fitting if c.member.role == "decode"]
    return bool(computing) and all(map(is_fed, computing))


class AdmissionControl:
    """Keeps the load of workers such that objectives can be met.

    Args:
        shedder: gets the times to first token.
        find: returns a worker by its id; None if it is gone.
        queue_seconds: the longest time in the queue.
        classes: the objectives and weights, by class.
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
        """Tokens per second that a worker computes of prompts, as they were reported last."""

    def class_of(self, name: str) -> RequestClass:
        """Return a class. A class that does not exist any more has no objectives."""
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
        """Return what a request that has to wait needs, and until when.

        Args:
            uncached: tokens of its context that are cached nowhere.
            max_tokens: the most tokens that are left of its answer.
            ttft_seconds: an objective of its own.
            waited: seconds for which it has waited already, because no worker was ready.
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
        """Return when the first token of a request is wanted, on the clock of `arrived`; None without an objective.

        Args:
            ttft_seconds: an objective of its own.
        """
        limits = (self.class_of(request_class).ttft_seconds, ttft_seconds)
        return min((arrived + each for each in limits if each is not None), default=None)

    def full_workers(self) -> frozenset[str]:
        """Return the ids of decode workers that must not get more requests, so that objectives of running ones hold.

        A request that lost its worker may go to them all the same, because its client is being served already.
        """
        limited = [(worker_id, self._find(worker_id)) for worker_id in self._limits.limited()]
        return frozenset(
            worker_id
            for worker_id, worker in limited
            if worker is not None and not self._limits.has_room(worker_id, worker.requests)
        )

    def is_premature(self, need: Need, placement: Placement, snapshot: Iterable[Candidate], waited: float) -> bool:
        """Return whether a prompt has to wait in the queue, because the worker of its placement and all others have
        enough.

        Args:
            waited: seconds since the request began to wait.
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
            seconds: from its admission to its first token.
            uncached: tokens of its context that were not cached.
        """
        self._shedder.first_tokens.note(seconds, uncached / self._prefill_rate, now)

    def note_gap(
        self, worker_id: str, running: int, gap: float, request_class: str, now: float, times: int = 1
    ) -> None:
        """Count the time between two messages with tokens of a request, if its class has an objective for it.

        Args:
            running: requests that the decode worker has now.
            gap: seconds.
            times: number of such gaps.
        """
        wanted = self.class_of(request_class)
        if wanted.itl_seconds is not None:
            self._limits.note(worker_id, running, gap, wanted.itl_seconds, wanted.percentile, now, times)

    def note_answer(self, owner: str, tokens: int) -> None:
        """Count an answer that has ended."""
        self._answers.note(owner, tokens)

    def keep(self, worker_ids: Set[str]) -> None:
        """Forget what was measured of all other workers."""
        self._limits.keep(worker_ids)
