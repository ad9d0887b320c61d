"""One attempt, against toy workers. test_trouble.py tests what a client sees of attempts that fail."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from paceline.core.types import Key, SamplingParams
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.wire import key_to_pb, sampling_to_pb
from paceline.services.gateway.routing.candidates import Placement
from paceline.services.gateway.sequences.attempt import Attempt
from paceline.services.gateway.sequences.progress import Ended, Event, HandedOver
from paceline.services.gateway.sequences.worker_call import ADMIT_SECONDS, WorkerCall
from tests.services.gateway.conftest import PATIENCE, Cluster


def make_work(max_tokens: int) -> common_pb2.Work:
    return common_pb2.Work(
        key=key_to_pb(Key("r", 1, 1)),
        token_ids=[1, 2, 3],
        prompt_tokens=3,
        sampling=sampling_to_pb(SamplingParams(max_tokens=max_tokens)),
    )


@pytest.mark.parametrize(("max_tokens", "end"), [(9, HandedOver), (1, Ended)])
async def test_a_prefill_worker_that_is_done_is_not_counted_any_more(
    cluster: Cluster, max_tokens: int, end: type[Event]
) -> None:
    await cluster.add("d")
    await cluster.add("p", "prefill")
    decode, prefill = cluster.fleet.worker("d"), cluster.fleet.worker("p")
    attempt = Attempt(
        cluster.fleet,
        Placement(decode.member, prefill.member),
        make_work(max_tokens),
        seconds=PATIENCE,
        stall_seconds=PATIENCE,
    )
    await attempt.admit()
    assert (decode.in_flight, prefill.in_flight) == (1, 1)
    seen: list[tuple[int, int]] = []

    def take(event: Event) -> None:
        if isinstance(event, end) and not seen:
            seen.append((decode.in_flight, prefill.in_flight))

    await attempt.run(take)
    assert seen == [(1, 0)]
    attempt.close()
    assert (decode.in_flight, prefill.in_flight) == (0, 0)


async def test_a_prompt_that_decode_has_computed_is_not_queued_any_more(cluster: Cluster) -> None:
    await cluster.add("d")
    decode = cluster.fleet.worker("d")
    attempt = Attempt(
        cluster.fleet, Placement(decode.member, None), make_work(9), seconds=PATIENCE, stall_seconds=PATIENCE
    )
    await attempt.admit()
    assert decode.candidate(0).queued_tokens == 3
    seen: list[tuple[int, float]] = []
    await attempt.run(lambda _: seen.append((decode.in_flight, decode.candidate(0).queued_tokens)))
    attempt.close()
    assert set(seen) == {(1, 0)}


async def test_a_call_that_is_cancelled_before_it_began_is_not_waited_for(cluster: Cluster) -> None:
    await cluster.add("d")
    decode = cluster.fleet.worker("d")
    async with grpc.aio.insecure_channel("127.0.0.1:9") as nowhere:
        call = worker_pb2_grpc.DecodeStub(nowhere).Generate(wait_for_ready=True)  # type: ignore[call-arg]
        writing = asyncio.create_task(WorkerCall(call, decode, None).write(worker_pb2.DecodeCommand()))
        await asyncio.sleep(0)
        call.cancel()
        async with asyncio.timeout(ADMIT_SECONDS / 2):
            await writing
