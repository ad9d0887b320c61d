"""Turns of prefill and decode workers on the cores of one host. The ITL target decides who waits for whom; without
turns, the operating system would.

Decode has priority: while a decode worker computes, prefill waits before each of its operations. After a decode step,
if prefill is waiting, prefill gets the cores for the rest of the target inter-token latency (ITL). So prompts make
progress even if decode always has work, and prefill has the cores to itself while decode is idle. Without a given
target, the target grows with the time of decode steps, so that prompts are not starved on a slow machine. It grows once
more while prompts have waited without a pause.

A request is handed over some milliseconds after its prompt's last step. It should be part of decode's next step, and
not of the one after it. So prefill announces the handoff, and decode plans its next step a little later.

Pool workers compute while no decode worker does, as prefill workers, but they want less beside one: nobody waits for a
vector as for a first token, and a bulk job would slow all answers down. If only pool workers are waiting after a decode
step, they get a small share of its time.

The workers share one page of the host's memory. Its words are instants of the monotonic clock in nanoseconds. Claims
expire by themselves, so a worker that is killed during its turn, or while it waits for one, hardly delays the others.

    word 0            instant until which prefill may compute although decode has work
    word 1            instant until which prefill wants the cores
    word 2 + slot     instant until which the decode worker with this slot computes
    word 64           instant until which a request may be handed over
    word 65           instant until which a worker computes urgent requests (`engine/background.py`)
    word 66           instant since which prefill has wanted the cores without a pause
    word 67           instant until which a pool worker wants the cores; word 1 is later then, too
    word 68           instant until which a prefill worker wants the cores, or computes a step

No word says anything about other memory, so their order does not matter, and no processor needs fences here.

`src/turns.h` of the native kernels reads and writes the same page, so that turns also change between two operations of
a step. Prefill may also compute between two programs of a decode step, while decode runs Python and leaves its cores
idle.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

PAGE_BYTES = 4096
SLOTS = 62
"""Number of slots. If two decode workers have the same slot, prefill sometimes begins an operation too early."""

_PREFILL_UNTIL, _WANTED_UNTIL, _FIRST_SLOT, _HANDED_UNTIL = 0, 1, 2, 2 + SLOTS

_WANTED_SINCE, _POOL_UNTIL, _STEP_UNTIL = 4 + SLOTS, 5 + SLOTS, 6 + SLOTS
URGENT_UNTIL = 3 + SLOTS
"""Index of the word with the instant until which a worker of the host computes urgent requests."""

_MS = 1_000_000
_ALIVE = 50 * _MS
"""Time until a worker's claim expires, in nanoseconds; longer than one operation takes."""
_STEP_ALIVE = 2000 * _MS
"""Time until the claim of a prefill or pool worker that computes a step expires, in nanoseconds."""
_PAUSE = 20 * _MS
"""Time after which prefill pauses if it does not want the cores. Between two steps, it may take a few milliseconds."""
_BETWEEN_STEPS = 1 * _MS
"""Time for which prefill keeps its claim to the cores after a step. It is longer than the gap to prefill's next step.
"""
_HANDOVER = 8 * _MS
"""Time from the end of a prompt's last step until a decode worker has the request, on a busy host."""
_NEXT_HANDOVER = 1 * _MS
"""Time between two requests whose prompts ended in the same step: they are handed over one right after the other."""
_POLL_SECONDS = 0.0002
STEPS = 8
"""Number of recent decode steps that are remembered. The longest of them is the estimate for the next step, because
times vary: a step often has to wait until an operation of prefill ends. Their median decides the least time that
prefill gets.
"""
_LEAST_TARGET = 28 * _MS
"""The ITL target without --itl-target-ms, in nanoseconds, on a machine that is fast enough for it."""
_LEAST_SHARE = 0.5
"""Least time that prefill gets for each second of decoding, in seconds, even if steps take longer than a given target.
"""
_AUTO_SHARE = 1.5
"""Least time that prefill gets for each second of decoding if no target is given, in seconds."""
POOL_SHARE = 0.15
"""Time that pool workers get for each second of decoding if no prompt waits, in seconds."""
BACKLOG_SECONDS = 2.0
"""Prompts are a backlog if prefill has wanted the cores for longer than this without a pause."""
BACKLOG_SHARE = 3.0
"""Least time that prefill gets for each second of decoding while there is a backlog, in seconds. A backlog costs its
clients more than longer ITLs cost others.
"""


