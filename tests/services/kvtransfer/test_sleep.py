"""A host whose workers sleep gives the memory of its arena back, and has it again when one of them wakes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from paceline.core.errors import BusyError
from paceline.core.turns import PAGE_BYTES
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.shared_memory import map_arena
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.ledger.lease import TRANSFER
from tests.services.kvtransfer.kv_host import SLOT, SLOTS, Host, Worker, key, layout, release, reserve, seal
from tests.services.kvtransfer.kv_toolkit import chain

SIZE = SLOTS * SLOT


async def set_asleep(host: Host, worker: Worker, asleep: bool) -> None:
    await host.stub.SetAsleep(pb.SetAsleepRequest(session=worker.arena.session, asleep=asleep), timeout=20)


def allocated(worker: Worker) -> int:
    """Return the bytes of memory that the arena's file takes."""
    return os.stat(worker.arena.arena_path).st_blocks * 512


def is_asleep(host: Host) -> bool:
    assert host.service.sessions.memory is not None
    return host.service.sessions.memory.asleep


async def test_the_arena_gives_its_memory_back_while_all_workers_sleep(host: Host) -> None:
    first, second = await host.attach("one"), await host.attach("two")
    arena = map_arena(Path(first.arena.arena_path), SIZE)
    arena[:SIZE] = b"\1" * SIZE
    await set_asleep(host, first, True)
    assert allocated(first) >= SIZE
    assert not is_asleep(host)
    await set_asleep(host, second, True)
    assert allocated(first) <= PAGE_BYTES
    await set_asleep(host, second, False)
    assert allocated(first) >= SIZE
    assert bytes(arena[:SIZE]) == bytes(SIZE)  # a worker that has mapped it sees the new memory
    await second.do(reserve(key("r"), "a"))
    assert await host.counts() == (SLOTS - 1, 1, 0, 0)


async def test_cached_blocks_are_forgotten(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key("r"), "a"))
    await worker.do(seal(key("r"), "a"))
    await worker.do(release(key("r")))
    assert await host.counts() == (SLOTS - 1, 0, 0, 1)
    await set_asleep(host, worker, True)
    assert await host.counts() == (SLOTS, 0, 0, 0)
    await set_asleep(host, worker, False)
    again = await worker.do(reserve(key("again"), "ab"))
    assert again.lease.filled_tokens == 0


async def test_blocks_in_use_keep_their_memory_until_they_are_released(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key("r"), "a"))
    sleeping = asyncio.create_task(set_asleep(host, worker, True))
    await asyncio.sleep(0.1)
    assert not sleeping.done()
    assert allocated(worker) >= SIZE
    await worker.do(release(key("r")))
    await sleeping
    assert is_asleep(host)


async def test_a_worker_that_cannot_sleep_keeps_its_blocks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.kvtransfer.sessions._SETTLE_SECONDS", 0.2)
    worker = await host.attach()
    await worker.do(reserve(key("r"), "a"))
    with pytest.raises(Exception, match="cannot sleep now"):
        await set_asleep(host, worker, True)
    await worker.do(release(key("r")))
    assert await host.service.sessions.settle()  # as the keeper does, some moments later
    assert not is_asleep(host)
    assert allocated(worker) >= SIZE


async def test_memory_is_not_allocated_anew_under_blocks(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key("cached"), "a"))
    await worker.do(seal(key("cached"), "a"))
    await worker.do(release(key("cached")))
    await worker.do(reserve(key("r"), "bc"))
    assert host.service.sessions.memory is not None
    host.service.sessions.memory.ledger.asleep = True  # as after a kill while an earlier service allocated it
    with pytest.raises(Exception, match="2 KV blocks of this host are in use"):
        await set_asleep(host, worker, False)
    await worker.do(release(key("r")))
    await set_asleep(host, worker, False)
    assert await host.counts() == (SLOTS, 0, 0, 0)


async def test_a_worker_that_joins_finds_the_memory_awake(host: Host) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    joined = await host.attach("another")
    assert allocated(worker) >= SIZE
    assert not is_asleep(host)
    await joined.leave()  # it ends again, and only the sleeping worker is left
    async with asyncio.timeout(20):
        while not is_asleep(host):
            await asyncio.sleep(0.05)
    assert allocated(worker) <= PAGE_BYTES


async def test_no_other_host_reads_or_writes_in_a_sleeping_arena(host: Host) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    copy = pb.CopyPrefixesRequest(source="nobody", fingerprint="model-a")
    with pytest.raises(Exception, match="all workers of this host sleep"):
        await host.stub.CopyPrefixes(copy, timeout=20)


async def test_nothing_reserves_blocks_of_a_sleeping_arena(host: Host) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    assert host.service.sessions.memory is not None
    ledger, names = host.service.sessions.memory.ledger, chain("a")
    with pytest.raises(BusyError, match="all workers of this host sleep"):  # as a copy that began before
        ledger.reserve(TRANSFER, Key("copy", 1, 1), names, 16, 16, host.now)
    await set_asleep(host, worker, False)
    ledger.reserve(TRANSFER, Key("copy", 1, 2), names, 16, 16, host.now)


async def test_too_little_memory_to_wake_is_an_error_that_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    with monkeypatch.context() as patched:
        patched.setattr("paceline.services.kvtransfer.arena.available_memory", lambda: SIZE - 1)
        with pytest.raises(Exception, match="cannot wake now: the KV memory needs"):
            await set_asleep(host, worker, False)
    assert is_asleep(host)
    assert allocated(worker) <= PAGE_BYTES
    await set_asleep(host, worker, False)
    assert not is_asleep(host)


async def test_the_service_answers_while_memory_is_allocated(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    began, may_end, take_back = threading.Event(), threading.Event(), Arena.take_back

    def take_back_later(arena: Arena) -> None:
        began.set()
        assert may_end.wait(20)
        take_back(arena)

    monkeypatch.setattr(Arena, "take_back", take_back_later)
    waking = asyncio.create_task(set_asleep(host, worker, False))
    async with asyncio.timeout(20):
        while not began.is_set():
            await asyncio.sleep(0.01)
    assert await host.counts() == (SLOTS, 0, 0, 0)
    assert not waking.done()
    sleeping = asyncio.create_task(set_asleep(host, worker, True))
    await asyncio.sleep(0.1)
    may_end.set()
    await asyncio.gather(waking, sleeping)
    assert is_asleep(host)  # memory is given back after it was allocated, in the order of the calls
    assert allocated(worker) <= PAGE_BYTES


async def test_a_restarted_service_knows_that_its_workers_sleep(host: Host, tmp_path: Path) -> None:
    worker = await host.attach()
    await set_asleep(host, worker, True)
    path = worker.arena.arena_path
    # The service is killed: its arena stays, and nobody has the lock on it.
    memory = host.service.sessions.memory
    assert memory is not None
    os.close(memory.arena._descriptor)
    successor = Host(tmp_path)
    await successor.start()
    request = pb.AttachRequest(worker_id="w", role="decode", layout=layout(), arena_path=path, asleep=True)
    stream = successor.stub.Attach(request)
    await asyncio.sleep(0.05)
    successor.now += 10  # the time in which workers may come back is over
    async with asyncio.timeout(20):
        arena = await stream.read()
    assert isinstance(arena, pb.AttachEvent)
    assert is_asleep(successor)
    await successor.stub.SetAsleep(pb.SetAsleepRequest(session=arena.session, asleep=False), timeout=20)
    assert os.stat(path).st_blocks * 512 >= SIZE
    await successor.close()
    memory.arena._descriptor = -1
