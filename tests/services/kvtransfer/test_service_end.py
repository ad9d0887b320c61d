"""The end of workers, leases and the service, and what an operator sees."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.host_memory import AwakeClock
from tests.services.kvtransfer.kv_host import SLOTS, Host, batch, key, layout, release, reserve
from tests.services.kvtransfer.kv_toolkit import LEASE

pytestmark = pytest.mark.slow


async def test_a_session_ends_with_its_stream(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    worker = await host.attach()
    await worker.leave()
    await host.attach()
    for session in (worker.arena.session, 0, 12345):
        with pytest.raises(UnavailableError, match="has ended"):
            await batch(worker.arena.socket_path, pb.BatchRequest(session=session))
        assert f"session {session} is over" in caplog.text


async def test_a_killed_worker_gives_its_blocks_back(host: Host) -> None:
    survivor = await host.attach("survivor")
    await survivor.do(reserve(key("survivor"), tokens=16))
    code = (
        "import socket, sys, time, grpc\n"
        "from paceline.proto import kvtransfer_pb2 as pb, kvtransfer_pb2_grpc, common_pb2\n"
        "stub = kvtransfer_pb2_grpc.KVTransferStub(grpc.insecure_channel(sys.argv[1]))\n"
        "layout = pb.KVLayout.FromString(bytes.fromhex(sys.argv[2]))\n"
        "stream = stub.Attach(pb.AttachRequest(worker_id='victim', layout=layout))\n"
        "arena = next(stream)\n"
        "key = common_pb2.Key(request_id='victim', attempt=1, generation=1)\n"
        "reserve = pb.Operation(reserve=pb.Reserve(key=key, token_count=48))\n"
        "request = pb.BatchRequest(session=arena.session, operations=[reserve]).SerializeToString()\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect(arena.socket_path)\n"
        "connection.sendall(len(request).to_bytes(4, 'big') + request)\n"
        "time.sleep(60)\n"
    )
    shape = layout().SerializeToString().hex()
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", code, host.address, shape)
    try:
        reply = await host.until(lambda reply: reply.held == 4)
        assert {lease.owner for lease in reply.leases} == {"survivor", "victim"}
    finally:
        victim.send_signal(signal.SIGKILL)
        await asyncio.wait_for(victim.wait(), 20)
    await host.until(lambda reply: reply.in_flight == 3)  # during the grace: a worker may run on without its stream
    host.now += 1
    reply = await host.until(lambda reply: reply.free == SLOTS - 1)
    assert [lease.key.request_id for lease in reply.leases] == ["survivor"]
    assert reply.expired_leases == 1


async def test_a_lease_that_nobody_renews_ends(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=64))
    host.now += LEASE
    reply = await host.until(lambda reply: reply.expired_leases == 1)
    assert [(lease.state, lease.expires_in_ms) for lease in reply.leases] == [("draining", 0)]
    assert (reply.free, reply.in_flight) == (SLOTS - 4, 4)
    result = await worker.do(pb.Operation(release=pb.Release(key=key())))
    assert result.code == pb.CODE_OK
    reply = await host.until(lambda reply: reply.free == SLOTS)
    assert len(reply.leases) == 0


@pytest.mark.parametrize("first", ["tick", "call"])
async def test_a_standstill_of_the_service_ends_no_lease(tmp_path: Path, first: str) -> None:
    stopped = 0.0
    host = Host(tmp_path, clock=AwakeClock(lambda: time.monotonic() + stopped))
    await host.start()
    try:
        worker = await host.attach()
        await worker.do(reserve(key(), tokens=64))
        stopped += 100 * LEASE
        if first == "tick":
            await asyncio.sleep(1)
        await worker.do(pb.Operation(extend=pb.Extend(key=key(), token_count=80)))
        assert (await host.ledger()).expired_leases == 0
    finally:
        await host.close()


async def test_the_ledger_shows_who_has_what(host: Host) -> None:
    decode, prefill = await host.attach("decode-1"), await host.attach("prefill-1")
    await decode.do(reserve(key(), "ab", 48))
    host.now += 2
    await prefill.do(pb.Operation(open=pb.Open(key=key())))
    host.now += 1
    reply = await host.ledger()
    assert (reply.host_id, reply.balanced, reply.prefix_queries_tokens) == ("host-1", True, 32)
    assert list(reply.leases) == [
        pb.LeaseInfo(
            key=key(generation=2),
            state="filling",
            owner="decode-1",
            writer="prefill-1",
            blocks=3,
            age_ms=3000,
            expires_in_ms=int(LEASE * 1000) - 1000,
            blocks_by_group={"g0": 3},
            token_count=48,
        )
    ]


async def test_an_imbalance_is_loud(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=16))
    (lease,) = host.service.sessions.memory.ledger.leases()  # type: ignore[union-attr]
    lease.tables[0].append(lease.tables[0][0])
    with caplog.at_level(logging.ERROR):
        async with asyncio.timeout(20):
            while host.service.healthy:
                await asyncio.sleep(0.02)
    assert "OUT OF BALANCE" in caplog.text
    assert not (await host.ledger()).balanced


async def test_stopping_ends_sessions_and_leaves_nothing(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), tokens=16))
    await host.service.close()
    assert await worker.stream.code() is grpc.StatusCode.UNAVAILABLE
    assert list(host.folder.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        await worker.batch(release(key()))
    late = host.stub.Attach(pb.AttachRequest(worker_id="late", layout=layout()), timeout=10)
    assert await late.code() is grpc.StatusCode.UNAVAILABLE
    assert list(host.folder.iterdir()) == []
