"""A worker's client of kvtransfer when the service is killed and restarted."""

from __future__ import annotations

import asyncio
import os

import pytest

from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer
from paceline.services.kvtransfer.ledger.lease import State
from paceline.services.kvtransfer.reconciliation import RECONCILE_SECONDS
from paceline.services.worker.leases import Reservation
from tests.services.worker.unreliable_host import CONTEXT, KEY, Unreliable, UnreliableHost


async def restart(host: UnreliableHost) -> None:
    """Kill the service and start another one at the same address."""
    port = host.port
    shaped, killed = host.service.sessions.memory, host.service
    assert shaped is not None
    await killed._keeper.stop()
    await host.server.server.stop(None)
    await killed.socket.close()
    os.close(shaped.arena._descriptor)
    host.service = Unreliable(shaped.arena.path.parent)
    await host.service.start()
    host.server = RpcServer("127.0.0.1", port, Credentials())
    pb_grpc.add_KVTransferServicer_to_server(host.service, host.server.server)
    await host.server.start()


async def come_back(host: UnreliableHost) -> None:
    sessions = [host.decode.session.id, host.prefill.session.id]
    await host.until(lambda: host.service.sessions.reconciliation is not None)
    reconciliation = host.service.sessions.reconciliation
    assert reconciliation is not None
    await host.until(lambda: len(reconciliation.workers()) == 2)
    host.service.now += RECONCILE_SECONDS
    await host.until(lambda: not {host.decode.session.id, host.prefill.session.id} & {*sessions})


@pytest.mark.slow
async def test_what_the_engine_has_goes_on_over_the_death_of_the_service(host: UnreliableHost) -> None:
    lost: list[Key] = []
    for client in (host.decode, host.prefill):
        client.listen(lost.append)
    await host.decode.reserve(KEY, [], 32, 0)
    opened = await host.prefill.open(KEY)
    host.prefill.use(opened.key)
    host.prefill.seal(opened.key, 0, 0, [bytes([1]) * 16])
    await host.prefill.fill(opened.key, 32, CONTEXT)
    answer = await host.decode.adopt(KEY)
    adopted = answer.reservation
    host.decode.seal_adopted(answer, [[bytes([1]) * 16]])
    host.decode.use(adopted.key)
    await host.decode.reserve(Key("waits", 1, 1), [], 16, 0)
    await host.decode.reserve(Key("prefills", 1, 1), [], 16, 0)
    writing = await host.prefill.open(Key("prefills", 1, 1))
    host.prefill.use(writing.key)
    await restart(host)
    answers: list[object] = []
    host.decode.seal(adopted.key, 0, 1, [bytes([2]) * 16])
    host.decode.extend(adopted.key, 48, answers.append)
    await come_back(host)
    await host.until(lambda: bool(answers))
    assert [(lease.key, lease.state) for lease in host.leases()] == [
        (adopted.key, State.ACTIVE),
        (writing.key, State.DRAINING),
    ]
    assert isinstance(answers[0], Reservation)
    assert answers[0].tables[0][:2] == adopted.tables[0]
    assert {*lost} == {Key("waits", 1, 1), Key("prefills", 1, 1), writing.key}
    assert host.decode.has(adopted.key)
    assert not any(client.has(key) for client in (host.decode, host.prefill) for key in lost)
    host.prefill.release(writing.key)
    host.decode.release(adopted.key)
    await host.until(lambda: not host.leases())
    cached = [bytes([1]) * 16, bytes([2]) * 16]
    assert (await host.decode.reserve(Key("next", 1, 1), cached, 48, 48)).filled_tokens == 32


@pytest.mark.slow
async def test_operations_that_have_no_answer_yet_wait_for_the_service_to_come_back(host: UnreliableHost) -> None:
    host.service.pause = 60
    waiting = asyncio.create_task(host.decode.reserve(KEY, [], 64, 0))
    await host.until(lambda: bool(host.leases()))
    await restart(host)
    await come_back(host)
    async with asyncio.timeout(10):
        lease = await waiting
    assert [each.key for each in host.leases()] == [lease.key]
    host.decode.release(KEY)
    await host.all_free()


async def test_who_had_blocks_before_the_service_came_back_without_its_arena_is_lost(host: UnreliableHost) -> None:
    shaped = host.service.sessions.memory
    assert shaped is not None
    await host.decode.reserve(KEY, [], 64, 0)
    shaped.arena.path.unlink()
    await restart(host)
    async with asyncio.timeout(10):
        await host.decode.session.lost
    assert not host.decode.has(KEY)


@pytest.mark.slow
async def test_encodings_that_are_in_use_stay_over_the_death_of_the_service(host: UnreliableHost) -> None:
    lost: list[Key] = []
    for client in (host.decode, host.prefill):
        client.listen(lost.append)
    links = [bytes([number]) * 16 for number in range(8)]
    names = links[3::4]  # a block has 64 rows
    held: list[Reservation] = []
    for client, context, request in (
        (host.prefill, links, "writes"),
        (host.prefill, links, "reads"),
        (host.decode, links[:4], "decodes"),
    ):
        held.append(await client.reserve(Key(request, 1, 1), context, 16 * len(context), 128, encoding=True))
        client.use(held[-1].key)
        if client is host.prefill:
            await client.publish(held[-1].key, names)
    await host.prefill.reserve(Key("waits", 1, 1), links[:4], 64, 64, encoding=True)
    await restart(host)
    await come_back(host)
    assert {lease.key.request_id: (lease.state, lease.encoding) for lease in host.leases()} == {
        "writes": (State.DRAINING, True),
        "reads": (State.DRAINING, True),
        "decodes": (State.ACTIVE, True),
    }
    assert host.service.snapshot().counts.in_flight + host.service.snapshot().counts.held == 2
    found = await host.decode.pin(Key("later", 1, 1), links, encoding=True)
    assert (found.filled_tokens, found.tables) == (128, held[0].tables)
    for client, each in zip((host.prefill, host.prefill, host.decode, host.decode), (*held, found)):
        client.release(each.key)
    await host.until(lambda: host.service.snapshot().counts.cached == 2)
    assert lost == []
