"""How a prompt's blocks go from a prefill to a decode worker, step by step, and which handoffs are refused."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from paceline.core.types import Key
from paceline.proto import common_pb2, kvtransfer_pb2, worker_pb2
from paceline.services.kvtransfer.host_socket import Reply
from paceline.services.kvtransfer.service import KVTransferService
from tests.services.worker.conftest import StartHost, prompts


async def test_prefill_without_a_reservation_is_refused(start_llama: StartHost) -> None:
    async with start_llama() as host:
        work = host.work("nobody", [5, 6])
        call = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
            await call.read()


async def test_a_prompt_s_blocks_are_decode_s_before_the_gateway_says_so(start_llama: StartHost) -> None:
    async with start_llama() as host:
        expected = (await host.generate([5, 6, 7], 8)).tokens
        work = host.work("early", [5, 6, 7])
        decode = host.decode_call()
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        work.key.CopyFrom((await decode.read()).admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=60)
        filled = [event async for event in prefill][-1].filled
        assert not host.decode.worker.kv.has(Key("early", 1, filled.key.generation))
        async with asyncio.timeout(10):
            while not host.decode.worker.kv.has(Key("early", 1, filled.key.generation + 1)):
                await asyncio.sleep(0.01)
        handoff = worker_pb2.Handoff(key=filled.key, first_token_id=expected[0])
        await decode.write(worker_pb2.DecodeCommand(handoff=handoff))
        tokens = [expected[0]]
        while not (event := await decode.read()).HasField("finished"):
            tokens += [token.id for token in event.tokens.tokens]
        assert tokens == expected


async def test_only_a_prompt_for_another_host_ends_with_a_short_chunk(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=512) as host:
        chunks: dict[str, list[int]] = {"host": [], "another": []}
        for host_id, prompt in zip(chunks, prompts(2, 1000, 1000)):
            work = host.work(host_id, prompt)
            if host_id == "host":
                decode = host.decode_call()
                await decode.write(worker_pb2.DecodeCommand(admit=work))
                work.key.CopyFrom((await decode.read()).admitted.key)
            request = worker_pb2.PrefillRequest(work=work, host_id=host_id)
            async for event in host.prefill_stub.Run(request, timeout=60):
                chunks[host_id] += [chunk.tokens for chunk in event.report.chunks]
        assert chunks == {"host": [500, 500], "another": [436, 436, 128]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_token_id": 101},
        {"first_token_id": 2**32 - 1},
        {"key": common_pb2.Key(request_id="theirs", attempt=1, generation=2)},
        {"key": common_pb2.Key(request_id="ours", attempt=2, generation=2)},
    ],
)
async def test_a_handoff_of_no_token_or_of_another_s_blocks_is_refused(
    wrong: dict[str, object], start_llama: StartHost
) -> None:
    async with start_llama() as host:
        before = (await host.generate([5, 6, 7], 8)).tokens
        calls = {name: host.decode_call() for name in ("theirs", "ours")}
        filled = {}
        for name, call in calls.items():
            work = host.work(name, [5, 6, 7])
            await call.write(worker_pb2.DecodeCommand(admit=work))
            work.key.CopyFrom((await call.read()).admitted.key)
            prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=60)
            filled[name] = [event async for event in prefill][-1].filled.key
        assert filled["theirs"].generation == 2
        handoff = worker_pb2.Handoff(**{"key": filled["ours"], "first_token_id": 1, **wrong})  # type: ignore[arg-type]
        await calls["ours"].write(worker_pb2.DecodeCommand(handoff=handoff))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await calls["ours"].read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # The other request still has its blocks.
        handoff = worker_pb2.Handoff(key=filled["theirs"], first_token_id=before[0])
        await calls["theirs"].write(worker_pb2.DecodeCommand(handoff=handoff))
        tokens: list[int] = []
        while not (event := await calls["theirs"].read()).HasField("finished"):
            tokens += [token.id for token in event.tokens.tokens]
        assert tokens == before[1:]
        assert await host.all_blocks_back()


async def test_blocks_that_hold_more_than_the_context_are_refused(start_llama: StartHost) -> None:
    async with start_llama() as host:
        prompt = prompts(1, 60, 70)[0]
        before = (await host.generate(prompt, 8)).tokens
        decode = host.decode_call()
        work = host.work("r", prompt)
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        admitted = (await decode.read()).admitted
        assert admitted.cached_tokens >= 48
        shorter = host.work("r", prompt[:5])
        shorter.key.CopyFrom(admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=shorter, host_id="host"), timeout=60)
        assert (await prefill.read()).HasField("opened")
        assert await prefill.code() is grpc.StatusCode.INVALID_ARGUMENT
        decode.cancel()
        assert await host.all_blocks_back()
        assert (await host.generate(prompt, 8)).tokens == before


@pytest.mark.parametrize(
    ("length", "why"),
    [(48, "48 tokens, not 60"), (59, "59 tokens"), (60, "another context"), (63, "63 tokens"), (64, "64 tokens")],
)
async def test_blocks_of_another_prompt_are_refused_and_get_no_name(
    start_llama: StartHost, length: int, why: str
) -> None:
    async with start_llama() as host:
        ours = prompts(1, 60, 60)[0]
        theirs = [*ours, *range(40, 44)][:length] if length != 60 else [*ours[:-1], ours[-1] ^ 1]
        decode, work, other = host.decode_call(), host.work("r", ours), host.work("r", theirs)
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        other.key.CopyFrom((await decode.read()).admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=other, host_id="host"), timeout=60)
        filled = [event async for event in prefill][-1].filled.key
        await decode.write(worker_pb2.DecodeCommand(handoff=worker_pb2.Handoff(key=filled, first_token_id=1)))
        with pytest.raises(grpc.aio.AioRpcError, match=why) as refused:
            await decode.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await host.all_blocks_back()
        assert (await host.generate(ours, 8)).cached_tokens == 0


async def test_a_prompt_without_room_in_the_blocks_is_refused(start_llama: StartHost) -> None:
    async with start_llama() as host:
        decode, work = host.decode_call(), host.work("r", prompts(1, 60, 60)[0])
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        longer = host.work("r", prompts(1, 90, 90)[0])
        longer.key.CopyFrom((await decode.read()).admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=longer, host_id="host"), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match="room for 80 tokens, the context has 90") as refused:
            [event async for event in prefill]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        decode.cancel()
        assert await host.all_blocks_back()


async def test_a_prompt_is_not_computed_behind_blocks_that_are_cached_of_another(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=64) as host:
        ours, theirs = prompts(2, 200, 200)
        await host.generate(ours[:65], 1)
        decode, work, other = host.decode_call(), host.work("r", ours), host.work("r", theirs)
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        admitted = (await decode.read()).admitted
        assert admitted.cached_tokens == 64
        other.key.CopyFrom(admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=other, host_id="host"), timeout=60)
        assert (await prefill.read()).HasField("opened")
        with pytest.raises(grpc.aio.AioRpcError, match="another context"):
            await prefill.read()
        decode.cancel()
        assert await host.all_blocks_back()
        await host.generate(theirs[:65], 1)
        assert (await host.generate(theirs, 8)).cached_tokens == 64


async def test_what_the_last_step_fills_is_sealed_behind_the_handoff(
    start_llama: StartHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker seals these blocks later. It waits only for the `fill`, which is not delayed by seals."""
    batches: list[list[str]] = []
    serve = KVTransferService.serve

    def noting(service: KVTransferService, request: kvtransfer_pb2.BatchRequest, reply: Reply) -> None:
        batches.append([operation.WhichOneof("op") or "" for operation in request.operations])
        serve(service, request, reply)

    monkeypatch.setattr(KVTransferService, "serve", noting)
    async with start_llama() as host:
        await host.generate(range(40), max_tokens=2)
        memory = host.service.sessions.memory
        assert memory is not None
        assert [len(names) for names in memory.ledger.reusable()] == [2]
    (filling,) = [number for number, batch in enumerate(batches) if "fill" in batch]
    assert batches[filling] == ["fill"]
    assert not any("seal" in batch for batch in batches[:filling])
    assert batches[:filling].count(["adopt"]) == 1
