"""Prefill and decode workers of one host, end to end below the gateway: real gRPC, a real arena, tiny random models."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from paceline.core.types import Key
from paceline.engine.step import NeedsBlocks
from paceline.proto import common_pb2, kvtransfer_pb2, worker_pb2
from paceline.services.common import kv_memory
from paceline.services.common.wire import key_from_pb
from paceline.services.kvtransfer.host_socket import Answer
from tests.services.common.conftest import Host, StartHost
from tests.tiny_checkpoints import SaveTiny


def prompts(count: int, shortest: int = 3, longest: int = 200) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 100) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def reference_tokens(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite_hybrid"])
async def test_handoff_and_aggregation_give_the_reference_tokens(
    architecture: str, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reference = request.getfixturevalue(f"save_{architecture}")()
    async with start_host(tmp_path, max_batched_tokens=48) as host:
        cases = prompts(6)
        expected = [reference_tokens(reference, prompt, 24) for prompt in cases]
        for aggregated in (False, True):
            outcomes = await asyncio.gather(*(host.generate(prompt, 24, aggregated) for prompt in cases))
            assert [outcome.tokens for outcome in outcomes] == expected
        assert await host.all_blocks_back()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "granite_hybrid"])
async def test_between_pools_of_one_device_blocks_do_not_come_by_the_arena(
    architecture: str, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reference = request.getfixturevalue(f"save_{architecture}")()
    async with start_host(tmp_path, kv_pool="device") as host:
        for prompt in prompts(4):
            outcome = await host.generate(prompt, 24)
            assert outcome.tokens == reference_tokens(reference, prompt, 24)
            (adopted,) = [report.adopted for report in outcome.reports if report.HasField("adopted")]
            assert adopted.path == "device"
        stats = host.decode.worker.engine.stats
        assert stats.device_blocks >= 4
        assert stats.loaded_blocks == 0
        # The pool's worker goes, and its blocks are there nevertheless.
        before = stats.device_blocks
        host.prefill.worker.memory.close()
        assert (await host.generate(prompt[::-1], 24)).tokens == reference_tokens(reference, prompt[::-1], 24)
        assert (stats.device_blocks, stats.loaded_blocks > 0) == (before, True)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
async def test_pools_that_give_blocks_up_while_they_are_read(
    architecture: str,
    start_host: StartHost,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = request.getfixturevalue(f"save_{architecture}")()
    monkeypatch.setattr(kv_memory, "KV_TOKENS", 1)  # room for one long context
    async with start_host(tmp_path, 32 << 20, kv_pool="device", max_model_len=256, max_batched_tokens=48) as host:
        cases = prompts(12)
        outcomes = await asyncio.gather(*(host.generate(prompt, 24) for prompt in cases))
        assert [outcome.tokens for outcome in outcomes] == [reference_tokens(reference, each, 24) for each in cases]
        stats = host.decode.worker.engine.stats
        assert stats.device_blocks > 0
        assert stats.loaded_blocks > 0
        assert await host.all_blocks_back()


async def test_a_worker_tells_how_many_tokens_of_prompts_it_has_not_computed(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path, max_batched_tokens=16, max_seqs=8) as host:
        worker = host.prefill.worker
        most = 0
        running = asyncio.gather(*(host.generate(prompt, 4) for prompt in prompts(6, 100, 110)))
        while not running.done():
            most = max(most, worker.queued_tokens)
            await asyncio.sleep(0)
        assert 16 < most <= 6 * 110
        await host.generate(prompts(1, 150, 160)[0], 50, aggregated=True, cancel_after=1)
        assert await host.all_blocks_back()
        assert (worker.queued_tokens, host.decode.worker.queued_tokens) == (0, 0)


@pytest.mark.parametrize("architecture", ["gemma3", "granite_hybrid"])
async def test_a_second_turn_reuses_prompt_and_output(
    architecture: str, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(f"save_{architecture}")()
    async with start_host(tmp_path) as host:
        first = prompts(1, 150, 160)[0]
        answer = (await host.generate(first, 120)).tokens
        second = [*first, *answer, 7, 8, 9]
        again = await host.generate(second, 10)
        fresh = await host.generate(second, 10, aggregated=True, prompt_logprobs=0)
        assert again.cached_tokens >= 192
        assert fresh.cached_tokens == 0
        assert again.tokens == fresh.tokens


@pytest.mark.parametrize(
    ("architecture", "kv_memory"),
    # Room for about three of the ten: of a hybrid's blocks each has 64 tokens, and two are held of each four of states.
    [("llama", 44 * 12288), ("granite_hybrid", 20 * 28672)],
)
async def test_a_small_arena_preempts_and_everybody_finishes(
    architecture: str, kv_memory: int, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue(f"save_{architecture}")()
    cases = prompts(10, 20, 60)
    async with start_host(tmp_path) as host:
        expected = [(await host.generate(prompt, 150)).tokens for prompt in cases]
    async with start_host(tmp_path, kv_memory=kv_memory, max_model_len=256) as host:
        outcomes = await asyncio.gather(*(eventually(host, prompt) for prompt in cases))
        assert outcomes == expected
        assert host.decode.worker.engine.stats.preemptions > 0
        assert await host.all_blocks_back()


async def eventually(host: Host, prompt: list[int]) -> list[int]:
    """Like the gateway: a refused request comes again."""
    for _ in range(2000):
        try:
            return (await host.generate(prompt, 150)).tokens
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(0.02)
    raise AssertionError("never admitted")


async def test_a_cancelled_request_gives_its_blocks_back(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path, max_batched_tokens=16) as host:
        # while decoding
        await host.generate(prompts(1)[0], 3000, cancel_after=5)
        assert await host.all_blocks_back(1.0)
        # while prefilling, by the gateway's cancelling of both calls
        running = asyncio.create_task(host.generate(prompts(1, 3500, 3600)[0], 10))
        while (await host.ledger()).in_flight == 0:
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await host.all_blocks_back(1.0)
        assert host.prefill.worker.admission.active == host.decode.worker.admission.active == 0


async def test_a_request_whose_lease_ended_stops_and_touches_nothing(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path, max_batched_tokens=1) as host:
        running = asyncio.create_task(host.generate(prompts(1, 4000, 4090)[0], 4))
        while host.prefill.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.005)
        host.clock.ahead = 60.0
        with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
            await running
        assert await host.all_blocks_back()
        assert len((await host.generate([5, 6, 7], 5)).tokens) == 5


async def test_a_decoding_request_whose_lease_ended_stops_when_it_asks_for_blocks(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        running = asyncio.create_task(host.generate(prompts(1)[0], 3500))
        while host.decode.worker.engine.stats.sampled_tokens < 20:
            await asyncio.sleep(0.005)
        host.clock.ahead = 60.0
        with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
            await running
        assert await host.all_blocks_back()
        assert host.decode.worker.engine.stats.preemptions == 0


async def test_blocks_lost_between_reservation_and_first_step_are_not_computed_in(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        worker = host.decode.worker
        key = common_pb2.Key(request_id="r", attempt=1, generation=1)
        sampling = common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=20)
        work = common_pb2.Work(key=key, model=host.model, token_ids=[5, 6, 7], prompt_tokens=3, sampling=sampling)
        call = host.decode_call(30)
        await call.write(worker_pb2.DecodeCommand(admit=work))
        held = key_from_pb((await call.read()).admitted.key)
        assert worker.kv.holds(held)
        host.clock.ahead = 60.0
        async with asyncio.timeout(10):
            while worker.kv.holds(held):
                await asyncio.sleep(0.01)
        await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
        with pytest.raises(grpc.aio.AioRpcError, match="its lease ended") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert await host.all_blocks_back()
        assert worker.engine.stats.steps == 0


async def test_an_answer_about_blocks_of_what_no_longer_runs_is_ignored(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        worker = host.decode.worker
        hold = await worker.kv.reserve(Key("r", 1, 1), [], 16, 0)
        worker._dispatch([NeedsBlocks(hold.key, 1 << 20)])  # more than there are: refused
        other = await worker.kv.reserve(Key("other", 1, 1), [], 16, 0)
        worker.retire(other.key)
        # What the refusal would have ended, would have ended before the other one.
        while len(left := (await host.ledger()).holds) > 1:
            await asyncio.sleep(0.01)
        assert [each.key.request_id for each in left] == ["r"]
        worker.retire(hold.key)
        assert await host.all_blocks_back()


async def test_scores_of_the_prompt_agree_between_chunkings(
    start_host: StartHost, save_gemma3: SaveTiny, tmp_path: Path
) -> None:
    save_gemma3()
    prompt = prompts(1, 90, 100)[0]
    async with start_host(tmp_path, max_batched_tokens=16) as host:
        chunked = await host.generate(prompt, 2, prompt_logprobs=1)
    async with start_host(tmp_path) as host:
        whole = await host.generate(prompt, 2, aggregated=True, prompt_logprobs=1)
    assert [token.id for token in chunked.scores] == [token.id for token in whole.scores] == prompt[1:]
    for one, other in zip(chunked.scores, whole.scores):
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)


async def test_seeded_sampling_agrees_between_handoff_and_aggregation(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        prompt = prompts(1)[0]
        params = {"temperature": 1.0, "seed": 99, "frequency_penalty": 0.3}
        first = await host.generate(prompt, 40, **params)
        second = await host.generate(prompt, 40, aggregated=True, **params)
        other = await host.generate(prompt, 40, temperature=1.0, seed=100, frequency_penalty=0.3)
        assert first.tokens == second.tokens != other.tokens


async def test_a_full_or_draining_worker_refuses(start_host: StartHost, save_llama: SaveTiny, tmp_path: Path) -> None:
    save_llama()
    async with start_host(tmp_path, max_seqs=1) as host:
        running = asyncio.create_task(host.generate([5, 6, 7], 600))
        while host.decode.worker.admission.active == 0:
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError, match="RESOURCE_EXHAUSTED"):
            await host.generate([5, 6, 7], 2)
        draining = asyncio.create_task(host.decode.drain(30))
        while not host.decode.worker.admission.draining:
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await host.generate([5, 6, 7], 2)
        assert len((await running).tokens) == 600
        await draining


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "at least one prompt token"),
        ({"token_ids": [101]}, "vocabulary"),
        ({"prompt_tokens": 9}, "at least one prompt token"),
        ({"token_ids": [5] * 4096, "prompt_tokens": 4096}, "4096 tokens"),
        ({"key": common_pb2.Key()}, "id"),
    ],
)
async def test_impossible_work_is_refused(
    change: dict[str, object], said: str, start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    fields = {
        "key": common_pb2.Key(request_id="r", attempt=1, generation=1),
        "token_ids": [5, 6],
        "prompt_tokens": 2,
        "sampling": common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=3),
    }
    fields.update(change)
    if "token_ids" in change and "prompt_tokens" not in change:
        fields["prompt_tokens"] = len(change["token_ids"])  # type: ignore[arg-type]
    async with start_host(tmp_path) as host:
        call = host.decode_call(10)
        work = common_pb2.Work(model=host.model, **fields)  # type: ignore[arg-type]
        await call.write(worker_pb2.DecodeCommand(admit=work))
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ledger = await host.ledger()
        assert ledger.held == ledger.in_flight == 0


async def test_prefill_without_a_reservation_is_refused(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        work = common_pb2.Work(
            key=common_pb2.Key(request_id="nobody", attempt=1, generation=1),
            model=host.model,
            token_ids=[5, 6],
            prompt_tokens=2,
            sampling=common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=3),
        )
        call = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
            await call.read()


async def test_a_prompt_s_blocks_are_decode_s_before_the_gateway_says_so(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        expected = (await host.generate([5, 6, 7], 8)).tokens
        work = _work(host, "early", [5, 6, 7])
        decode = host.decode_call()
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        work.key.CopyFrom((await decode.read()).admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=60)
        filled = [event async for event in prefill][-1].filled
        assert not host.decode.worker.kv.holds(Key("early", 1, filled.key.generation))
        async with asyncio.timeout(10):
            while not host.decode.worker.kv.holds(Key("early", 1, filled.key.generation + 1)):
                await asyncio.sleep(0.01)
        handoff = worker_pb2.Handoff(key=filled.key, first_token_id=expected[0])
        await decode.write(worker_pb2.DecodeCommand(handoff=handoff))
        tokens = [expected[0]]
        while not (event := await decode.read()).HasField("finished"):
            tokens += [token.id for token in event.tokens.tokens]
        assert tokens == expected


async def test_only_a_prompt_for_another_host_ends_with_a_short_chunk(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path, max_batched_tokens=512) as host:
        chunks: dict[str, list[int]] = {"host": [], "another": []}
        for host_id, prompt in zip(chunks, prompts(2, 1000, 1000)):
            work = _work(host, host_id, prompt)
            if host_id == "host":
                decode = host.decode_call()
                await decode.write(worker_pb2.DecodeCommand(admit=work))
                work.key.CopyFrom((await decode.read()).admitted.key)
            request = worker_pb2.PrefillRequest(work=work, host_id=host_id)
            async for event in host.prefill_stub.Run(request, timeout=60):
                chunks[host_id] += [chunk.tokens for chunk in event.report.chunks]
        assert chunks == {"host": [500, 500], "another": [436, 436, 128]}


async def test_who_waits_its_turn_is_said_to_be_alive(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.common.event_stream.ALIVE_SECONDS", 0.02)
    save_llama()
    async with start_host(tmp_path, max_batched_tokens=16) as host:
        first = asyncio.create_task(host.generate(prompts(1, 2000, 2100)[0], 1))
        while host.prefill.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.001)
        second = await host.generate([5, 6, 7], 1)
        assert second.alive
        assert len((await first).tokens) == len(second.tokens) == 1


async def test_newcomers_wait_for_the_preempted(start_host: StartHost, save_llama: SaveTiny, tmp_path: Path) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        one, other = Key("one", 1, 2), Key("other", 1, 2)
        with host.decode.worker.admission.waiting_for_blocks(one) as is_first:
            with host.decode.worker.admission.waiting_for_blocks(other) as other_is_first:
                assert (is_first(), other_is_first()) == (True, False)
            with pytest.raises(grpc.aio.AioRpcError, match="they come first"):
                await host.generate([5, 6, 7], 3)
        assert len((await host.generate([5, 6, 7], 3)).tokens) == 3


def _work(host: Host, request_id: str, token_ids: list[int]) -> common_pb2.Work:
    return common_pb2.Work(
        key=common_pb2.Key(request_id=request_id, attempt=1, generation=1),
        model=host.model,
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        sampling=common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=8),
    )


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
    wrong: dict[str, object], start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        before = (await host.generate([5, 6, 7], 8)).tokens
        calls = {name: host.decode_call() for name in ("theirs", "ours")}
        filled = {}
        for name, call in calls.items():
            work = _work(host, name, [5, 6, 7])
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
        # Theirs are still theirs.
        handoff = worker_pb2.Handoff(key=filled["theirs"], first_token_id=before[0])
        await calls["theirs"].write(worker_pb2.DecodeCommand(handoff=handoff))
        tokens: list[int] = []
        while not (event := await calls["theirs"].read()).HasField("finished"):
            tokens += [token.id for token in event.tokens.tokens]
        assert tokens == before[1:]
        assert await host.all_blocks_back()


async def test_blocks_that_hold_more_than_the_context_are_refused(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    async with start_host(tmp_path) as host:
        prompt = prompts(1, 60, 70)[0]
        before = (await host.generate(prompt, 8)).tokens
        decode = host.decode_call()
        work = _work(host, "r", prompt)
        await decode.write(worker_pb2.DecodeCommand(admit=work))
        admitted = (await decode.read()).admitted
        assert admitted.cached_tokens >= 48
        shorter = _work(host, "r", prompt[:5])
        shorter.key.CopyFrom(admitted.key)
        prefill = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=shorter, host_id="host"), timeout=60)
        assert (await prefill.read()).HasField("opened")
        assert await prefill.code() is grpc.StatusCode.INVALID_ARGUMENT
        decode.cancel()
        assert await host.all_blocks_back()
        assert (await host.generate(prompt, 8)).tokens == before


async def test_what_the_last_step_fills_is_sealed_behind_the_handoff(
    start_host: StartHost, save_llama: SaveTiny, tmp_path: Path
) -> None:
    """By decode, which waits for the blocks and for nothing else."""
    save_llama()
    batches: list[list[str]] = []
    async with start_host(tmp_path) as host:
        serve = host.service.serve

        def noting(request: kvtransfer_pb2.BatchRequest) -> Answer:
            batches.append([operation.WhichOneof("op") or "" for operation in request.operations])
            return serve(request)

        host.service.serve = noting  # type: ignore[method-assign]
        await host.generate(range(40), max_tokens=2)
        memory = host.service.sessions.memory
        assert memory is not None
        assert [len(names) for names in memory.ledger.reusable()] == [2]
    (filling,) = [number for number, batch in enumerate(batches) if "fill" in batch]
    assert batches[filling] == ["fill"]
    assert not any("seal" in batch for batch in batches[:filling])
    assert batches[:filling].count(["adopt"]) == 1
