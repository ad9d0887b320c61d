from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.block_pool import BlockEvent
from paceline.core.errors import ConfigError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.transfers.disk_tier import DiskOptions, DiskTier
from paceline.services.kvtransfer.transports.transport import ArenaMemory
from tests.services.kvtransfer.kv_host import Host, key, release, reserve, seal
from tests.services.kvtransfer.kv_toolkit import chain

SLOT = 4096
SLOTS = 8


class Arena:
    """A memory of a few slots, with the names of their blocks."""

    def __init__(self) -> None:
        # Page-aligned memory, as direct I/O requires.
        self.memory = ArenaMemory(memoryview(mmap.mmap(-1, SLOT * SLOTS)), SLOT, SLOTS)
        self.names: dict[bytes, int] = {}

    def put(self, slot: int, digest: bytes) -> BlockEvent:
        self.memory.slot(slot)[:] = digest * (SLOT // len(digest))
        self.names[digest] = slot
        return BlockEvent("stored", 0, digest)

    def find(self, group: int, digest: bytes) -> int | None:
        return self.names.get(digest)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def arena() -> Arena:
    return Arena()


async def test_blocks_come_back_as_they_were(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 4 * SLOT), 1, arena.memory, arena.find)
    assert not os.listdir(tmp_path)  # the file has no name, so it cannot be left behind
    tier.offer(arena.put(slot, name(slot)) for slot in range(3))
    await eventually(lambda: tier.blocks == 3)
    arena.memory.blocks[:] = bytes(SLOT * SLOTS)
    assert await tier.read([(0, name(2), 5), (0, name(9), 6), (0, name(0), 7)]) == [True, False, True]
    assert bytes(arena.memory.slot(5)) == name(2) * (SLOT // 16)
    assert bytes(arena.memory.slot(7)) == name(0) * (SLOT // 16)
    assert not any(arena.memory.slot(6))
    await tier.close()


async def test_a_full_disk_forgets_what_was_used_least_recently(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 2 * SLOT), 1, arena.memory, arena.find)
    for number in range(3):
        tier.offer([arena.put(number, name(number))])
        await eventually(lambda number=number: tier.find(0, name(number)) is not None)
        assert await tier.read([(0, name(0), 6)]) == [True]
    assert [tier.find(0, name(number)) is not None for number in range(3)] == [True, False, True]
    await tier.close()


async def test_what_was_evicted_before_its_turn_is_not_written(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 4 * SLOT), 1, arena.memory, arena.find)
    gone, there = arena.put(0, name(0)), arena.put(1, name(1))
    del arena.names[name(0)]
    tier.offer([gone, there, BlockEvent("removed", 0, name(0))])
    await eventually(lambda: tier.blocks == 1)
    assert tier.find(0, name(0)) is None
    await tier.close()


def damage(tier: DiskTier, arena: Arena, digest: bytes) -> None:
    """Overwrite a block in the file with zeros, by way of the arena's slot 1."""
    place = tier.find(0, digest)
    assert place is not None
    arena.memory.slot(1)[:] = bytes(SLOT)
    os.pwrite(tier._file, arena.memory.slot(1), place * SLOT)


async def test_a_damaged_block_is_a_miss(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 4 * SLOT), 1, arena.memory, arena.find)
    tier.offer([arena.put(0, name(3))])
    await eventually(lambda: tier.blocks == 1)
    damage(tier, arena, name(3))
    assert await tier.read([(0, name(3), 5)]) == [False]
    assert tier.damaged_blocks == 1
    assert tier.find(0, name(3)) is None
    await tier.close()


async def test_the_place_of_a_damaged_block_is_used_again(arena: Arena, tmp_path: Path) -> None:
    tier = DiskTier(DiskOptions(tmp_path, SLOT), 1, arena.memory, arena.find)
    tier.offer([arena.put(0, name(3))])
    await eventually(lambda: tier.written_blocks == 1)
    damage(tier, arena, name(3))
    assert await tier.read([(0, name(3), 5)]) == [False]
    tier.offer([arena.put(0, name(4))])
    await eventually(lambda: tier.written_blocks == 2)
    assert tier.find(0, name(4)) is not None
    assert await tier.read([(0, name(4), 5)]) == [True]
    await tier.close()