def left_to_prefill(
    target: float, share: float, backlog_share: float, recent: Collection[float], wanted_seconds: float
) -> float:
    """Return the time that a decode worker leaves to prefill after a step, in the unit of `target` and `recent`.

    Args:
        target: the ITL target.
        share: least time for prefill, as a multiple of the median step.
        backlog_share: the same multiple while there is a backlog of prompts.
        recent: lengths of the worker's last `STEPS` steps; at least one.
        wanted_seconds: time for which prefill has wanted the cores without a pause.
    """
    least = backlog_share if wanted_seconds > BACKLOG_SECONDS else share
    return max(target - max(recent), least * statistics.median(recent))


class Turns(Protocol):
    """The turns of one worker. The thread that computes calls `begin` and `end` around each step.

    For a piece of an encoder it calls `begin` and `end_piece`.
    """

    page: memoryview

    @property
    def slot(self) -> int:
        """Slot of a decode worker in the page; -1 for a prefill worker."""

    def begin(self) -> None:
        """Wait until it is this worker's turn."""

    def end(self, hands_over: bool) -> bool:
        """Note that a step has ended. Return whether it is the turn of others now, even if this worker has more work.

        Args:
            hands_over: whether the step finished the prompt of a request that a decode worker takes over.
        """

    def end_piece(self) -> None:
        """Note that a piece of an encoder has ended. It does not count as a step."""

    def wait(self, early: float) -> float:
        """Wait until `early` seconds before this worker's next turn, or until no other worker wants a turn.

        If a request is about to be handed over and others compute, wait for the request, too. Return the seconds that
        are left until the turn.
        """

    def expecting(self) -> float:
        """Return the time in seconds within which a request may still be handed over; 0 if none is expected."""

    def received(self) -> None:
        """Note that a request has arrived on this worker by handover."""


class RoleTurns:
    """The turns of a worker whose role may change. It begins as a prefill worker; `take_role` changes the role.

    Args:
        page, session, itl_target: the arguments of `DecodeTurns`.
        on_change: called with the present turns after each change, on the thread of `take_role`.
    """

    def __init__(
        self,
        page: memoryview,
        session: int,
        itl_target: float | None,
        on_change: Callable[[Turns], None] = lambda turns: None,
    ) -> None:
        self.page = page
        self._on_change = on_change
        self._session = session
        self._itl_target = itl_target
        self.present: DecodeTurns | PrefillTurns = PrefillTurns(page)
        """The turns of the present role."""

    @property
    def slot(self) -> int:
        return self.present.slot

    def take_role(self, decodes: bool) -> None:
        """Take the turns of a decode worker if `decodes`, else of a prefill worker. Must be called between two
        steps.
        """
        page = self.page
        self.present = DecodeTurns(page, self._session, self._itl_target) if decodes else PrefillTurns(page)
        self._on_change(self.present)

    def begin(self) -> None:
        self.present.begin()

    def end(self, hands_over: bool) -> bool:
        return self.present.end(hands_over)

    def end_piece(self) -> None:
        self.present.end_piece()

    def wait(self, early: float) -> float:
        return self.present.wait(early)

    def expecting(self) -> float:
        return self.present.expecting()

    def received(self) -> None:
        self.present.received()


