"""Workers of one host that share its cores, and take turns by the rules of `core/turns.py`.

A decode worker computes when it has work. After each of its steps, it leaves prefill some time if prefill has work. A
prefill worker computes in this time, and while no decode worker computes; its step can be interrupted between
operations, and continues later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.step_times import TurnTimes
from paceline.core.turns import STEPS
from paceline.simulator.events import Events
from paceline.simulator.rows import SimulatedRows
from paceline.simulator.run_clock import RunClock
from paceline.simulator.series import ratios_of
from paceline.simulator.sharing import Sharing


class CoreUser(Protocol):
    """A worker, as the cores that it shares see it."""

    clock: RunClock
    rows: SimulatedRows

    @property
    def role(self) -> str:
        """The worker's role: "prefill" or "decode"."""

    @property
    def has_work(self) -> bool:
        """Whether the worker has prompts or rows."""

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""

    def wake(self) -> None:
        """Begin a step if the worker may compute now."""


class Cores:
    """The turns of one host's workers.

    Args:
        seed: decides how late decode begins after the turns of prefill.
    """

    def __init__(self, turns: TurnTimes, events: Events, seed: int = 0) -> None:
        self.turns = turns
        self._events = events
        self.decode_ratios = ratios_of(turns.decode_spread, seed)
        """Ratios of the times of decode steps while prefill has work."""
        self._admissions = Sharing(events)
        self._random = random.Random(seed)
        self._workers: list[CoreUser] = []
        self._recent: deque[float] = deque(maxlen=STEPS)
        self._until = 0.0
        """Instant until which prefill has the cores although decode has work."""
        self._wanted_since: float | None = None
        """Instant since which prefill has had work without a pause; None if it has none."""

    def enter(self, worker: CoreUser) -> None:
        """Let a worker of this host take part in the turns."""
        if worker not in self._workers:
            self._workers.append(worker)

    def leave(self, worker: CoreUser) -> None:
        """Remove a worker that has ended from the turns."""
        if worker in self._workers:
            self._workers.remove(worker)
            self._release()

    def is_wanted(self, worker: CoreUser) -> bool:
        """Return whether a prefill worker waits for this decode worker's turn to end."""
        return worker.role == "decode" and any(other.has_work for other in self._of("prefill"))

    def admit(self, done: Callable[[], object]) -> None:
        """Wait for the time of an admission, which is longer while other admissions are under way. Then call `done`."""
        if self.turns.admission:
            self._admissions.add(self.turns.admission, done)
        else:
            done()

    @property
    def decodes(self) -> bool:
        """Whether a decode worker has work."""
        return any(worker.has_work for worker in self._of("decode"))

    def speed_of(self, worker: CoreUser) -> float:
        """Return the speed at which a worker computes in its turns, in seconds of its work per second."""
        rows = sum(other.rows.count for other in self._of("decode") if other.has_work)
        return self.turns.speed_of_prefill(rows) if worker.role == "prefill" else 1.0

    def decode_seconds(self, alone: float, rows: int, reading: float) -> float:
        """Return the fitted time of a decode step while prefill has work.

        Args:
            alone: seconds without prefill.
            rows: sequences and their drafts.
            reading: seconds of `alone` for attention to contexts.
        """
        if self.turns.decode is None:
            return alone
        tokens = max(worker.clock.prompt_tokens for worker in self._of("prefill"))
        return max(alone, self.turns.decode.at(rows) + self.turns.decode_per_token * tokens + reading)

    def may_begin(self, worker: CoreUser) -> bool:
        """Return whether a worker may begin a step now. If not, it is woken when it may."""
        if worker.role == "prefill":
            self._wanted_since = self._events.now if self._wanted_since is None else self._wanted_since
            for decode_worker in self._of("decode"):
                decode_worker.clock.cut(decode_worker.clock.steps_begun())
            return not self._decode_computes() or self._events.now < self._until
        return not (self._events.now < self._until and self.is_wanted(worker))

    def begun(self, worker: CoreUser) -> None:
        """Note that a worker has begun a step, which interrupts prefill if the worker decodes."""
        if worker.role == "decode":
            for other in self._of("prefill"):
                other.clock.pause()

    def ended(self, worker: CoreUser, seconds: Sequence[float]) -> None:
        """Note that a worker's steps have ended. `seconds` are the times of the last ones."""
        if worker.role != "decode":
            return
        self._recent.extend(seconds)
        if self.is_wanted(worker) and not self._decode_computes():
            late = self.turns.late.at(0, self._random.random())
            wanted_seconds = 0.0 if self._wanted_since is None else self._events.now - self._wanted_since
            left = self.turns.left_to_prefill(self._recent, wanted_seconds)
            self._until = self._events.now + left + late
            self._events.at(self._until, self._release)
            self._give_to_prefill()

    def idle(self, worker: CoreUser) -> None:
        """Note that a worker has no more work, or waits for its turn."""
        if worker.role == "prefill" and not self.is_wanted_by_prefill():
            self._until, self._wanted_since = 0.0, None
            self._release()
        elif worker.role == "decode" and not worker.has_work:
            self._give_to_prefill()

    def is_wanted_by_prefill(self) -> bool:
        """Return whether a prefill worker has work."""
        return any(other.has_work for other in self._of("prefill"))

    def _release(self) -> None:
        """Let decode workers begin if the time of prefill is over, and prefill workers if no decode worker begins."""
        if self._events.now >= self._until:
            for worker in self._of("decode"):
                worker.wake()
        if not self._decode_computes():
            self._give_to_prefill()

    def _give_to_prefill(self) -> None:
        for worker in self._of("prefill"):
            worker.clock.resume(self.speed_of(worker))
            worker.wake()

    def _of(self, role: str) -> list[CoreUser]:
        return [worker for worker in self._workers if worker.role == role]

    def _decode_computes(self) -> bool:
        return any(worker.is_computing for worker in self._of("decode"))