async def test_a_read_that_is_cancelled_has_ended(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 4 * SLOT), 1, arena.memory, arena.find)
    tier.offer([arena.put(0, name(3))])
    await eventually(lambda: tier.blocks == 1)
    going, read = threading.Event(), tier._read

    def slow(*slots: int) -> bool:
        going.wait(10)
        return read(*slots)

    monkeypatch.setattr(tier, "_read", slow)
    reading = asyncio.create_task(tier.read([(0, name(3), 5)]))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.sleep(0.05)
    assert not reading.done()  # the read may still write to its slot
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert bytes(arena.memory.slot(5)) == name(3) * (SLOT // 16)
    await tier.close()


async def test_blocks_are_forgotten_also_while_they_are_written(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(DiskOptions(tmp_path, 4 * SLOT), 1, arena.memory, arena.find)
    tier.offer([arena.put(0, name(1))])
    await eventually(lambda: tier.blocks == 1)
    going, writing, store = threading.Event(), threading.Event(), tier._store

    def slow(place: int) -> bytes:
        writing.set()
        going.wait(10)
        return store(place)

    monkeypatch.setattr(tier, "_store", slow)
    tier.offer([arena.put(1, name(2)), arena.put(2, name(3))])  # one is being written, the other one waits
    await eventually(writing.is_set)
    assert tier.forget() == 1
    tier.offer([arena.put(3, name(4))])
    going.set()
    await eventually(lambda: tier.find(0, name(4)) is not None)
    assert [tier.find(0, name(number)) for number in (1, 2, 3)] == [None] * 3
    assert (tier.blocks, tier.written_blocks) == (1, 2)
    await tier.close()


def test_a_disk_without_room_is_refused(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no room for a block"):
        DiskTier(DiskOptions(tmp_path, 100), 1, arena.memory, arena.find)
    with pytest.raises(ConfigError, match="lower --kv-disk-size"):
        DiskOptions(tmp_path, 1 << 50).check()
    with pytest.raises(ConfigError, match="choose another --kv-disk-dir"):
        DiskOptions(tmp_path / "missing", SLOT).check()


async def test_what_the_arena_has_evicted_comes_back_before_it_is_reserved(tmp_path: Path) -> None:
    disk = DiskOptions(tmp_path, 64 * SLOT)
    host = Host(tmp_path, disk=disk)
    await host.start()
    try:
        worker = await host.attach()
        assert worker.arena.has_disk

        async def write(request: str, context: str) -> None:
            """Write and seal the blocks of a context, and release the lease."""
            lease = (await worker.do(reserve(key(request), context))).lease
            for place, slot in enumerate(lease.tables[0].slots):
                fill(host, slot, context[: place + 1])
            await worker.batch(seal(lease.key, context), release(lease.key))
            host.service.take_events()  # as the publisher does all the time

        def on_disk(context: str) -> bool:
            memory = host.service.sessions.memory
            assert memory is not None
            assert memory.disk is not None
            return all(memory.disk.find(0, digest) is not None for digest in chain(context))

        await write("first", "abcdef")
        await eventually(lambda: on_disk("abcdef"))
        await write("second", "ghijkl")  # evicts most blocks of the first context
        assert (await worker.do(reserve(key("probe"), "abcdef"))).lease.filled_tokens < 64
        await worker.do(release(key("probe")))
        request = pb.FetchPrefixRequest(session=worker.arena.session, key=key("again"), hashes=chain("abcdef"))
        await host.stub.FetchPrefix(request, timeout=10)
        lease = (await worker.do(reserve(key("again"), "abcdef"))).lease
        assert lease.filled_tokens == 80  # the last block is always computed
        for place, slot in enumerate(lease.tables[0].slots[:5]):
            assert content(host, slot) == "abcdef"[: place + 1]
        assert (await host.ledger()).balanced
        await worker.do(release(key("again")))
        reset = await host.stub.ResetCache(pb.ResetCacheRequest(), timeout=10)
        assert reset.blocks > 0
        assert await host.counts() == (SLOTS, 0, 0, 0)
        assert reset.disk_blocks >= 6
        await host.stub.FetchPrefix(request, timeout=10)
        assert (await worker.do(reserve(key("later"), "abcdef"))).lease.filled_tokens == 0
        await worker.leave()
    finally:
        await host.close()


def fill(host: Host, slot: int, text: str) -> None:
    memory = host.service.sessions.memory
    assert memory is not None
    memory.grpc._memory.slot(slot)[:] = text.encode().ljust(SLOT, b"\0")


def content(host: Host, slot: int) -> str:
    memory = host.service.sessions.memory
    assert memory is not None
    return bytes(memory.grpc._memory.slot(slot)).rstrip(b"\0").decode()
