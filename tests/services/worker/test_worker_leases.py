"""When requests are cancelled or leases end, workers stop, touch no more blocks, and release them all."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from paceline.core.types import Key
from paceline.engine.step import NeedsBlocks
from paceline.proto import worker_pb2
from paceline.services.common.wire import key_from_pb
from tests.services.worker.conftest import Host, Outcome, StartHost, prompts


async def lose_leases(host: Host, running: asyncio.Task[Outcome]) -> None:
    """Let the leases expire. The running request must fail, and all blocks must be released."""
    host.clock.ahead = 60.0
    with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
        await running
    assert await host.all_blocks_back()


async def test_a_cancelled_request_gives_its_blocks_back(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=16) as host:
        # while decoding
        await host.generate(prompts(1)[0], 3000, cancel_after=5)
        assert await host.all_blocks_back()
        # while prefilling, as when the gateway cancels both calls
        running = asyncio.create_task(host.generate(prompts(1, 3500, 3600)[0], 10))
        while (await host.ledger()).in_flight == 0:
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await host.all_blocks_back()
        assert host.prefill.worker.admission.active == host.decode.worker.admission.active == 0


@pytest.mark.slow
async def test_a_request_whose_lease_ended_stops_and_touches_nothing(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=1) as host:
        running = asyncio.create_task(host.generate(prompts(1, 4000, 4090)[0], 4))
        while host.prefill.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.005)
        await lose_leases(host, running)
        assert len((await host.generate([5, 6, 7], 5)).tokens) == 5


async def test_a_decoding_request_whose_lease_ended_stops_when_it_asks_for_blocks(start_llama: StartHost) -> None:
    async with start_llama() as host:
        running = asyncio.create_task(host.generate(prompts(1)[0], 3500))
        while host.decode.worker.engine.stats.sampled_tokens < 20:
            await asyncio.sleep(0.005)
        await lose_leases(host, running)
        assert host.decode.worker.engine.stats.preemptions == 0


@pytest.mark.slow
async def test_blocks_lost_between_reservation_and_first_step_are_not_computed_in(start_llama: StartHost) -> None:
    async with start_llama() as host:
        worker = host.decode.worker
        call = host.decode_call(30)
        await call.write(worker_pb2.DecodeCommand(admit=host.work("r", [5, 6, 7], 20)))
        held = key_from_pb((await call.read()).admitted.key)
        assert worker.kv.has(held)
        host.clock.ahead = 60.0
        async with asyncio.timeout(10):
            while worker.kv.has(held):
                await asyncio.sleep(0.01)
        await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
        with pytest.raises(grpc.aio.AioRpcError, match="its lease ended") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert await host.all_blocks_back()
        assert worker.engine.stats.steps == 0


async def test_an_answer_about_blocks_of_what_no_longer_runs_is_ignored(start_llama: StartHost) -> None:
    async with start_llama() as host:
        worker = host.decode.worker
        lease = await worker.kv.reserve(Key("r", 1, 1), [], 16, 0)
        worker.dispatcher.take([NeedsBlocks(lease.key, 1 << 20)])  # more than the arena has, so it is refused
        other = await worker.kv.reserve(Key("other", 1, 1), [], 16, 0)
        worker.retire(other.key)
        # If the refusal ended the lease, it would do so before the other lease ends.
        while len(left := (await host.ledger()).leases) > 1:
            await asyncio.sleep(0.01)
        assert [each.key.request_id for each in left] == ["r"]
        worker.retire(lease.key)
        assert await host.all_blocks_back()
