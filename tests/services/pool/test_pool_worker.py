"""A pool worker: the results of many calls, each the same as alone, without KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import torch
import transformers

from paceline.core.config import PoolConfig
from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import PoolResult, TextRow
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.pool_wire import wish_to_pb
from paceline.services.common.rpc import open_channel
from paceline.services.pool.main import add_pool, make_worker, resolve
from paceline.services.pool.worker import PoolWorker
from paceline.services.worker import pool_messages
from paceline.services.worker.worker_process import WorkerProcess
from tests.services.pool.tiny_bert import SIZE, WORDS, expected_embedding, token_ids, write_tiny_bert

TEXTS = [" ".join(WORDS[index : index + 1 + index % 9]) for index in range(12)]
POISON = 30
"""A token at which the tests' model fails."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.BertModel]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, write_tiny_bert(folder)


@pytest.fixture
async def process(
    checkpoint: tuple[Path, transformers.BertModel], redis_server: str
) -> AsyncIterator[WorkerProcess[PoolWorker]]:
    config = PoolConfig(
        model=str(checkpoint[0]), threads=1, redis=redis_server, cluster="pool", max_seqs=32, max_batched_tokens=32
    )
    running = await WorkerProcess.start(config, "pool", make_worker, add_pool, resolve)
    try:
        yield running
    finally:
        await running.drain(10)
        await running.close()


@pytest.fixture
async def stub(process: WorkerProcess[PoolWorker]) -> AsyncIterator[Any]:
    channel = open_channel(process.address, Credentials())
    yield worker_pb2_grpc.ComputeStub(channel)
    await channel.close(None)


def pool_work(process: WorkerProcess[PoolWorker], inputs: Sequence[Sequence[int]], **wish: Any) -> common_pb2.Work:
    work = common_pb2.Work(model=process.worker.model_id, kind=common_pb2.WORK_KIND_POOL)
    work.key.request_id = "pooled"
    work.pool.CopyFrom(wish_to_pb(PoolWish("embed", **wish)))
    for ids in inputs:
        work.pool.inputs.add(token_ids=ids)
    return work


async def rows(stub: Any, work: common_pb2.Work) -> list[bytes]:
    """Return the bytes of each input's result. Each event must name inputs that have no result yet."""
    found: dict[int, bytes] = {}
    events = [event async for event in stub.Run(work)]
    assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == ["opened", "computed"]
    for pooled in [event.pooled for event in events if event.HasField("pooled")]:
        size = 4 * pooled.dim
        for place, count in enumerate(pooled.rows):
            assert count == 1
            assert pooled.first + place not in found
            found[pooled.first + place] = pooled.data[place * size : (place + 1) * size]
    return [found[index] for index in range(len(work.pool.inputs))]


async def test_results_are_those_of_transformers_and_depend_on_no_other_input(
    process: WorkerProcess[PoolWorker], stub: Any, checkpoint: tuple[Path, transformers.BertModel]
) -> None:
    inputs = [token_ids(text) for text in TEXTS]
    alone = [(await rows(stub, pool_work(process, [ids])))[0] for ids in inputs]
    for text, data in zip(TEXTS, alone, strict=True):
        expected = expected_embedding(checkpoint[1], text).numpy()
        assert np.abs(np.frombuffer(data, "<f4") - expected).max() < 2e-5
    # One call of many steps, and many calls at the same time.
    together = await asyncio.gather(
        rows(stub, pool_work(process, inputs)), *(rows(stub, pool_work(process, [ids])) for ids in inputs)
    )
    assert together[0] == alone
    assert [own for (own,) in together[1:]] == alone
    figures = {sample.figure: sample.value for sample in process.worker.samples()}
    assert figures["pooled_inputs"] == 3 * len(TEXTS)
    assert figures["steps"] < 3 * len(TEXTS)
    # The planner learns the times of steps by their tokens.
    loads = process.worker.work().steps
    assert sum(load.tokens for load in loads) == figures["pooled_tokens"] == 3 * sum(map(len, inputs))
    assert all(load.context == 0 and load.seconds.counts for load in loads)


