"""A worker's access to encodings, over real kvtransfer services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from paceline.core.errors import BusyError, PacelineError, UnavailableError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key
from paceline.services.common.credentials import Credentials
from paceline.services.kvtransfer.transfers.disk_tier import DiskOptions
from paceline.services.worker.encodings import Encodings
from paceline.services.worker.kv_client import KVClient
from tests.services.kvtransfer.kv_host import Host
from tests.services.kvtransfer.kv_toolkit import LEASE

HIDDEN, LENGTH, SLOTS = 64, 40, 8
LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test", encoding_size=HIDDEN)
"""A block of an encoding has 16 rows, so an encoding of LENGTH rows has three blocks."""
CAT, DOG = b"c" * 16, b"d" * 16
ROWS = torch.arange(LENGTH * HIDDEN, dtype=torch.float32).view(LENGTH, HIDDEN)


class Attached:
    """A worker that is attached to a host."""

    def __init__(self, kv: KVClient, encodings: Encodings) -> None:
        self.kv = kv
        self.encodings = encodings

    async def encode(self, digest: bytes = CAT, rows: torch.Tensor = ROWS, salt: str = "") -> None:
        """Compute and publish an encoding, and let it be cached."""
        held = await self.encodings.reserve(digest, len(rows), salt)
        assert held.cached_blocks == 0
        self.encodings.write(held, rows)
        await self.encodings.publish(held)
        self.encodings.release(held)


@contextlib.asynccontextmanager
async def hosts(folder: Path, count: int = 1, **options: object) -> AsyncIterator[list[Host]]:
    async with contextlib.AsyncExitStack() as undo:
        running = []
        for number in range(count):
            (folder / str(number)).mkdir()
            host = Host(folder / str(number), SLOTS * LAYOUT.slot_bytes, name=str(number), **options)  # type: ignore[arg-type]
            await host.start()
            undo.push_async_callback(host.close)
            running.append(host)
        yield running


@contextlib.asynccontextmanager
async def attached(host: Host, role: str = "prefill") -> AsyncIterator[Attached]:
    kv = KVClient(host.address, role, role, Credentials())
    arena = await kv.session.attach(LAYOUT, 64)
    try:
        yield Attached(kv, Encodings(kv, LAYOUT, torch.frombuffer(arena.blocks, dtype=torch.float32)))
    finally:
        await kv.session.close()


async def test_an_encoding_that_one_worker_has_written_is_read_by_all(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as one, attached(host, "decode") as other:
        held = await one.encodings.reserve(CAT, LENGTH)
        assert not held.is_complete
        one.encodings.write(held, ROWS)
        await one.encodings.publish(held)
        read = await other.encodings.hold(CAT, LENGTH)
        assert read.slots == held.slots  # nothing is copied
        assert torch.equal(other.encodings.rows.read(read.slots, 0, LENGTH), ROWS)
        one.encodings.release(held)
        again = await one.encodings.reserve(CAT, LENGTH)
        assert again.is_complete
        reply = await host.ledger()
        assert (dict(reply.used_by_group), dict(reply.cached_by_group)) == (
            {"full": 0, "encoding": 3},
            {"full": 0, "encoding": 0},
        )
        assert (reply.prefix_queries_tokens, reply.encoding_queries_rows, reply.encoding_hits_rows) == (0, 96, 48)
        assert all(lease.blocks_by_group == {"encoding": 3} for lease in reply.leases)
        one.encodings.release(again)
        other.encodings.release(read)
        reply = await host.until(lambda reply: reply.cached == 3)
        assert (reply.cached_by_group["encoding"], reply.balanced) == (3, True)
        figures = {each.figure: each.value for each in host.service.snapshot().samples() if each.figure}
        assert figures["reusable_bytes_encoding"] == 3 * LAYOUT.slot_bytes
        assert figures["reusable_bytes_full"] == 0


async def test_two_workers_may_write_one_encoding_at_the_same_time(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as one, attached(host, "decode") as other:
        first, second = [await each.encodings.reserve(CAT, LENGTH) for each in (one, other)]
        assert not set(first.slots) & set(second.slots)
        for each, held in ((other, second), (one, first)):
            each.encodings.write(held, ROWS)
            await each.encodings.publish(held)
        read = await one.encodings.hold(CAT, LENGTH)
        assert read.slots == second.slots  # they were published first
        one.encodings.release(first)
        await host.until(lambda reply: reply.free == SLOTS - 3)
        other.encodings.release(second)
        one.encodings.release(read)
        await host.until(lambda reply: reply.cached == 3 and reply.free == SLOTS - 3)


async def test_an_encoding_is_found_by_its_input_and_salt_alone(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as worker:
        await worker.encode(salt="tenant")
        for digest, salt in ((CAT, ""), (DOG, "tenant"), (CAT, "another")):
            with pytest.raises(UnavailableError, match="not cached on this host"):
                await worker.encodings.hold(digest, LENGTH, salt)
        worker.encodings.release(await worker.encodings.hold(CAT, LENGTH, "tenant"))
        await host.until(lambda reply: not reply.leases)


async def test_kv_and_encodings_evict_each_other(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as worker:
        await worker.encode()
        await worker.kv.reserve(Key("r", 1, 1), [], LAYOUT.groups[0].block_tokens * (SLOTS - 1), 0)
        with pytest.raises(BusyError, match="3 blocks are needed"):
            await worker.encodings.reserve(DOG, LENGTH)
        worker.kv.release(Key("r", 1, 1))
        held = await worker.encodings.reserve(CAT, LENGTH)
        assert held.cached_blocks == 1  # blocks at the end are evicted first
        worker.encodings.write(held, ROWS)
        await worker.encodings.publish(held)
        assert torch.equal(worker.encodings.rows.read(held.slots, 0, LENGTH), ROWS)
        worker.encodings.release(held)


async def test_a_lack_of_blocks_is_told_from_a_lost_encoding(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (there, here), attached(there) as source, attached(here) as worker:
        await source.encode()
        await worker.kv.reserve(Key("r", 1, 1), [], LAYOUT.groups[0].block_tokens * (SLOTS - 1), 0)
        with pytest.raises(BusyError, match="3 blocks are needed"):
            await worker.encodings.hold(CAT, LENGTH, source=there.address)
        worker.kv.release(Key("r", 1, 1))
        worker.encodings.release(await worker.encodings.hold(CAT, LENGTH, source=there.address))


async def test_an_encoding_comes_from_another_host(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (there, here), attached(there) as source, attached(here) as worker:
        await source.encode()
        held = await worker.encodings.hold(CAT, LENGTH, source=there.address)
        assert torch.equal(worker.encodings.rows.read(held.slots, 0, LENGTH), ROWS)
        worker.encodings.release(held)
        again = await worker.encodings.reserve(CAT, LENGTH)
        assert again.is_complete
        worker.encodings.release(again)
        with pytest.raises(UnavailableError, match="computed again"):
            await worker.encodings.hold(DOG, LENGTH, source=there.address)
        for host in (there, here):
            reply = await host.until(lambda reply: not reply.leases)
            assert (reply.balanced, reply.cached_by_group["encoding"]) == (True, 3)


async def test_a_host_that_cannot_be_reached_gives_no_encoding(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as worker:
        with pytest.raises(UnavailableError):
            await worker.encodings.hold(CAT, LENGTH, source="127.0.0.1:1")


async def test_an_evicted_encoding_comes_back_from_the_disk(tmp_path: Path) -> None:
    disk = DiskOptions(tmp_path, SLOTS * LAYOUT.slot_bytes)
    async with hosts(tmp_path, disk=disk) as (host,), attached(host) as worker:
        await worker.encode()
        memory = host.service.sessions.memory
        assert memory is not None
        assert memory.disk is not None
        host.service.take_events()
        async with asyncio.timeout(10):
            while memory.disk.blocks < 3:
                await asyncio.sleep(0.01)
        assert memory.ledger.forget() == 3
        held = await worker.encodings.hold(CAT, LENGTH)
        assert torch.equal(worker.encodings.rows.read(held.slots, 0, LENGTH), ROWS)
        worker.encodings.release(held)


async def test_a_lost_encoding_stays_until_its_worker_is_done(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as worker:
        lost: list[Key] = []
        worker.kv.listen(lost.append)
        await worker.encode()
        read = await worker.encodings.hold(CAT, LENGTH)
        written = await worker.encodings.reserve(DOG, LENGTH)
        host.now += LEASE
        await host.until(lambda reply: reply.in_flight == 6)
        assert torch.equal(worker.encodings.rows.read(read.slots, 0, LENGTH), ROWS)
        worker.encodings.write(written, ROWS)
        await worker.encodings.publish(written)
        assert await worker.encodings.is_cached(DOG, LENGTH)
        for held in (read, written):
            worker.encodings.release(held)
        await host.until(lambda reply: (reply.free, reply.cached) == (SLOTS - 6, 6))
        assert lost == []


async def test_a_cancelled_reservation_leaves_nothing(tmp_path: Path) -> None:
    async with hosts(tmp_path) as (host,), attached(host) as worker:
        waiting = asyncio.ensure_future(worker.encodings.reserve(CAT, LENGTH))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError, PacelineError):
            await waiting
        await host.until(lambda reply: reply.free == SLOTS and not reply.leases)
