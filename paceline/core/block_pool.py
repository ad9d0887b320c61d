"""The slots of a memory for KV blocks: which are free, referenced or cached, and what the cached ones contain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from paceline.core.cache_policy.base import NOWHERE, CachePolicy, Name, Place
from paceline.core.cache_policy.lru import LRU
from paceline.core.metrics import Family, Sample

_EVENTS_KEPT = 1 << 16

KV_USAGE = Family("kv_cache_usage_perc", "Share of KV blocks that requests use, from 0 to 1", "gauge")


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

    def samples(self) -> Iterator[Sample]:
        """Yield the counts as figures, and the share of slots that requests use."""
        for name, count in self._asdict().items():
            yield Sample(f"blocks_{name}", count)
        if self.total:
            yield Sample("", (self.held + self.in_flight) / self.total, KV_USAGE)


class BlockEvent(NamedTuple):
    """A block began or ceased to be reusable."""

    op: Literal["stored", "removed"]
    group: int
    hash: bytes


class BlockPool:
    """Owns every slot of one memory: the arena of a host, or a device's.

    A slot is free, or referenced by holds, or cached. Sealing gives a block a name (group, hash). The first block of a
    name is in the index, where others find it; a second one with the same content stays private to its hold.

    Args:
        policy: chooses what is evicted; the least recently used where none is given.
    """

    def __init__(self, slots: int, groups: int, policy: CachePolicy | None = None) -> None:
        self.evicted = 0
        """Blocks evicted so far."""
        self.event_count = 0
        """Events so far: the number of the next one."""
        # Descending, so that blocks taken one after the other are neighbours in memory.
        self._free = list(range(slots - 1, -1, -1))
        self._references = [0] * slots
        self._flights = [0] * slots
        self._names: list[Name | None] = [None] * slots
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._policy = LRU(slots) if policy is None else policy  # knows what is in the index
        self._places: dict[int, Place] = {}  # of sealed blocks that are not
        self._referenced = 0
        self._in_flight = 0
        self._events: deque[BlockEvent] = deque(maxlen=_EVENTS_KEPT)

    def restore(self, slots: Mapping[int, tuple[int, Name | None]], places: Mapping[int, Place]) -> None:
        """Takes over, into a new pool, blocks that are referenced already.

        Args:
            slots: by slot, how many references it has, and (group, hash) where it is sealed.
            places: of those that are sealed, by slot.
        """
        self._free = [slot for slot in self._free if slot not in slots]
        self._referenced = len(slots)
        # Shared ones first: others can find them, so they are the first of their names.
        for slot, (count, name) in sorted(slots.items(), key=lambda entry: -entry[1][0]):
            self._references[slot] = count
            if name is not None:
                self.seal(slot, *name, places[slot])

    def counts(self) -> Counts:
        return Counts(
            total=len(self._references),
            free=len(self._free),
            held=self._referenced - self._in_flight,
            in_flight=self._in_flight,
            cached=self._policy.evictable,
        )

    def cached(self) -> list[Name]:
        """What could be evicted, that which was used last at the end."""
        cached = [block for block in self._policy.blocks() if block.evictable]
        return [block.name for block in sorted(cached, key=lambda block: block.used)]

    def find(self, group: int, digest: bytes) -> int | None:
        """The reusable slot with this content."""
        return self._index[group].get(digest)

    def name(self, slot: int) -> Name | None:
        """(group, hash) of a sealed block."""
        return self._names[slot]

    def available(self, reusing: Iterable[int] = ()) -> int:
        """Slots that `take` could give while those in `reusing` stay."""
        return len(self._free) + self._policy.evictable - sum(self._references[slot] == 0 for slot in set(reusing))

    def reuse(self, slots: Sequence[int], priority: int | None = None) -> None:
        """Adds a reference to indexed blocks.

        Args:
            slots: in the order of their context.
            priority: of the request; a lower one is more urgent.
        """
        names = [self._name(slot) for slot in slots]
        for slot, name in zip(slots, names):
            if self._references[slot] == 0:
                self._policy.hold(name)
                self._referenced += 1
            self._references[slot] += 1
        self._policy.touch(names, priority)

    def share(self, slots: Iterable[int]) -> None:
        """Adds a reference to blocks that have one, sealed or not."""
        for slot in slots:
            assert self._references[slot]
            self._references[slot] += 1

    def take(self, count: int) -> list[int]:
        """Fresh blocks with one reference each. There must be enough `available`."""
        if count > len(self._free):
            self._evict(count - len(self._free))
        first = len(self._free) - count
        slots = self._free[first:]
        del self._free[first:]
        slots.reverse()
        for slot in slots:
            self._references[slot] = 1
        self._referenced += count
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Drops a reference each. In the end sealed ones are cached, and others free.

        Args:
            slots: children before their parents.
        """
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

    def seal(self, slot: int, group: int, digest: bytes, place: Place = NOWHERE) -> None:
        """Names the content of a block; where the name is new, others can find it from now on."""
        self._names[slot] = (group, digest)
        if digest in self._index[group]:
            self._places[slot] = place
        else:
            self._index[group][digest] = slot
            self._policy.insert((group, digest), place)
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
        place = self._places.pop(slot, NOWHERE)
        if first is None:  # the first block of this name was evicted meanwhile: this one takes its place
            self.seal(slot, group, digest, place)
        elif first != slot:
            self._names[slot] = None
            self._free.append(slot)
            # Found, in a way; and its children may have been cached just now.
            self._policy.touch([(group, digest)], place.priority)
            return
        self._policy.release((group, digest))

    def _evict(self, count: int) -> None:
        names = self._policy.evict(count)
        if names is None:
            raise ValueError(f"{count} blocks cannot be evicted")
        for group, digest in names:
            slot = self._index[group].pop(digest)
            self._names[slot] = None
            self._free.append(slot)
            self._note(BlockEvent("removed", group, digest))
        self.evicted += count

    def _name(self, slot: int) -> Name:
        name = self._names[slot]
        assert name is not None
        return name

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
        cached = [self._index[group].get(digest) for group, digest in self.cached()]
        if len({*self._free, *cached}) != counts.free + counts.cached:
            wrong.append("a slot is free twice, or free and cached")
        if any(self._references[slot] for slot in (*self._free, *cached) if slot is not None):
            wrong.append("a slot is free or cached while a hold refers to it")
        if any(map(self._names.__getitem__, self._free)):
            wrong.append("a free slot has a name")
        return wrong + self._check_names() + self._policy.check()

    def _check_names(self) -> list[str]:
        wrong = []
        indexed = {slot for index in self._index for slot in index.values()}
        for group, index in enumerate(self._index):
            if any(self._names[slot] != (group, digest) for digest, slot in index.items()):
                wrong.append(f"the index of group {group} names a block otherwise than the block itself")
        known = {block.name for block in self._policy.blocks()}
        if known != {(group, digest) for group, index in enumerate(self._index) for digest in index}:
            wrong.append("the policy knows other blocks than the index")
        if any(count > 1 and slot not in indexed for slot, count in enumerate(self._references)):
            wrong.append("holds share a block that is not sealed")
        return wrong
