"""The slots of a memory for KV blocks: which are free, referenced or cached, and what the cached ones contain."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

_EVENTS_KEPT = 1 << 16


class Counts(NamedTuple):
    """Slots by what is done with them; each slot counts once. free + held + in_flight + cached == total."""

    total: int
    free: int
    held: int
    """Referenced, by no hold in flight."""
    in_flight: int
    """Referenced by a hold that changes hands, or that a worker may still touch after its end."""
    cached: int
    """Sealed and unreferenced: reused when asked for, evicted when room is needed."""


class BlockEvent(NamedTuple):
    """A block began or ceased to be reusable."""

    op: Literal["stored", "removed"]
    group: int
    hash: bytes


class BlockPool:
    """Owns every slot of one memory: the arena of a host, or a device's.

    A slot is free, or referenced by holds, or cached. Sealing gives a block a name (group, hash). The first block of a
    name is in the index, where others find it; a second one with the same content stays private to its hold.
    """

    def __init__(self, slots: int, groups: int) -> None:
        self.evicted = 0
        """Blocks evicted so far."""
        self.event_count = 0
        """Events so far: the number of the next one."""
        # Descending, so that blocks taken one after the other are neighbours in memory.
        self._free = list(range(slots - 1, -1, -1))
        self._references = [0] * slots
        self._flights = [0] * slots
        self._names: list[tuple[int, bytes] | None] = [None] * slots
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._referenced = 0
        self._in_flight = 0
        self._events: deque[BlockEvent] = deque(maxlen=_EVENTS_KEPT)

    def restore(self, slots: Mapping[int, tuple[int, tuple[int, bytes] | None]]) -> None:
        """Takes over, into a new pool, blocks that are referenced already.

        Args:
            slots: by slot, how many references it has, and (group, hash) where it is sealed.
        """
        self._free = [slot for slot in self._free if slot not in slots]
        self._referenced = len(slots)
        # Shared ones first: others can find them, so they are the first of their names.
        for slot, (count, name) in sorted(slots.items(), key=lambda entry: -entry[1][0]):
            self._references[slot] = count
            if name is not None:
                self.seal(slot, *name)

    def counts(self) -> Counts:
        return Counts(
            total=len(self._references),
            free=len(self._free),
            held=self._referenced - self._in_flight,
            in_flight=self._in_flight,
            cached=len(self._cached),
        )

    def find(self, group: int, digest: bytes) -> int | None:
        """The reusable slot with this content."""
        return self._index[group].get(digest)

    def name(self, slot: int) -> tuple[int, bytes] | None:
        """(group, hash) of a sealed block."""
        return self._names[slot]

    def available(self, reusing: Iterable[int] = ()) -> int:
        """Slots that `take` could give while those in `reusing` stay."""
        return len(self._free) + len(self._cached) - len(self._cached.keys() & set(reusing))

    def reuse(self, slots: Iterable[int]) -> None:
        """Adds a reference to indexed blocks."""
        for slot in slots:
            if self._references[slot] == 0:
                del self._cached[slot]
                self._referenced += 1
            self._references[slot] += 1

    def share(self, slots: Iterable[int]) -> None:
        """Adds a reference to blocks that have one, sealed or not."""
        for slot in slots:
            assert self._references[slot]
            self._references[slot] += 1

    def take(self, count: int) -> list[int]:
        """Fresh blocks with one reference each. There must be enough `available`."""
        while len(self._free) < count:
            self._evict()
        first = len(self._free) - count
        slots = self._free[first:]
        del self._free[first:]
        slots.reverse()
        for slot in slots:
            self._references[slot] = 1
        self._referenced += count
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Drops a reference each. In the end sealed ones are cached, to be evicted in this order, and others free."""
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                self._referenced -= 1
                name = self._names[slot]
                if name is None:
                    self._free.append(slot)
                else:
                    self._retire(slot, *name)

    def enter_flight(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._flights[slot] == 0:
                self._in_flight += 1
            self._flights[slot] += 1

    def leave_flight(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._flights[slot] -= 1
            if self._flights[slot] == 0:
                self._in_flight -= 1

    def seal(self, slot: int, group: int, digest: bytes) -> None:
        """Names the content of a block; where the name is new, others can find it from now on."""
        self._names[slot] = (group, digest)
        if digest not in self._index[group]:
            self._index[group][digest] = slot
            self._note(BlockEvent("stored", group, digest))

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last call, oldest first; the oldest are lost when nobody asks for long."""
        events = list(self._events)
        self._events.clear()
        return events

    def reusable(self) -> list[list[bytes]]:
        """For each group the names of all blocks that `find` finds: what all events together have made of it."""
        return [list(index) for index in self._index]

    def _note(self, event: BlockEvent) -> None:
        self._events.append(event)
        self.event_count += 1

    def _retire(self, slot: int, group: int, digest: bytes) -> None:
        first = self._index[group].get(digest)
        if first is None or first == slot:
            if first is None:  # the first block of this name was evicted meanwhile: this one takes its place
                self.seal(slot, group, digest)
            self._cached[slot] = None
            return
        self._names[slot] = None
        self._free.append(slot)
        if first in self._cached:
            # Its children may have been cached just now; they must be evicted before it.
            self._cached.move_to_end(first)

    def _evict(self) -> None:
        slot, _ = self._cached.popitem(last=False)
        name = self._names[slot]
        assert name is not None
        group, digest = name
        del self._index[group][digest]
        self._names[slot] = None
        self._free.append(slot)
        self.evicted += 1
        self._note(BlockEvent("removed", group, digest))

    def check(self, references: Sequence[int], flights: Sequence[int]) -> list[str]:
        """Proves the pool; returns a sentence for everything that is wrong.

        Args:
            references: [slots] how many holds refer to each slot.
            flights: [slots] how many of them are in flight.
        """
        wrong = []
        for what, ours, theirs in (
            ("references", self._references, references),
            ("references in flight", self._flights, flights),
        ):
            if ours != theirs:
                slot = next(slot for slot, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
                wrong.append(f"slot {slot} counts {ours[slot]} {what}, its holds have {theirs[slot]}")
        counts = self.counts()
        if sum(counts[1:]) != counts.total:
            wrong.append(f"{counts} does not add up")
        if self._referenced != sum(map(bool, references)) or self._in_flight != sum(map(bool, flights)):
            wrong.append(f"{counts} miscounts what its holds refer to")
        if len({*self._free, *self._cached}) != counts.free + counts.cached:
            wrong.append("a slot is free twice, or free and cached")
        if any(map(self._references.__getitem__, (*self._free, *self._cached))):
            wrong.append("a slot is free or cached while a hold refers to it")
        if any(map(self._names.__getitem__, self._free)):
            wrong.append("a free slot has a name")
        return wrong + self._check_names()

    def _check_names(self) -> list[str]:
        wrong = []
        indexed = {slot for index in self._index for slot in index.values()}
        for group, index in enumerate(self._index):
            if any(self._names[slot] != (group, digest) for digest, slot in index.items()):
                wrong.append(f"the index of group {group} names a block otherwise than the block itself")
        if not self._cached.keys() <= indexed:
            wrong.append("a cached block cannot be found")
        if any(count > 1 and slot not in indexed for slot, count in enumerate(self._references)):
            wrong.append("holds share a block that is not sealed")
        return wrong
