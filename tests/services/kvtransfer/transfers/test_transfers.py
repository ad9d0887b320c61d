"""A prompt that one host computes is transferred to another host, between two real services and over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import NO_SLOT
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.fast_transports import fast_transports
from paceline.services.kvtransfer.operations import key_of
from paceline.services.kvtransfer.transfers import exports, fetches
from tests.services.kvtransfer.kv_host import SLOT, key, layout, release, reserve
from tests.services.kvtransfer.kv_pair import CONTEXT, TOKENS, pair
from tests.services.kvtransfer.kv_toolkit import LEASE
from tests.services.kvtransfer.transport_cases import arena, missing


async def test_blocks_come_while_the_others_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks are transferred when they are sealed, not at the source's next `alive` message.
    monkeypatch.setattr(exports, "ALIVE_SECONDS", 1000)
    monkeypatch.setattr(fetches, "SILENCE_SECONDS", 1000)
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        adopting = asyncio.create_task(two.decode.adopt(reserved.key))
        await two.compute(opened, 0, 4)
        async with asyncio.timeout(10):
            while two.here.read(reserved.tables[0].slots[3]) != two.contents[0, 3]:
                await asyncio.sleep(0.01)
        assert not call.done()
        await two.compute(opened, 4, 7)
        await two.fill(opened)
        reply = await call
        assert (reply.blocks, reply.bytes, reply.path) == (7, 7 * SLOT, "grpc")
        two.check(reserved, 0, 7)
        # The result is the same as after a prefill worker on the same host.
        adopted = await adopting
        assert adopted.filled_tokens == TOKENS
        assert list(adopted.sealed_blocks) == [6]
        await two.end(adopted.key)
        for worker in (two.decode, two.prefill):
            again = (await worker.do(reserve(key("again"), CONTEXT))).lease
            assert again.filled_tokens == 16 * 5  # one block less than is cached, because something must be computed
            await worker.do(release(again.key))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing("ucx")), reason=missing("ucx") or "UCX is there")
async def test_blocks_come_over_ucx_where_both_have_it(tmp_path: Path) -> None:
    async with pair(tmp_path, alike=True, make_transports=await fast_transports("ucx", only_here=True)) as two:
        reserved, opened = await two.begin()
        call = two.fetch(reserved, opened)
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        assert (await call).path == "ucx"
        two.check(reserved, 0, 7)
        await two.end(reserved.key)


async def test_ucx_is_opened_only_where_others_come(tmp_path: Path) -> None:
    for wanted, only_here in (("grpc", False), ("auto", True)):
        assert not (await fast_transports(wanted, only_here))(arena(1, SLOT))
    if missing("ucx"):
        assert not (await fast_transports("auto", only_here=False))(arena(1, SLOT))
        with pytest.raises(ConfigError, match=r"paceline\[ucx\]"):
            await fast_transports("ucx", only_here=False)


async def test_what_is_here_already_is_not_brought_again(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        await two.compute(opened, 0, 7)
        await two.fill(opened)
        reply = await two.fetch(reserved, opened)
        await two.end(reserved.key)
        longer = CONTEXT + "g"
        reserved = (await two.decode.do(reserve(key("second"), longer, 16 * 7 + 1))).lease
        assert reserved.filled_tokens == 16 * 6
        opened = (await two.prefill.do(reserve(key("second"), longer, 16 * 7 + 1))).lease
        opened = (await two.prefill.do(pb.Operation(open=pb.Open(key=opened.key)))).lease
        await two.compute(opened, 6, 8, context=longer)
        await two.fill(opened, 16 * 7 + 1)
        reply = await two.fetch(reserved, opened)
        assert reply.blocks == 2
        two.check(reserved, 6, 8)
        await two.end(reserved.key)


async def test_a_transfer_of_no_block_is_a_transfer(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        reserved, opened = await two.begin("", tokens=3)
        await two.fill(opened, 0)
        reply = await two.fetch(reserved, opened)
        assert (reply.blocks, reply.path) == (0, "")
        adopted = await two.decode.adopt(reserved.key)
        assert adopted.filled_tokens == 0
        await two.end(adopted.key)


async def test_of_a_window_only_what_is_still_seen_is_brought(tmp_path: Path) -> None:
    # Two groups: full attention in blocks of 32 tokens, and a window of 20 tokens in blocks of 16.
    shape = layout(groups=((32, 0), (16, 20)))
    async with pair(tmp_path, shape) as two:
        reserved, opened = await two.begin(CONTEXT, 16 * 6)
        call = two.fetch(reserved, opened)
        for index in range(3):
            two.contents[0, index] = bytes([index]) * SLOT
            two.there.write(opened.tables[0].slots[index], two.contents[0, index])
        await two.compute(opened, 0, 6, group=1)
        trim = pb.Trim(key=opened.key, group=1, first_kept_block=4)
        await two.prefill.do(pb.Operation(trim=trim))
        await two.fill(opened, 16 * 6)
        reply = await call
        # A query at position 96 sees positions from 77 on, which are in the window's last two blocks.
        assert reply.blocks == 3 + 2
        two.check(reserved, 0, 3, group=0)
        two.check(reserved, 4, 6, group=1)
        assert NO_SLOT not in reserved.tables[1].slots
        # Blocks that were not transferred are given back, so that nobody takes them for a part of the context.
        adopted = await two.decode.adopt(reserved.key)
        assert (list(adopted.trimmed_blocks), list(adopted.sealed_blocks)) == ([0, 4], [0, 6])
        await two.end(adopted.key)


@pytest.mark.slow
async def test_a_reader_that_is_slower_than_a_lease_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "ALIVE_SECONDS", 0.02)
    go_on = asyncio.Event()
    written: list[pb.ExportEvent] = []

    async def write(event: pb.ExportEvent) -> None:
        if event.HasField("exported"):
            await go_on.wait()
        written.append(event)

    async with pair(tmp_path) as two:
        reserved, opened = await two.begin()
        memory = two.source.service.sessions.memory
        assert memory is not None
        run = asyncio.create_task(memory.exports.run(key_of(opened.key), 0, write))
        await two.compute(opened, 0, 7)
        await two.fill(opened)  # from now on the prefill worker does not renew the lease
        for _ in range(4):
            await two.source.until(lambda reply: any(lease.state == "active" for lease in reply.leases))
            await asyncio.sleep(0.1)
            two.source.now += LEASE / 2
        go_on.set()
        async with asyncio.timeout(10):
            while not written[-1].exported.HasField("filled_tokens"):
                await asyncio.sleep(0.01)
        assert sum(len(event.exported.blocks) for event in written) == 7
        async with asyncio.timeout(10):
            while written[-1].exported.HasField(
                "filled_tokens"
            ):  # the source sends `alive` until the reader has read them
                await asyncio.sleep(0.01)
        await end_tasks(run)
        await two.end(reserved.key)
