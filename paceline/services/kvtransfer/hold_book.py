"""Which holds exist, who may act on each, and how each comes to its end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from paceline.core.block_pool import BlockPool
from paceline.core.errors import InvalidRequestError, StaleError
from paceline.core.kv_layout import KVLayout, slots_tail_first
from paceline.core.types import Key
from paceline.services.kvtransfer.hold import NOBODY, Hold, State, UnknownHoldError

GRACE_SECONDS = 1.0
"""How long a worker whose session broke may still touch its blocks."""

_ENDED_KEPT = 1 << 16
"""Attempts whose last ended or forbidden generation is remembered, against messages that come late."""


class HoldBook:
    """Owns the holds. What they refer to goes back to `pool` when they end.

    Times are seconds of one monotonic clock. A hold whose deadline has passed is over, whether or not `expire` ran. Its
    blocks stay where they are as long as a worker lives that may not have noticed: a worker that stood still for longer
    than a lease, or to which this service was deaf for so long, must not write into what belongs to others by then.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self.expired = 0
        """Holds so far whose lease or session ended before they were released."""
        self._overdue: list[Key] = []  # those since `take_overdue`
        self._groups = layout.groups
        self._pool = pool
        self._live: dict[tuple[str, int], Hold] = {}  # by (request, attempt)
        self._draining: dict[Key, Hold] = {}
        self._ended: OrderedDict[tuple[str, int], int] = OrderedDict()  # last generation, oldest end first

    def __iter__(self) -> Iterator[Hold]:
        """All holds; those that drain come last."""
        yield from self._live.values()
        yield from self._draining.values()

    # ---- finding a hold, and the right to act on it

    def check_new(self, key: Key, now: float) -> None:
        """Raises unless `key` may name a new hold."""
        hold = self._alive(key, now)
        newest = self._ended.get(key[:2], -1) if hold is None else hold.key.generation
        if key.generation <= newest:
            raise StaleError(f"{key} is too old for a new hold: generation {newest} has been seen")
        if hold is not None:
            raise InvalidRequestError(f"hold {hold.key} exists; release it before you reserve {key}")

    def add(self, hold: Hold) -> None:
        self._live[hold.key[:2]] = hold

    def restore(self, hold: Hold) -> None:
        """Takes over a hold, ACTIVE or DRAINING, whose blocks the pool has taken over already."""
        if hold.state is State.DRAINING:
            self._pool.enter_flight(hold.slots())
            self._draining[hold.key] = hold
        else:
            self.add(hold)

    def find(self, key: Key, now: float) -> Hold:
        hold = self._alive(key, now)
        if hold is None or not hold.first_generation <= key.generation <= hold.key.generation:
            raise UnknownHoldError(f"there is no hold {key}: it was never made, was released, or its lease ended")
        return hold

    def find_newest(self, key: Key, now: float) -> Hold:
        """The hold, if the caller knows its newest generation."""
        hold = self.find(key, now)
        if key.generation < hold.key.generation:
            raise StaleError(f"hold {key} changed hands; its generation is {hold.key.generation} now")
        return hold

    def find_written(self, session: int, key: Key, now: float) -> Hold:
        """The hold, if `session` is its writer."""
        hold = self.find_newest(key, now)
        if hold.writer == NOBODY:
            raise InvalidRequestError(f"hold {key} is filled; adopt it first")
        if hold.writer != session:
            raise StaleError(f"hold {key} is written by another worker")
        return hold

    def find_own(self, session: int, key: Key, now: float) -> Hold:
        """The hold, if `session` owns or writes it. The owner learns of a new generation late: its older ones count."""
        hold = self.find(key, now)
        is_writer = session == hold.writer and key.generation == hold.key.generation
        if session != hold.owner and not is_writer:
            raise StaleError(f"hold {key} belongs to another worker")
        return hold

    def _alive(self, key: Key, now: float) -> Hold | None:
        hold = self._live.get(key[:2])
        if hold is not None and hold.deadline <= now:
            self._expire(hold)
            return None
        return hold

    def change_hands(self, hold: Hold) -> None:
        """Raises the generation. Raises StaleError where it was given back before it came."""
        key = hold.key._replace(generation=hold.key.generation + 1)
        if key.generation <= self._ended.get(key[:2], -1):
            raise StaleError(f"{key} was given back before it was asked for")
        hold.key = key

    # ---- the ends of a hold

    def forbid(self, key: Key) -> None:
        """From now on no generation of this attempt up to this one can begin.

        It has ended, was refused, or was given back before it came: a message that comes late or again must not make a
        hold that nobody knows of.
        """
        name = key[:2]
        self._ended[name] = max(key.generation, self._ended.get(name, -1))
        self._ended.move_to_end(name)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)

    def release(self, hold: Hold, session: int) -> None:
        """Ends a hold in the name of its owner or writer. What another worker writes drains until that one is done."""
        if hold.writer in (NOBODY, session):
            self._forget(hold)
            self._give_back(hold)
        else:
            self._drain(hold, hold.writer)

    def drained(self, session: int, key: Key, now: float) -> None:
        """The writer of a hold that drains is done with it. It may not have heard that its reservation was adopted."""
        self._alive(key, now)  # where nobody has noticed yet that the lease is over, it drains from here on
        for hold in [hold for hold in self._draining.values() if hold.key[:2] == key[:2]]:
            if hold.writer == session and hold.first_generation <= key.generation <= hold.key.generation:
                self._end_drain(hold)

    def lose_session(self, session: int, now: float) -> None:
        """A worker is gone: what it owned or wrote ends. Blocks that it or another writer may touch drain first."""
        for hold in list(self._live.values()):
            if session in (hold.owner, hold.writer):
                self._note_overdue(hold)
                self._drain(hold, session if hold.writer == NOBODY else hold.writer)
        for hold in self._draining.values():
            if hold.writer == session:
                hold.deadline = min(hold.deadline, now + GRACE_SECONDS)

    def expire(self, now: float) -> None:
        """Ends every hold whose deadline has passed."""
        for hold in [hold for hold in self if hold.deadline <= now]:
            if hold.state is State.DRAINING:
                self._end_drain(hold)
            else:
                self._expire(hold)

    def take_overdue(self) -> list[Key]:
        """Holds that ended since the last call because nobody renewed or released them."""
        overdue, self._overdue = self._overdue, []
        return overdue

    def _expire(self, hold: Hold) -> None:
        self._note_overdue(hold)
        if hold.writer == NOBODY:
            self._forget(hold)
            self._give_back(hold)
        else:
            self._drain(hold, hold.writer)

    def _note_overdue(self, hold: Hold) -> None:
        self.expired += 1
        self._overdue.append(hold.key)

    def _drain(self, hold: Hold, writer: int) -> None:
        self._forget(hold)
        if not hold.in_flight:
            self._pool.enter_flight(hold.slots())
        # No lease ends this: only the writer's word, or the end of its session.
        hold.state, hold.writer, hold.deadline = State.DRAINING, writer, math.inf
        self._draining[hold.key] = hold

    def _end_drain(self, hold: Hold) -> None:
        del self._draining[hold.key]
        self._give_back(hold)

    def _forget(self, hold: Hold) -> None:
        del self._live[hold.key[:2]]
        self.forbid(hold.key)

    def _give_back(self, hold: Hold) -> None:
        if hold.in_flight:
            self._pool.leave_flight(hold.slots())
        self._pool.give_back(slots_tail_first(self._groups, hold.tables))

    def check(self) -> list[str]:
        """Proves holds and pool against each other; returns a sentence for everything that is wrong."""
        wrong = []
        total = self._pool.counts().total
        references, flights = [0] * total, [0] * total
        for hold in self:
            for slot in hold.slots():
                references[slot] += 1
                flights[slot] += hold.in_flight
            if [len(table) for table in hold.tables] != [group.blocks_for(hold.token_count) for group in self._groups]:
                wrong.append(f"the tables of hold {hold.key} do not cover its {hold.token_count} tokens")
            if (hold.state is State.DRAINING) != (self._draining.get(hold.key) is hold):
                wrong.append(f"hold {hold.key} is {hold.state.value} in the wrong place")
        return wrong + self._pool.check(references, flights)
