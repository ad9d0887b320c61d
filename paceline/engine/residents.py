"""The requests of a scheduler and the place of each request: a state machine. Pure, like the scheduler.

    add ─▶ WAITING ─▶ LOADING ─▶ RUNNING ─▶ SWAPPING_OUT ─▶ WAITING …
                 │                  │
                 └─ from each place ┴─▶ PREEMPTED, ENDED or REMOVED ─▶ GONE

Each method is an event. Only these methods change a request's place, its steps in flight, and whether it waits for more
blocks. A request keeps its row and its blocks until no step in flight includes it and no copy touches its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.types import Key
from paceline.engine.compute_pool import ComputePool, CopyBatch
from paceline.engine.request import LEAVING, Request, Residence
from paceline.engine.row_allocator import RowAllocator
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import Event, NeedsBlocks, Preempted, Removed

TRANSITIONS: dict[Residence, frozenset[Residence]] = {
    Residence.WAITING: frozenset((Residence.LOADING, Residence.RUNNING, Residence.PREEMPTED, Residence.REMOVED)),
    Residence.LOADING: frozenset((Residence.RUNNING, Residence.SWAPPING_OUT, Residence.PREEMPTED, Residence.REMOVED)),
    Residence.RUNNING: frozenset((Residence.SWAPPING_OUT, Residence.PREEMPTED, Residence.ENDED, Residence.REMOVED)),
    Residence.SWAPPING_OUT: frozenset((Residence.WAITING, Residence.PREEMPTED, Residence.ENDED, Residence.REMOVED)),
    Residence.PREEMPTED: frozenset((Residence.ENDED, Residence.REMOVED, Residence.GONE)),
    Residence.ENDED: frozenset((Residence.REMOVED, Residence.GONE)),
    Residence.REMOVED: frozenset((Residence.REMOVED, Residence.GONE)),
    Residence.GONE: frozenset(),
}
"""For each place, the places to which a request may move from there."""


class Residents:
    """The owner of the places of all requests.

    Args:
        pool: the memory in which the device computes.
        emit: called with each event for services.
    """

    def __init__(
        self, pool: ComputePool, rows: RowAllocator, stats: SchedulerStats, emit: Callable[[Event], None]
    ) -> None:
        self._pool = pool
        self._rows = rows
        self._stats = stats
        self._emit = emit
        self._staying: dict[Key, Request] = {}  # in order of arrival
        self._leaving: dict[Key, Request] = {}  # leaving, but still in steps or copies
        self._grown: dict[Key, Request] = {}  # have new blocks in the arena, but not yet in the pool
        self._starved: list[Request] = []
        self._made_room = False
        """Whether a request was preempted since the last plan."""

    # ---- reading

    def find(self, key: Key) -> Request | None:
        """Return the request with this key; None if there is no such request or it is leaving."""
        return self._staying.get(key)

    def find_in_step(self, key: Key) -> Request:
        """Return the request of a chunk in flight, even if it leaves."""
        return self._staying.get(key) or self._leaving[key]

    def classes(self) -> tuple[bool, bool]:
        """Return whether there are urgent requests, and whether there are requests of the background."""
        kinds = {request.background for request in self._staying.values()}
        return False in kinds, True in kinds

    def by_urgency(self) -> list[Request]:
        """Return all requests that are not leaving, in order of arrival, with requests of the background last."""
        return sorted(self._staying.values(), key=lambda request: request.background)

    # ---- coming and leaving

    def add(self, request: Request) -> None:
        """Add a request, which has the blocks for its context. Raises ValueError if its key is not new."""
        if request.key in self._staying or request.key in self._leaving:
            raise ValueError(f"{request.key} is already running")
        self._staying[request.key] = request

    def remove(self, key: Key) -> None:
        """Drop a request if the engine still has it. The event `Removed` follows when no step and no copy uses its
        blocks.
        """
        request = self._staying.get(key) or self._leaving.get(key)
        if request is None:
            self._emit(Removed(key))
        else:
            self._leave(request, Residence.REMOVED)

    def end(self, request: Request) -> None:
        """Let a request leave because the engine has finished it."""
        self._leave(request, Residence.ENDED)

    def _leave(self, request: Request, place: Residence) -> None:
        self._move(request, place)
        self._staying.pop(request.key, None)
        self._grown.pop(request.key, None)
        self._leaving[request.key] = request
        self._settle(request)

    # ---- blocks in the arena

    def ask_for_blocks(self, request: Request, token_count: int) -> None:
        """Ask for blocks for `token_count` tokens. The request must not be `growing` already."""
        request.growing = True
        self._emit(NeedsBlocks(request.key, token_count))

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        """Give a request the blocks that it asked for. `tables` are its whole new tables."""
        if request := self._staying.get(key):
            for table, new in zip(request.tables, tables):
                table.extend(new[len(table) :])
            request.growing = False
            self._grown[key] = request

    def starve(self, key: Key) -> None:
        """Note that the arena has no blocks for this request now, and preempt the newest request to make room. Requests
        of the background are preempted before all others.
        """
        if (request := self._staying.get(key)) is None:
            return
        self._starved.append(request)
        # If a request was preempted since the last plan, or is still leaving, its blocks may suffice.
        if not self._made_room and not self._awaits_preempted():
            self._made_room = True
            self._stats.preemptions += 1
            self._leave(self.by_urgency()[-1], Residence.PREEMPTED)
        self._let_starved_ask()

    def _let_starved_ask(self) -> None:
        """Let requests without blocks ask again with the next plan, unless a preempted request still has its blocks."""
        if self._starved and not self._awaits_preempted():
            for request in self._starved:
                request.growing = False
            self._starved.clear()

    def _awaits_preempted(self) -> bool:
        return any(request.place is Residence.PREEMPTED for request in self._leaving.values())

    # ---- the pool

    def begin_plan(self) -> None:
        """Begin to plan a step: admit requests to the pool, and allow another preemption."""
        self._made_room = False
        self.admit()

    def admit(self) -> None:
        """Give requests slots in the pool while there is room.

        Growing requests in the pool come first, then other requests in order of arrival, then requests of the
        background. An urgent request may take slots from requests of the background.
        """
        for key, request in list(self._grown.items()):
            while request.place in (Residence.LOADING, Residence.RUNNING) and not self._pool.extend(request):
                if not self._make_room():
                    return  # slots that become free are for the requests in the pool
            if request.place is not Residence.WAITING:
                self._rows.extend(request, self._pool.tables(request))
            del self._grown[key]
        for request in self.by_urgency():
            while request.place is Residence.WAITING:
                if self._pool.admit(request, self._stats.prefill_tokens_per_second):
                    self._move(request, Residence.LOADING if self._pool.is_copying(request) else Residence.RUNNING)
                elif request.background or not self._make_room(only_background=True):
                    return

    def _make_room(self, only_background: bool = False) -> bool:
        """Swap out the newest request in the pool; requests of the background are swapped out first.

        Return whether its slots are free already.
        """
        there = [request for request in self.by_urgency() if request.place is not Residence.WAITING]
        if any(request.place is Residence.SWAPPING_OUT for request in there):
            return False
        if only_background and not (there and there[-1].background):
            return False
        last = there[-1]
        self._move(last, Residence.SWAPPING_OUT)
        self._stats.swap_outs += 1
        self._settle(last)
        return last.place is Residence.WAITING

    def finish_copies(self, copies: CopyBatch, seconds: float) -> None:
        """Note that a batch was copied in `seconds` seconds."""
        request = copies.request
        for event in self._pool.finish_copies(copies, seconds):
            self._emit(event)
        if copies.loads and request.place is Residence.LOADING:
            self._move(request, Residence.RUNNING)
        self._settle(request)

    # ---- steps

    def can_run(self, request: Request) -> bool:
        """Return whether the next step may include the request. Give it a row if it has none and one is free."""
        if request.place is not Residence.RUNNING:
            return False
        return request.row is not None or self._rows.assign(request, self._pool.tables(request))

    def launch(self, request: Request, most_tokens: int) -> None:
        """Note that a step includes the request.

        Args:
            most_tokens: largest number of tokens that the step can give the request; 0 if it does not sample.
        """
        request.launched.append(most_tokens)

    def land(self, request: Request) -> None:
        """Note that the results of the oldest step in flight that includes the request have come."""
        request.launched.popleft()
        self._settle(request)

    # ---- the machine

    def _move(self, request: Request, place: Residence) -> None:
        if place not in TRANSITIONS[request.place]:
            raise RuntimeError(f"{request.key} cannot move from {request.place.name} to {place.name}")
        request.place = place

    def _settle(self, request: Request) -> None:
        """Continue the end or the swap-out of a request, if no step or copy uses its blocks any more."""
        if request.launched:
            return
        if request.place is Residence.SWAPPING_OUT:
            if request.row is not None:
                self._rows.release(request)
                self._pool.hold_until_stored(request, [], whole=True)
            if not self._pool.is_copying(request):
                self._pool.release(request)
                self._move(request, Residence.WAITING)
        elif request.place in LEAVING and not self._pool.is_copying(request):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._leaving[request.key]
        self._rows.release(request)
        self._pool.release(request)
        if request.place is not Residence.ENDED:
            self._emit((Preempted if request.place is Residence.PREEMPTED else Removed)(request.key))
        self._move(request, Residence.GONE)
        self._let_starved_ask()

    # ---- integrity

    def check(self) -> list[str]:
        """Return errors in the state of the requests, as sentences; an empty list if there are none."""
        staying, leaving = self._staying.values(), self._leaving.values()
        wrong = [problem for request in (*staying, *leaving) for problem in self._problems_of(request)]
        wrong += [f"{each.key} is among those that stay" for each in staying if each.place in LEAVING]
        wrong += [f"{each.key} is among those that leave" for each in leaving if each.place not in LEAVING]
        wrong += [f"{key} has grown, but does not stay" for key in self._grown if key not in self._staying]
        wrong += [f"{each.key} starves, but may ask for blocks" for each in self._starved if not each.growing]
        return wrong + self._rows.check((*staying, *leaving)) + self._pool.check((*staying, *leaving))

    def _problems_of(self, request: Request) -> list[str]:
        place, copying, launched = request.place, self._pool.is_copying(request), len(request.launched)
        wrong = [
            (place in (Residence.WAITING, Residence.LOADING) and launched > 0, "is in steps"),
            (place in (Residence.WAITING, Residence.LOADING) and request.row is not None, "has a row"),
            (place is Residence.WAITING and copying, "has copies"),
            (place is Residence.LOADING and not copying, "has no copies"),
            (place is Residence.SWAPPING_OUT and not (launched or copying), "waits for nothing"),
            (place in LEAVING and not (launched or copying), "waits for nothing"),
            (launched > 0 and request.row is None, "is in steps without a row"),
            (not request.computed_len <= request.planned_len <= len(request.token_ids), "has impossible lengths"),
        ]
        return [f"{request.key} is {place.name} and {what}" for is_wrong, what in wrong if is_wrong]