async def test_a_member_of_the_role_pool_has_no_host(process: WorkerProcess[PoolWorker]) -> None:
    member = process._describe()
    assert (member.role, member.host_id, member.layout, member.state) == ("pool", "", "", "ready")
    assert member.max_model_len == 64
    assert member.weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [[]]}, "an input has 0 tokens"),
        ({"inputs": [[5] * 65]}, "65 tokens; this worker takes 1 to 64"),
        ({"inputs": [[5, 99]]}, "token ids must be from 0 to 30"),
        ({"inputs": [[5]], "dimensions": 8}, "dimensions must be 32"),
        ({"inputs": []}, "at least one input"),
    ],
)
async def test_work_that_cannot_be_done_is_refused(
    process: WorkerProcess[PoolWorker], stub: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
        await rows(stub, pool_work(process, **change))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Fragile:
    """A model that fails at a token, and else gives the first token as the result."""

    def check(self, inputs: Sequence[TextRow], wish: PoolWish) -> None:
        """Take everything."""

    def run(self, inputs: Sequence[TextRow], wish: PoolWish) -> list[PoolResult]:
        if any(POISON in row.token_ids for row in inputs):
            raise RuntimeError("poison")
        return [PoolResult(torch.full((1, SIZE), float(row.token_ids[0]))) for row in inputs]


async def test_an_input_at_which_the_model_fails_ends_only_its_own_call(
    process: WorkerProcess[PoolWorker], stub: Any
) -> None:
    worker, model = process.worker, Fragile()
    worker._model = worker.steps.model = model  # type: ignore[assignment]
    good = [pool_work(process, [[index], [index + 1]]) for index in range(5, 10)]
    bad = pool_work(process, [[5], [POISON]])
    results = await asyncio.gather(*(rows(stub, work) for work in (bad, *good)), return_exceptions=True)
    assert isinstance(results[0], grpc.aio.AioRpcError)
    assert "poison" in str(results[0])
    for index, found in enumerate(results[1:], start=5):
        assert not isinstance(found, BaseException)
        assert [np.frombuffer(data, "<f4")[0] for data in found] == [index, index + 1]


async def test_a_call_that_is_cancelled_takes_no_further_steps(process: WorkerProcess[PoolWorker], stub: Any) -> None:
    call = stub.Run(pool_work(process, [[5] * 30] * 2000))
    assert (await call.read()).HasField("opened")
    while not (await call.read()).HasField("pooled"):
        pass
    call.cancel()
    async with asyncio.timeout(20):
        while process.worker.admission.active:
            await asyncio.sleep(0.01)
    own = process.worker.steps
    assert own.waiting_tokens == 0
    assert {each.figure: each.value for each in own.samples()}["pooled_inputs"] < 2000
    assert await rows(stub, pool_work(process, [[6, 7]]))


async def test_a_draining_worker_finishes_its_calls_and_takes_no_new_ones(
    process: WorkerProcess[PoolWorker], stub: Any
) -> None:
    inputs = [[5, 6, 7]] * 200
    running = asyncio.create_task(rows(stub, pool_work(process, inputs)))
    while not process.worker.admission.active:
        await asyncio.sleep(0.001)
    process.worker.admission.begin_drain()
    with pytest.raises(grpc.aio.AioRpcError, match="draining"):
        await rows(stub, pool_work(process, [[5]]))
    assert len(await running) == len(inputs)


def test_results_that_are_too_large_for_one_message_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_messages, "MESSAGE_BYTES", 3 * 16)
    results = [PoolResult(torch.full((2, 2), float(index))) for index in range(5)]
    results[2] = PoolResult(None, "not finite")
    messages: list[worker_pb2.Pooled] = list(pool_messages.to_messages(7, results))
    assert [(each.first, list(each.rows)) for each in messages] == [(7, [2, 2, 0, 2]), (11, [2])]
    assert b"".join(each.data for each in messages) == b"".join(
        each.values.numpy().tobytes() for each in results if each.values is not None
    )
    assert [(error.input, error.message) for each in messages for error in each.errors] == [(9, "not finite")]
