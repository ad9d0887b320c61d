"""A host that leaves: what it copies to other hosts, and how long it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.departure import Departure, hot_prefixes
from tests.services.kvtransfer.kv_host import layout
from tests.services.kvtransfer.kv_pair import Pair, pair
from tests.services.kvtransfer.kv_toolkit import Desk, chain
from tests.services.kvtransfer.transfers.test_prefix_transfers import cache, found


def hot(desk: Desk, most: int = 100, elsewhere: Sequence[str] = ()) -> list[list[bytes]]:
    names = {(0, chain(context)[-1]) for context in elsewhere}
    return hot_prefixes(desk.ledger.blocks(), desk.layout, names, most)


def test_the_prefix_that_most_requests_have_found_comes_first() -> None:
    desk = Desk(20)
    for name, context in enumerate(("abc", "xy", "abd", "abd", "pq")):
        desk.cache(f"r{name}", context)
        desk.reserve(f"again {name}", context)
    assert hot(desk)[0] == chain("abd")
    assert {tuple(own) for own in hot(desk)} == {tuple(chain(each)) for each in ("abc", "abd", "xy", "pq")}


def test_the_fronts_of_a_prefix_are_no_prefixes_of_their_own() -> None:
    desk = Desk(20)
    desk.cache("r", "abcdef")
    assert hot(desk) == [chain("abcdef")]
    assert hot(desk, elsewhere=["abcdef"]) == [chain("abcde")]


def test_the_most_blocks_are_about_a_limit() -> None:
    desk = Desk(40)
    for letter in "abcdefgh":
        desk.cache(letter, letter * 3)
    assert 2 <= len(hot(desk, most=6)) <= 3
    assert hot(desk, most=0) == []


def test_larger_blocks_have_zeros_at_links_where_no_block_ends() -> None:
    desk = Desk(20, (32, 0))
    desk.cache("r", "abcd")
    (links,) = hot(desk)
    assert links[1::2] == chain("abcd")[1::2]
    assert links[::2] == [bytes(16)] * 2


def test_blocks_whose_beginning_is_gone_are_left() -> None:
    desk = Desk(6)
    desk.cache("r", "abc")
    blocks = [block for block in desk.ledger.blocks() if block.name[1] != chain("a")[0]]
    assert hot_prefixes(blocks, desk.layout, set(), 100) == []


def leaving(two: Pair) -> Departure:
    """Return the departure of the source. Of its two other hosts only the destination answers."""

    async def find(fingerprint: str) -> list[str]:
        assert fingerprint == layout().fingerprint
        return ["127.0.0.1:1", two.destination.address]

    two.source.service.departure = Departure(two.source.service.sessions, find, two.source.address)
    return two.source.service.departure


async def test_the_last_worker_leaves_the_hot_prefixes_to_another_host(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        leaving(two)
        await cache(two, "abc")
        stays = await two.source.attach("stays")
        request = pb.LeaveRequest(session=two.prefill.arena.session)
        assert (await two.source.stub.Leave(request, timeout=20)).blocks == 0  # another worker stays
        await stays.leave()
        async with asyncio.timeout(20):
            while len(two.source.service.sessions.workers) > 1:
                await asyncio.sleep(0.01)
        assert (await two.source.stub.Leave(request, timeout=20)).blocks == 3
        lease = await found(two, "abcd")
        assert lease.filled_tokens == 48
        two.check(lease, 0, 3)
        assert (await two.source.stub.Leave(request, timeout=20)).blocks == 0  # the other host has them already
        await two.end()


async def test_another_host_gives_only_a_part_of_its_memory_for_copies(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        leaving(two)
        for context in ("abcd", "efgh", "ijkl", "mnop"):
            await cache(two, context)
            two.contents.clear()
        request = pb.LeaveRequest(session=two.prefill.arena.session)
        assert (await two.source.stub.Leave(request, timeout=20)).blocks == 8  # 40 // 8 blocks, and the chain's rest
        await two.end()


async def test_a_service_that_leaves_tells_its_workers_and_waits_for_them(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        departure = leaving(two)
        draining = asyncio.create_task(departure.drain(20))
        async with asyncio.timeout(10):
            told = await two.prefill.stream.read()
        assert isinstance(told, pb.AttachEvent)
        assert told.leaving
        assert not draining.done()
        await two.prefill.leave()
        await draining


async def test_a_service_does_not_wait_longer_than_its_time(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await asyncio.wait_for(leaving(two).drain(0.05), 10)
        assert two.source.service.sessions.workers
