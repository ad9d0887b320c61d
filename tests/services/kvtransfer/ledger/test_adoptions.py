"""A decode worker waits for its prompt, and gets the blocks with the operation that fills the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto.common_pb2 import Key
from paceline.services.kvtransfer.ledger.adoptions import Adoptions, Waiter
from paceline.services.kvtransfer.ledger.lease import UnknownLeaseError
from tests.services.kvtransfer.kv_host import Host, Worker, key, layout, release, reserve, seal
from tests.services.kvtransfer.kv_toolkit import DECODE, LEASE, PREFILL, Desk


async def begin(host: Host) -> tuple[Worker, Worker, pb.Lease]:
    """Attach both workers, and return them with the lease that prefill writes."""
    decode, prefill = await host.attach("decode"), await host.attach("prefill")
    await decode.do(reserve(key(), "abc", 60))
    return decode, prefill, (await prefill.do(pb.Operation(open=pb.Open(key=key())))).lease


async def waiting(host: Host, decode: Worker) -> asyncio.Task[list[pb.Result]]:
    """Start a call that adopts the lease, and return it once the service lets it wait."""
    memory = host.service.sessions.memory
    assert memory is not None
    call = asyncio.create_task(decode.batch(adopt(key())))
    async with asyncio.timeout(5):
        while not memory.adoptions._waiting:
            await asyncio.sleep(0.001)
    return call


def adopt(of: Key) -> pb.Operation:
    return pb.Operation(adopt=pb.Adopt(key=of))


async def codes(answer: Awaitable[list[pb.Result]]) -> list[pb.Code]:
    return [result.code for result in await answer]


def fill(lease: pb.Lease) -> pb.Operation:
    return pb.Operation(fill=pb.Fill(key=lease.key, filled_tokens=50))


async def test_who_waits_gets_the_blocks_when_they_are_filled(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    assert await host.counts() == (4, 0, 4, 0)
    await prefill.do(fill(opened))
    (result,) = await adopting
    adopted = result.adoption
    assert (adopted.key.generation, adopted.filled_tokens) == (3, 50)
    assert await host.counts() == (4, 4, 0, 0)
    await decode.do(release(adopted.key))
    assert (await host.counts())[1:3] == (0, 0)


async def test_who_gave_up_waiting_has_changed_nothing(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    memory = host.service.sessions.memory
    assert memory is not None
    (waiter,) = memory.adoptions._waiting.values()
    adopting.cancel()
    async with asyncio.timeout(5):
        while waiter.is_connected():
            await asyncio.sleep(0.001)
    await prefill.do(fill(opened))
    assert await host.counts() == (4, 0, 4, 0)
    assert (await decode.adopt(key())).key.generation == 3
    assert not memory.adoptions._waiting


async def test_the_end_of_a_reservation_is_the_end_of_waiting_for_it(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    adopting = await waiting(host, decode)
    await decode.do(release(key()))
    assert await codes(adopting) == [pb.CODE_UNKNOWN]
    await prefill.do(release(opened.key))
    assert (await host.counts())[1:3] == (0, 0)


async def test_who_gets_blocks_hears_what_has_become_of_them_and_may_seal_the_rest(host: Host) -> None:
    shape = layout(groups=((16, 0), (16, 20)))
    decode, prefill = await host.attach("decode", shape), await host.attach("prefill", shape)
    await decode.do(reserve(key(), "abc", 60))
    opened = (await prefill.do(pb.Operation(open=pb.Open(key=key())))).lease
    await prefill.do(seal(opened.key, "ab"))
    await prefill.do(seal(opened.key, "a", group=1))
    await prefill.do(pb.Operation(trim=pb.Trim(key=opened.key, group=1, first_kept_block=1)))
    await prefill.do(fill(opened))
    adopted = await decode.adopt(key())
    assert (list(adopted.trimmed_blocks), list(adopted.sealed_blocks)) == ([0, 1], [2, 1])
    await decode.batch(seal(adopted.key, "abc", first=2), seal(adopted.key, "abc", group=1, first=1))
    await decode.do(release(adopted.key))
    assert (await decode.do(reserve(key("again"), "abcd"))).lease.filled_tokens == 48


@pytest.mark.slow
async def test_the_end_of_a_lease_is_noticed_while_waiting(host: Host) -> None:
    decode, _, _ = await begin(host)
    adopting = await waiting(host, decode)
    host.now += LEASE
    assert await codes(adopting) == [pb.CODE_UNKNOWN]


async def test_only_who_reserved_may_wait_and_only_once(host: Host) -> None:
    decode, prefill, opened = await begin(host)
    assert await codes(prefill.batch(adopt(opened.key))) == [pb.CODE_STALE]
    adopting = await waiting(host, decode)
    assert await codes(decode.batch(adopt(key()))) == [pb.CODE_STALE]
    await prefill.do(fill(opened))
    (result,) = await adopting
    assert await codes(decode.batch(adopt(result.adoption.key))) == [pb.CODE_STALE]
    assert await host.counts() == (4, 4, 0, 0)


def test_who_waits_for_blocks_that_have_ended_gives_way() -> None:
    desk, told = Desk(4), []
    adoptions = Adoptions(desk.ledger, lambda: desk.now)
    adoptions.wait(Waiter(DECODE, desk.reserve("r", "a").key, told.append, lambda: True))
    desk.now += LEASE  # the lease's deadline has passed, but no sweep has noticed
    filling = desk.ledger.open(PREFILL, desk.reserve("r", "a", generation=2).key, desk.now)
    adoptions.wait(Waiter(DECODE, filling.key, told.append, lambda: True))
    assert [type(outcome) for outcome in told] == [UnknownLeaseError]
    desk.ledger.fill(PREFILL, filling.key, 16, desk.now)
    adoptions.note(filling.key)
    assert told[1:] == [desk.ledger.find(filling.key, desk.now)]
