"""The order of accesses to a directory of blocks, on which readers without a lock rely.

A fence is the only place at which another process may see memory in an order that is known. So the tests look at the
memory, or change it, when a fence is called.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.engine.pool_directory import BlockCopy, PoolDirectory

ARENA_SLOTS, SLOTS = 8, 4


class Shared:
    """The writer's and the reader's directory in one memory. Both call `on_fence`."""

    def __init__(self) -> None:
        self.memory = bytearray(PoolDirectory.bytes_for(ARENA_SLOTS))
        self.on_fence: Callable[[], None] = lambda: None
        self.writer, self.reader = (
            PoolDirectory(memoryview(self.memory), ARENA_SLOTS, SLOTS, lambda: self.on_fence()) for _ in range(2)
        )

    def once_at_the_fence(self, change: Callable[[], None]) -> None:
        def run() -> None:
            self.on_fence = lambda: None
            change()

        self.on_fence = run

    def stamp_and_rest(self, arena_slot: int) -> tuple[int, bytes]:
        size = len(self.memory) // ARENA_SLOTS
        entry = self.memory[arena_slot * size : (arena_slot + 1) * size]
        return int.from_bytes(entry[:8], "little"), bytes(entry[8:])


def move(pool_slot: int, arena_slot: int, name: int) -> BlockCopy:
    return BlockCopy(pool_slot, arena_slot, 0, name.to_bytes(16, "big"))


def test_stamps_are_aligned_words() -> None:
    assert PoolDirectory.bytes_for(1) % np.dtype(np.uint64).alignment == 0


def test_an_entry_changes_between_two_fences_while_it_has_no_stamp() -> None:
    shared = Shared()
    shared.writer.publish([move(1, 5, 7)])
    before = shared.stamp_and_rest(5)
    seen = []
    shared.on_fence = lambda: seen.append(shared.stamp_and_rest(5))
    shared.writer.publish([move(2, 5, 8)])
    after = shared.stamp_and_rest(5)
    assert seen == [(0, before[1]), (0, after[1])]
    assert after[0] not in (0, before[0])


def test_stamps_are_cleared_before_the_fence_of_a_withdrawal() -> None:
    shared = Shared()
    shared.writer.publish([move(1, 5, 7), move(2, 6, 8)])
    seen = []
    shared.on_fence = lambda: seen.append([shared.stamp_and_rest(slot)[0] for slot in (5, 6)])
    shared.writer.withdraw([1, 2])
    assert seen == [[0, 0]]


def test_entries_are_read_after_the_fence_and_their_stamps_before() -> None:
    shared = Shared()
    old, new = move(1, 5, 7), move(2, 5, 8)
    shared.writer.publish([old])
    shared.once_at_the_fence(lambda: shared.writer.publish([new]))
    found = shared.reader.find([new])
    assert found.indices.tolist() == [0]
    assert shared.reader.unchanged(found) == []  # the stamp is that of the old entry


def test_stamps_are_compared_after_the_fence() -> None:
    shared = Shared()
    wanted = [move(1, 5, 7), move(2, 6, 8)]
    shared.writer.publish(wanted)
    found = shared.reader.find(wanted)
    shared.once_at_the_fence(lambda: shared.writer.withdraw([1]))
    assert shared.reader.unchanged(found) == [1]
