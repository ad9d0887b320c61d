"""A prefill worker and a decode worker of one host exchange their roles."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.core.errors import BusyError, DrainingError
from paceline.core.turns import DecodeTurns, PrefillTurns
from paceline.proto import worker_pb2, worker_pb2_grpc
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Role, connect, read_members
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.set_role import set_role
from paceline.services.gateway.fleet.event_feed import EventFeed
from tests.services.worker.conftest import Host, StartHost, prompts

pytestmark = pytest.mark.slow


async def become(host: Host, redis_url: str, **roles: Role) -> None:
    """Give the workers new roles, by the attribute names of `host`, and wait until the cluster is told."""
    processes = {name: (host.prefill, host.decode)[name == "decode"] for name in roles}
    channels = {name: host.channels[name == "decode"] for name in roles}
    epochs = {processes[name].worker_id: await set_role(channels[name], name, role) for name, role in roles.items()}
    client = connect(redis_url)
    try:
        async with asyncio.timeout(20):
            while True:
                seen = {each.worker_id: each for each in await read_members(client, "workers", UNSIGNED)}
                if all(seen[name].epoch == epoch and seen[name].state == "ready" for name, epoch in epochs.items()):
                    break
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()
    for name, role in roles.items():
        assert seen[processes[name].worker_id].role == role
        assert bool(seen[processes[name].worker_id].events) == (role == "decode")


def exchange(host: Host) -> None:
    """Make the host's short forms of calls use the workers in their new roles."""
    host.prefill, host.decode = host.decode, host.prefill
    host.channels[0], host.channels[1] = host.channels[1], host.channels[0]
    host.prefill_stub = worker_pb2_grpc.PrefillStub(host.channels[0])
    host.decode_stub = worker_pb2_grpc.DecodeStub(host.channels[1])
    host.feed = EventFeed(host.channels[1], "the decode worker", host.decode.socket)


async def test_two_workers_exchange_their_roles_and_give_the_same_tokens(
    start_llama: StartHost, redis_server: str
) -> None:
    async with start_llama() as host:
        before = [(await host.generate(prompt, 12)).tokens for prompt in prompts(3)]
        workers = host.prefill, host.decode
        sessions = [(each._kv.session.id, each._kv.session.arena_path) for each in workers]
        old_work = host.work("stale", [5, 6, 7])
        old_work.worker_epoch = host.decode._role.epoch
        await become(host, redis_server, prefill="decode", decode="prefill")
        exchange(host)
        assert [(await host.generate(prompt, 12)).tokens for prompt in prompts(3)] == before
        assert [(each._kv.session.id, each._kv.session.arena_path) for each in workers] == sessions
        if (turns := workers[0].worker._turns) is not None:  # they use all cores of this machine
            assert isinstance(turns.present, DecodeTurns)
            assert workers[1].worker._turns is not None
            assert isinstance(workers[1].worker._turns.present, PrefillTurns)

        # The worker that decoded has its first role again: what was sent to it then is still refused.
        await become(host, redis_server, prefill="decode", decode="prefill")
        exchange(host)
        call = host.decode_call()
        await call.write(worker_pb2.DecodeCommand(admit=old_work))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert isinstance(unmapped_error(refused.value, "it"), DrainingError)
        call.cancel()
        assert await host.all_blocks_back()


async def test_a_request_ends_before_its_worker_changes_and_new_ones_are_refused(
    start_llama: StartHost, redis_server: str
) -> None:
    async with start_llama() as host:
        request = asyncio.create_task(host.generate([5, 6, 7], 300))
        while host.decode.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.005)
        after = await set_role(host.channels[1], "decode", "prefill")
        with pytest.raises(BusyError):
            await set_role(host.channels[1], "decode", "standby")
        call = host.decode_call()
        await call.write(worker_pb2.DecodeCommand(admit=host.work("newcomer", [5, 6, 7])))
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await call.read()
        call.cancel()
        assert len((await request).tokens) == 300
        async with asyncio.timeout(20):
            while host.decode._role.epoch != after:
                await asyncio.sleep(0.01)
        assert host.decode._role.name == "prefill"