class DecodeTurns:
    """The turns of a decode worker. Decode has priority. After a step, it leaves the rest of the ITL target to prefill.

    Args:
        page: PAGE_BYTES of memory that all workers of the host share; zeros at first.
        session: number of this worker, which gives it a slot.
        itl_target: target for the seconds between two tokens of a request, while other requests wait for prefill;
            None: 28 ms, or two and a half decode steps if that is longer, or four while there is a backlog of prompts.
    """

    def __init__(
        self,
        page: memoryview,
        session: int,
        itl_target: float | None,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.page, self.slot = page, session % SLOTS
        self._words = page.cast("q")
        self._target = _LEAST_TARGET if itl_target is None else int(itl_target * 1e9)
        self._shares = (_AUTO_SHARE, BACKLOG_SHARE) if itl_target is None else (_LEAST_SHARE, _LEAST_SHARE)
        self._clock, self._sleep = clock, sleep
        self._began = 0
        self._steps: deque[int] = deque(maxlen=STEPS)

    def begin(self) -> None:
        self._wait_until(self._words[_PREFILL_UNTIL])
        self._began = self._clock()
        self._words[_FIRST_SLOT + self.slot] = self._began + _ALIVE

    def end(self, hands_over: bool = False) -> bool:
        self._steps.append(self._clock() - self._began)
        if self._words[_STEP_UNTIL] <= self._clock() < self._words[_POOL_UNTIL]:
            return self._leave(int(POOL_SHARE * statistics.median(self._steps)))
        wanted_seconds = (self._clock() - self._words[_WANTED_SINCE]) / 1e9
        return self._leave(int(left_to_prefill(self._target, *self._shares, self._steps, wanted_seconds)))

    def end_piece(self) -> None:
        # Several pieces may come between two steps. So a piece leaves only its share of the time, not the rest of the
        # ITL target.
        self._leave(int((self._clock() - self._began) * self._shares[0]))

    def _leave(self, duration: int) -> bool:
        """If prefill waits, leave it the cores for `duration`. Return whether prefill has the cores now."""
        words, now = self._words, self._clock()
        words[_FIRST_SLOT + self.slot] = 0
        if words[_PREFILL_UNTIL] <= now < words[_WANTED_UNTIL]:
            words[_PREFILL_UNTIL] = now + duration
        return now < words[_PREFILL_UNTIL]

    def wait(self, early: float) -> float:
        words = self._words
        prefill_until = words[_PREFILL_UNTIL]
        self._wait_until(prefill_until - int(early * 1e9))
        while words[_WANTED_UNTIL] > self._clock() < min(words[_HANDED_UNTIL], prefill_until + _HANDOVER):
            self._sleep(_POLL_SECONDS)
        return max(0, words[_PREFILL_UNTIL] - self._clock()) / 1e9

    def _wait_until(self, instant: int) -> None:
        """Wait until an instant, or until no other worker wants a turn."""
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
    """The turns of a prefill worker. It computes while no decode worker is computing, and between the decode steps of a
    worker that is.

    Args:
        page: PAGE_BYTES of memory that all workers of the host share; zeros at first.
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

    _OWN_UNTIL = _STEP_UNTIL
    """Index of the word that says until when a worker of this kind wants the cores."""

    def begin(self) -> None:
        while not self._may_compute(self._clock()):
            self._sleep(_POLL_SECONDS)

    def _may_compute(self, now: int) -> bool:
        words = self._words
        words[self._OWN_UNTIL] = now + _STEP_ALIVE
        if now - words[_WANTED_UNTIL] > _PAUSE:
            words[_WANTED_SINCE] = now
        words[_WANTED_UNTIL] = now + _ALIVE
        return now < words[_PREFILL_UNTIL] or all(busy <= now for busy in words[_FIRST_SLOT : _FIRST_SLOT + SLOTS])

    def end(self, hands_over: bool = False) -> bool:
        now = self._clock()
        self._words[_WANTED_UNTIL] = self._words[self._OWN_UNTIL] = now + _BETWEEN_STEPS
        if hands_over:
            self._words[_HANDED_UNTIL] = now + _HANDOVER
        return False

    def end_piece(self) -> None:
        self.end()

    def wait(self, early: float) -> float:
        return 0.0

    def expecting(self) -> float:
        return 0.0

    def received(self) -> None:
        """Do nothing: prefill does not wait for requests."""


class PoolTurns(PrefillTurns):
    """The turns of a pool worker. Beside a decode worker it gets a smaller share than prefill.

    Args:
        page: PAGE_BYTES of memory that all workers of the host share; zeros at first.
    """

    _OWN_UNTIL = _POOL_UNTIL
