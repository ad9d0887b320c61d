"""Prefill and decode workers of one host take turns on its cores, so that one number says who waits for whom, and not
the system's scheduler.

Decode comes first: while a decode worker computes, prefill waits before each of its operations. After every step, where
prefill is waiting, decode leaves it the rest of an inter-token latency (ITL) that users may see. So prefill goes on
even while decode never runs out of work, and has the cores to itself where decode rests.

A request is handed over some milliseconds after its prompt's last step, and should be in decode's next step rather than
wait for two. So prefill says that one is about to come, and decode plans a little later.

Everything is said in one page of the host's shared memory, as instants of the monotonic clock, in nanoseconds: whoever
is killed while it is his turn, or while he waits for it, is soon forgotten.

    word 0            until when prefill may compute although decode has work
    word 1            until when prefill is known to want the cores
    word 2 + slot     until when this decode worker is known to compute
    word 64           until when a request may be about to be handed over

`src/turns.h` of the native kernels speaks the same, so that a turn may change between two operations of a step. They
also leave to prefill what lies between the programs of a step, when Python works and cores are idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

PAGE_BYTES = 4096
SLOTS = 62
"""Two decode workers may have the same one; then prefill now and then begins an operation too early."""

_PREFILL_UNTIL, _WANTED_UNTIL, _FIRST_SLOT, _HANDED_UNTIL = 0, 1, 2, 2 + SLOTS

_MS = 1_000_000
_ALIVE = 50 * _MS
"""Longer than an operation takes."""
_BETWEEN_STEPS = 1 * _MS
"""Longer than prefill's next step needs to begin, where there is one."""
_HANDOVER = 8 * _MS
"""From the end of the step that finishes a prompt to when a decode worker has the request, on a busy host."""
_NEXT_HANDOVER = 1 * _MS
"""What the same step has finished comes right behind one another."""
_POLL_SECONDS = 0.0002
_STEPS = 8
"""By the longest of so many the next one is judged: often the end of an operation of prefill's is within a step."""
_LEAST_SHARE = 0.5
"""Seconds that prefill gets for a second of decoding, where steps take as long as the latency that users may see."""


class Turns(Protocol):
    """Called by the thread that computes, around each step."""

    page: memoryview
    slot: int
    """Of a decode worker; -1 for a prefill worker."""

    def begin(self) -> None:
        """Returns when it is this worker's turn."""

    def end(self, hands_over: bool) -> bool:
        """The step is over. True where it is the turn of others now, however much this worker still has to do."""

    def wait(self, early: float) -> float:
        """Waits until `early` seconds before this worker's next turn, or until others want none.

        Where a request is about to be handed over, waits for that, too, while others compute. Returns the seconds that
        are left, for which `begin` would wait.
        """

    def expecting(self) -> float:
        """Seconds for which a request may be about to come; 0 where none is."""

    def received(self) -> None:
        """A request has come."""


class DecodeTurns:
    """Computes first, and leaves prefill what its steps leave of the target.

    Args:
        page: PAGE_BYTES of memory that all workers of the host share; zeros at first.
        session: a number of this worker.
        itl_target: seconds between two tokens of a request that are fine while others wait for their first one.
    """

    def __init__(
        self,
        page: memoryview,
        session: int,
        itl_target: float,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.page, self.slot = page, session % SLOTS
        self._words = page.cast("q")
        self._target = int(itl_target * 1e9)
        self._clock, self._sleep = clock, sleep
        self._began = 0
        self._steps: deque[int] = deque(maxlen=_STEPS)

    def begin(self) -> None:
        self._wait_until(self._words[_PREFILL_UNTIL])
        self._began = self._clock()
        self._words[_FIRST_SLOT + self.slot] = self._began + _ALIVE

    def end(self, hands_over: bool = False) -> bool:
        words, now = self._words, self._clock()
        words[_FIRST_SLOT + self.slot] = 0
        took = now - self._began
        self._steps.append(took)
        if words[_PREFILL_UNTIL] <= now < words[_WANTED_UNTIL]:
            words[_PREFILL_UNTIL] = now + max(self._target - max(self._steps), int(took * _LEAST_SHARE))
        return now < words[_PREFILL_UNTIL]

    def wait(self, early: float) -> float:
        words = self._words
        own = words[_PREFILL_UNTIL]
        self._wait_until(own - int(early * 1e9))
        while words[_WANTED_UNTIL] > self._clock() < min(words[_HANDED_UNTIL], own + _HANDOVER):
            self._sleep(_POLL_SECONDS)
        return max(0, words[_PREFILL_UNTIL] - self._clock()) / 1e9

    def _wait_until(self, instant: int) -> None:
        """Or until others want no turn."""
        words = self._words
        while (now := self._clock()) < instant:
            if words[_WANTED_UNTIL] <= now:
                words[_PREFILL_UNTIL] = 0
                return
            self._sleep(_POLL_SECONDS)

    def expecting(self) -> float:
        return max(0, self._words[_HANDED_UNTIL] - self._clock()) / 1e9

    def received(self) -> None:
        words = self._words
        words[_HANDED_UNTIL] = min(words[_HANDED_UNTIL], self._clock() + _NEXT_HANDOVER)


class PrefillTurns:
    """Computes where no decode worker does, and in the time that they leave.

    Args:
        page: see `DecodeTurns`.
    """

    def __init__(
        self,
        page: memoryview,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.page, self.slot = page, -1
        self._words = page.cast("q")
        self._clock, self._sleep = clock, sleep

    def begin(self) -> None:
        while not self._may_compute(self._clock()):
            self._sleep(_POLL_SECONDS)

    def _may_compute(self, now: int) -> bool:
        words = self._words
        words[_WANTED_UNTIL] = now + _ALIVE
        return now < words[_PREFILL_UNTIL] or all(busy <= now for busy in words[_FIRST_SLOT : _FIRST_SLOT + SLOTS])

    def end(self, hands_over: bool = False) -> bool:
        now = self._clock()
        self._words[_WANTED_UNTIL] = now + _BETWEEN_STEPS
        if hands_over:
            self._words[_HANDED_UNTIL] = now + _HANDOVER
        return False

    def wait(self, early: float) -> float:
        return 0.0

    def expecting(self) -> float:
        return 0.0

    def received(self) -> None:
        """Requests come here at any time."""
