"""Work without decoding: a worker of either role computes it alone, in blocks of its own."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.wire import key_from_pb
from tests.services.worker.conftest import Host, StartHost

PROMPT = list(range(3, 93))


def work(host: Host, name: str, tokens: list[int], **sampling: object) -> common_pb2.Work:
    made = host.work(name, tokens, **sampling)
    made.kind = common_pb2.WORK_KIND_SCORE
    return made


async def run(host: Host, asked: common_pb2.Work, role: int) -> list[worker_pb2.ComputeEvent]:
    """Return the events of a call to the prefill (0) or decode (1) worker."""
    stub = worker_pb2_grpc.ComputeStub(host.channels[role])
    return [event async for event in stub.Run(asked, timeout=30)]


@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
async def test_scores_are_those_of_a_request_that_generates(start_llama: StartHost, role: int) -> None:
    async with start_llama(max_batched_tokens=32, max_seqs=4) as host:
        generated = await host.generate(PROMPT, 2, prompt_logprobs=2)
        events = await run(host, work(host, "score", PROMPT, prompt_logprobs=2), role)
        assert events[0].HasField("opened")
        assert events[-1].HasField("computed")
        scores = [token for event in events for token in event.prompt_logprobs.tokens]
        assert [token.id for token in scores] == PROMPT[1:]
        assert scores == generated.scores
        chunks = [(chunk.first, chunk.tokens) for event in events for chunk in event.report.chunks]
        assert chunks[0] == (0, 32)
        assert sum(tokens for _, tokens in chunks) == len(PROMPT)
        assert await host.all_blocks_back()


async def test_a_prompt_of_one_token_has_no_score(start_llama: StartHost) -> None:
    async with start_llama() as host:
        events = await run(host, work(host, "one", [5], prompt_logprobs=0), 0)
        assert [event.WhichOneof("event") for event in events if not event.HasField("alive")] == ["opened", "computed"]


@pytest.mark.parametrize(
    ("kind", "sampling", "why"),
    [
        (common_pb2.WORK_KIND_GENERATE, {"prompt_logprobs": 0}, "does not know work of kind 1"),
        (common_pb2.WORK_KIND_SCORE, {}, "must say how many prompt_logprobs"),
    ],
)
async def test_work_that_is_not_for_this_call_is_refused(
    start_llama: StartHost, kind: common_pb2.WorkKind.ValueType, sampling: dict[str, int], why: str
) -> None:
    async with start_llama() as host:
        asked = work(host, "wrong", PROMPT, **sampling)
        asked.kind = kind
        with pytest.raises(grpc.aio.AioRpcError, match=why) as error:
            await run(host, asked, 0)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await host.all_blocks_back()


async def test_a_call_that_is_cancelled_leaves_no_block(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=16, max_seqs=4) as host:
        call = worker_pb2_grpc.ComputeStub(host.channels[0]).Run(work(host, "gone", PROMPT * 4, prompt_logprobs=0))
        async for event in call:
            if event.HasField("prompt_logprobs"):
                break
        call.cancel()
        assert await host.all_blocks_back()


async def test_a_prompt_whose_blocks_others_need_fails_and_does_not_wait_for_ever(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=16, max_seqs=4) as host:
        asked = work(host, "preempted", PROMPT * 4, prompt_logprobs=0)
        call = worker_pb2_grpc.ComputeStub(host.channels[1]).Run(asked, timeout=30)
        async for event in call:
            if event.HasField("prompt_logprobs"):
                break
        engine = host.decode.worker.engine
        engine.starve(key_from_pb(asked.key))
        with pytest.raises(grpc.aio.AioRpcError, match="needs the memory of this prompt") as error:
            async for _ in call:
                pass
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await host.all_blocks_back()
