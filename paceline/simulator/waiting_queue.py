"""The gateway's queue in a simulation: the real decisions (`QueueState`), and events instead of tasks that wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.services.gateway.http.errors import NoRoomError, Reason
from paceline.services.gateway.queueing.admission_queue import IDLE_SECONDS, POLL_SECONDS
from paceline.services.gateway.queueing.fair_order import QueueClaim
from paceline.services.gateway.queueing.queue_state import HELD, Held, QueueState, Turn
from paceline.services.gateway.queueing.shedding import LoadShedder
from paceline.simulator.events import Events
from paceline.simulator.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class _Turn(Turn):
    """A request's entry in the queue."""

    sequence: Sequence
    is_here: bool = True


class WaitingQueue:
    """The requests for which no worker has room.

    Args:
        max_waiting: largest number of waiting requests, without requests of the background.
        queue_seconds: longest wait of a request that is not of the background, in seconds.
        attempt: tries to place a request, or ends it. Returns whether the request was placed, or HELD if it is held
            back.
        refuse: called with a request that must not wait any longer, and the reason.
        seed: seed of the random times at which requests try again by themselves.
    """

    def __init__(
        self,
        events: Events,
        max_waiting: int,
        queue_seconds: float,
        attempt: Callable[[Sequence], bool | Held],
        refuse: Callable[[Sequence, NoRoomError], object],
        seed: int,
    ) -> None:
        self._state: QueueState[_Turn] = QueueState(
            max_waiting, queue_seconds, lambda turn: events.after(0.0, self._drop, turn)
        )
        self._events, self._attempt, self._refuse = events, attempt, refuse
        self._random = random.Random(seed)
        self._is_waking = self._is_polling = False
        self.is_hopeless = False
        """Whether no worker will ever come, so that requests of the background must not wait without a limit."""

    @property
    def shedder(self) -> LoadShedder:
        return self._state.shedder

    def __len__(self) -> int:
        return len(self._state)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the requests that wait."""
        return (turn.sequence for turn in self._state)

    def admit(self, sequence: Sequence, claim: QueueClaim) -> None:
        """Place a request now or when its turn comes and a worker has room, or refuse it if it would wait too long."""
        if claim.background:
            self._use_idle_room(sequence)
            return
        # A request that lost its worker is never placed at once, because that worker is just ending its step.
        result = False if claim.first or self._state else self._attempt(sequence)
        if result is True or sequence.is_over:
            return
        turn = _Turn(owner=claim.owner, weight=claim.weight, priority=claim.priority, claim=claim, sequence=sequence)
        turn.demand = claim.measure()
        turn.work = turn.demand.work
        if not claim.first and result is not HELD and self._state.passes_all(turn):
            result = self._attempt(sequence)
            if result is True or sequence.is_over:
                return
        if result is HELD:
            self._state.hold(turn)
        if claim.is_ordinary:
            try:
                self._state.let_in(turn, self._events.now)
            except NoRoomError as refusal:
                self._refuse(sequence, refusal)
                return
        most = self._state.join(turn, self._events.now)
        now, deadline = self._events.now, turn.demand.deadline
        if most is not None:
            self._events.after(max(0.0, most.seconds), self._expire, turn, most.reason)
        elif deadline is not None:
            self._events.after(max(0.0, deadline - now), self._expire, turn, "deadline")
        if claim.first:
            self.wake()
        else:
            self._poll_later()

    def wake(self) -> None:
        """Let waiting requests try again, because there may be room now."""
        if not self._is_waking and self._state:
            self._is_waking = True
            self._events.after(0.0, self._serve)

    def _serve(self) -> None:
        """Place waiting requests in their order, until one finds no room, and all others are held back."""
        self._is_waking = False
        self._state.release()
        while (turn := self._state.next()) is not None:
            if turn.refusal is not None:
                self._drop(turn)
                continue
            turn.asks = True
            result = self._attempt(turn.sequence)
            turn.asks = False
            if result is True or turn.sequence.is_over:
                self._leave(turn, result is True)
            elif result is not HELD or self._state.hold(turn) is None:
                self._poll_later()
                return

    def _poll_later(self) -> None:
        """Let the first request try again soon, as in the real gateway, which does not learn of all room that becomes
        free.
        """
        if not self._is_polling:
            self._is_polling = True
            self._events.after(self._random.uniform(*POLL_SECONDS), self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        self._serve()

    def _expire(self, turn: _Turn, reason: Reason) -> None:
        if turn.is_here and turn.refusal is None:
            turn.refusal = self._state.refusal(turn, reason, self._events.now)
            self._drop(turn)

    def _drop(self, turn: _Turn) -> None:
        """Take a refused request out of the queue."""
        if turn.is_here and turn.refusal is not None:
            self._leave(turn, False)
            self._refuse(turn.sequence, turn.refusal)
            self.wake()

    def _leave(self, turn: _Turn, is_served: bool) -> None:
        turn.is_here = False
        self._state.leave(turn, self._events.now, is_served=is_served)

    def _use_idle_room(self, sequence: Sequence) -> None:
        """Place a request of the background as soon as a worker has room and nobody waits."""
        if self.is_hopeless:
            self._refuse(sequence, NoRoomError("no worker is left", "background"))
        elif (self._state or self._attempt(sequence) is not True) and not sequence.is_over:
            self._events.after(self._random.uniform(*IDLE_SECONDS), self._use_idle_room, sequence)
