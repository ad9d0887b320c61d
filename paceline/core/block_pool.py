"""The slots of a memory for KV blocks. Each slot is free, referenced or cached, and a cached slot has named content."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from paceline.core.block_counts import Counts
from paceline.core.cache_policy.base import CachePolicy, HintCounts
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.ranking import NOWHERE, Block, Name, Place

_EVENTS_KEPT = 1 << 16


class BlockEvent(NamedTuple):
    """The event that a block became reusable, or ceased to be reusable."""

    op: Literal["stored", "removed"]
    group: int
    hash: bytes


class BlockPool:
    """Owns every slot of one memory: a host's arena, or the pool of a device.

    A slot is free, referenced by leases, or cached. Sealing gives a block a name (group, hash). The first block with a
    name is in the index, where other requests find it. A second block with the same name stays private to its lease.

    Args:
        slots: number of slots.
        groups: number of KV groups.
        policy: the policy that chooses the blocks to evict; by default the least recently used block is evicted.
    """

    def __init__(self, slots: int, groups: int, policy: CachePolicy | None = None) -> None:
        self.evicted = 0
        """Blocks evicted so far."""
        self.event_count = 0
        """Events so far, which is also the number of the next event."""
        # Descending, so that blocks that are taken one after another are neighbours in memory.
        self._free = list(range(slots - 1, -1, -1))
        self._references = [0] * slots
        self._flights = [0] * slots
        self._names: list[Name | None] = [None] * slots
        self._index: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self._policy = LRU(slots) if policy is None else policy  # knows the blocks in the index
        self._places: dict[int, Place] = {}  # places of sealed blocks that are not in the index
        self._referenced = 0
        self._in_flight = 0
        self._events: deque[BlockEvent] = deque(maxlen=_EVENTS_KEPT)

    def restore(self, slots: Mapping[int, tuple[int, Name | None]], places: Mapping[int, Place]) -> None:
        """Add blocks that are already referenced to a new pool.

        Args:
            slots: for each slot, the number of its references, and (group, hash) if it is sealed.
            places: places of the sealed blocks, by slot.
        """
        self._free = [slot for slot in self._free if slot not in slots]
        self._referenced = len(slots)
        # Shared blocks come first, because they were in the index before and must enter it before private ones.
        for slot, (count, name) in sorted(slots.items(), key=lambda entry: -entry[1][0]):
            self._references[slot] = count
            if name is not None:
                self.seal(slot, *name, places[slot])

    def counts(self) -> Counts:
        """Return the number of slots in each state."""
        return Counts(
            total=len(self._references),
            free=len(self._free),
            held=self._referenced - self._in_flight,
            in_flight=self._in_flight,
            cached=self._policy.evictable,
        )

    def cached(self) -> list[Name]:
        """Return the names of the blocks that could be evicted, least recently used first."""
        cached = [block for block in self._policy.blocks() if block.evictable]
        return [block.name for block in sorted(cached, key=lambda block: block.used)]

    def blocks(self) -> Collection[Block]:
        """Return all blocks that `find` finds, for reading only."""
        return self._policy.blocks()

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the slot of the reusable block with this name; None if there is none."""
        return self._index[group].get(digest)

    def name(self, slot: int) -> Name | None:
        """Return (group, hash) of the block in a slot, or None if it is not sealed."""
        return self._names[slot]

    def available(self, reusing: Iterable[int] = ()) -> int:
        """Return the number of slots that `take` could give without evicting a block in `reusing`."""
        return len(self._free) + self._policy.evictable - sum(self._references[slot] == 0 for slot in set(reusing))

    def reuse(self, slots: Sequence[int], priority: int | None = None) -> None:
        """Add a reference to each of some blocks that `find` has found.

        Args:
            slots: slots of the blocks, in the order of their context.
            priority: priority of the request; lower is more urgent.
        """
        names = [self._name(slot) for slot in slots]
        for slot, name in zip(slots, names):
            if self._references[slot] == 0:
                self._policy.hold(name)
                self._referenced += 1
            self._references[slot] += 1
        self._policy.touch(names, priority)

    def take_over(self, slots: Sequence[int]) -> None:
        """Give cached blocks to one request, with one reference each. The blocks lose their names, so the request may
        change them.
        """
        names = [self._name(slot) for slot in slots]
        for name in names:
            self._policy.remove(name)
        self._drop(names)
        del self._free[len(self._free) - len(slots) :]  # `_drop` has put these slots there
        for slot in slots:
            self._references[slot] = 1
        self._referenced += len(slots)

    def is_used(self, slot: int) -> bool:
        """Return whether any request refers to the block in this slot."""
        return self._references[slot] > 0

    def expect(self, group: int, digest: bytes, hint: Hint) -> None:
        """Note a hint about the reusable block with this name. Do nothing if the pool has no such block."""
        self._policy.expect((group, digest), hint)

    @property
    def hint_counts(self) -> HintCounts:
        return self._policy.hint_counts

    def share(self, slots: Iterable[int]) -> None:
        """Add one reference to each of these blocks, sealed or not. Every block must have a reference already."""
        for slot in slots:
            assert self._references[slot]
            self._references[slot] += 1

    def take(self, count: int) -> list[int]:
        """Return `count` slots for new blocks, with one reference each. Evicts cached blocks if too few slots are free.

        At least `count` slots must be `available`.
        """
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
        """Drop one reference to each block. When a block's last reference is dropped, the block is cached if it is
        sealed, and freed otherwise.

        Args:
            slots: slots of the blocks, children before their parents.
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
        """Count one more reference in flight for each slot."""
        for slot in slots:
            if self._flights[slot] == 0:
                self._in_flight += 1
            self._flights[slot] += 1

    def leave_flight(self, slots: Iterable[int]) -> None:
        """Count one reference in flight fewer for each slot."""
        for slot in slots:
            self._flights[slot] -= 1
            if self._flights[slot] == 0:
                self._in_flight -= 1

    def seal(self, slot: int, group: int, digest: bytes, place: Place = NOWHERE) -> None:
        """Give a block its name. If the index has no block with this name, `find` finds this one from now on."""
        self._names[slot] = (group, digest)
        if digest in self._index[group]:
            self._places[slot] = place
        else:
            self._index[group][digest] = slot
            self._policy.insert((group, digest), place)
            self._note(BlockEvent("stored", group, digest))

    def forget(self) -> list[int]:
        """Free all cached blocks and return their slots. Blocks that requests use stay, and are cached after these
        requests have ended."""
        names = [block.name for block in self._policy.blocks() if block.evictable]
        for name in names:
            self._policy.remove(name)
        return self._drop(names)

    def take_events(self) -> list[BlockEvent]:
        """Return the events since the last call, oldest first. Of more than 65,536 events, the oldest are lost."""
        events = list(self._events)
        self._events.clear()
        return events

    def reusable(self) -> list[list[bytes]]:
        """Return the names of all blocks that `find` finds, for each group. Applying all events gives the same sets."""
        return [list(index) for index in self._index]

    def reusable_counts(self) -> list[int]:
        """Return the number of blocks that `find` finds, for each group."""
        return list(map(len, self._index))

    def _note(self, event: BlockEvent) -> None:
        self._events.append(event)
        self.event_count += 1

    def _retire(self, slot: int, group: int, digest: bytes) -> None:
        first = self._index[group].get(digest)
        place = self._places.pop(slot, NOWHERE)
        if first is None:  # the indexed block with this name was evicted, so this one takes its place
            self.seal(slot, group, digest, place)
        elif first != slot:
            self._names[slot] = None
            self._free.append(slot)
            # A request has just used this content, and children of the indexed block may just have been cached.
            self._policy.touch([(group, digest)], place.priority)
            return
        self._policy.release((group, digest))

    def _evict(self, count: int) -> None:
        names = self._policy.evict(count)
        if names is None:
            raise ValueError(f"{count} blocks cannot be evicted")
        self._drop(names)
        self.evicted += count

    def _drop(self, names: Iterable[Name]) -> list[int]:
        """Free blocks that the policy does not know any more. Return their slots."""
        slots = []
        for group, digest in names:
            slot = self._index[group].pop(digest)
            self._names[slot] = None
            self._free.append(slot)
            self._note(BlockEvent("removed", group, digest))
            slots.append(slot)
        return slots

    def _name(self, slot: int) -> Name:
        name = self._names[slot]
        assert name is not None
        return name

    def check(self, references: Sequence[int], flights: Sequence[int]) -> list[str]:
        """Check the pool's counts and return one sentence for each fault.

        Args:
            references: [slots] number of leases that refer to each slot.
            flights: [slots] number of these leases that are in flight.
        """
        wrong = []
        for what, ours, theirs in (
            ("references", self._references, references),
            ("references in flight", self._flights, flights),
        ):
            if ours != theirs:
                slot = next(slot for slot, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
                wrong.append(f"slot {slot} counts {ours[slot]} {what}, its leases have {theirs[slot]}")
        counts = self.counts()
        if sum(counts[1:]) != counts.total:
            wrong.append(f"{counts} does not add up")
        if self._referenced != sum(map(bool, references)) or self._in_flight != sum(map(bool, flights)):
            wrong.append(f"{counts} miscounts the slots that its leases refer to")
        cached = [self._index[group].get(digest) for group, digest in self.cached()]
        if len({*self._free, *cached}) != counts.free + counts.cached:
            wrong.append("a slot is free twice, or free and cached")
        if any(self._references[slot] for slot in (*self._free, *cached) if slot is not None):
            wrong.append("a slot is free or cached while a lease refers to it")
        if any(map(self._names.__getitem__, self._free)):
            wrong.append("a free slot has a name")
        return wrong + self._check_names() + self._policy.check()

    def _check_names(self) -> list[str]:
        wrong = []
        indexed = {slot for index in self._index for slot in index.values()}
        for group, index in enumerate(self._index):
            if any(self._names[slot] != (group, digest) for digest, slot in index.items()):
                wrong.append(f"the index of group {group} has a block under another name than the block's own")
        known = {block.name for block in self._policy.blocks()}
        if known != {(group, digest) for group, index in enumerate(self._index) for digest in index}:
            wrong.append("the policy and the index have different blocks")
        if any(count > 1 and slot not in indexed for slot, count in enumerate(self._references)):
            wrong.append("leases share a block that is not sealed")
        return wrong
