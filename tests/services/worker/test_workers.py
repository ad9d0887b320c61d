"""Prefill and decode workers of one host, without a gateway: real gRPC, a real arena, and tiny random models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from paceline.core.types import Key
from paceline.proto import common_pb2, worker_pb2
from paceline.services.worker import kv_memory
from tests.services.worker.conftest import Host, StartHost, prompts
from tests.tiny_checkpoints import SaveTiny, write_tiny

pytestmark = pytest.mark.slow


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
        # The prefill worker's pool ends, but its blocks are also in the arena.
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
    monkeypatch.setattr(kv_memory, "KV_TOKENS", 1)  # the pool has room for one long context
    async with start_host(tmp_path, 32 << 20, kv_pool="device", max_model_len=256, max_batched_tokens=48) as host:
        cases = prompts(12)
        outcomes = await asyncio.gather(*(host.generate(prompt, 24) for prompt in cases))
        assert [outcome.tokens for outcome in outcomes] == [reference_tokens(reference, each, 24) for each in cases]
        stats = host.decode.worker.engine.stats
        assert stats.device_blocks > 0
        assert stats.loaded_blocks > 0
        assert await host.all_blocks_back()


async def test_a_worker_tells_how_many_tokens_of_prompts_it_has_not_computed(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=16, max_seqs=8) as host:
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
    # Room for about three of the ten requests. The hybrid's blocks have 64 tokens, and a request keeps two of every
    # four state blocks.
    [("llama", 44 * 12288), ("granite_hybrid", 20 * 32768)],
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


@pytest.mark.parametrize(
    "method", ["draft_model", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("ngram", "early_layers"))]
)
async def test_drafts_for_a_hybrid_change_no_token_whatever_happens_to_its_blocks(
    method: str, start_host: StartHost, tmp_path: Path
) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    heads = {"num_key_value_heads": 3}  # so that blocks have 64 tokens
    write_tiny(target, "granite_hybrid", **heads)
    write_tiny(
        drafter, "granite_hybrid", **heads, residual_multiplier=0.69
    )  # nearly the same, so that it is often right
    own = {"ngram": {"prompt_lookup_min": 1}, "early_layers": {"num_layers": 4}, "draft_model": {"model": str(drafter)}}
    config = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **own[method]}
    firsts = [(prompt * 9)[: 3 * len(prompt) // 2] for prompt in prompts(6, 20, 60)]
    async with start_host(target) as host:
        expected = [(await host.generate(prompt, 140)).tokens for prompt in firsts]
        seconds = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(firsts, expected)]
        expected += [(await host.generate(prompt, 140)).tokens for prompt in seconds]
    # Room for two or three of the requests at a time.
    memory = {"kv_memory": (32 if method == "draft_model" else 16) * 40960, "max_model_len": 448}
    async with start_host(target, **memory, max_batched_tokens=32, speculative_config=json.dumps(config)) as host:
        stats = host.decode.worker.engine.stats
        for _ in range(10):
            answers = await asyncio.gather(*(eventually(host, prompt, 140) for prompt in firsts))
            answers += await asyncio.gather(*(eventually(host, prompt, 140) for prompt in seconds))
            assert answers == expected
            if stats.preemptions > 0:
                break  # on a busy machine requests may come one after the other, so that none has to be preempted
        assert stats.preemptions > 0
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        # A later turn reads blocks that were computed with drafts.
        await host.generate(firsts[0], 140)
        again = await host.generate(seconds[0], 140)
        assert again.tokens == expected[len(firsts)]
        assert again.cached_tokens == (len(seconds[0]) - 4) // 64 * 64 > len(firsts[0])
        assert await host.all_blocks_back()


async def eventually(host: Host, prompt: list[int], max_tokens: int = 150) -> list[int]:
    """Generate as the gateway does: try again if the request is refused."""
    for _ in range(2000):
        try:
            return (await host.generate(prompt, max_tokens)).tokens
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(0.02)
    raise AssertionError("never admitted")


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


async def test_seeded_sampling_agrees_between_handoff_and_aggregation(start_llama: StartHost) -> None:
    async with start_llama() as host:
        prompt = prompts(1)[0]
        params = {"temperature": 1.0, "seed": 99, "frequency_penalty": 0.3}
        first = await host.generate(prompt, 40, **params)
        second = await host.generate(prompt, 40, aggregated=True, **params)
        other = await host.generate(prompt, 40, temperature=1.0, seed=100, frequency_penalty=0.3)
        assert first.tokens == second.tokens != other.tokens


async def test_a_full_or_draining_worker_refuses(start_llama: StartHost) -> None:
    async with start_llama(max_seqs=1) as host:
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
async def test_impossible_work_is_refused(change: dict[str, object], said: str, start_llama: StartHost) -> None:
    fields = {
        "key": common_pb2.Key(request_id="r", attempt=1, generation=1),
        "token_ids": [5, 6],
        "prompt_tokens": 2,
        "sampling": common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=3),
    }
    fields.update(change)
    if "token_ids" in change and "prompt_tokens" not in change:
        fields["prompt_tokens"] = len(change["token_ids"])  # type: ignore[arg-type]
    async with start_llama() as host:
        call = host.decode_call(10)
        work = common_pb2.Work(model=host.model, **fields)  # type: ignore[arg-type]
        await call.write(worker_pb2.DecodeCommand(admit=work))
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ledger = await host.ledger()
        assert ledger.held == ledger.in_flight == 0


async def test_who_waits_its_turn_is_said_to_be_alive(start_llama: StartHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.worker.event_stream.ALIVE_SECONDS", 0.02)
    async with start_llama(max_batched_tokens=16) as host:
        one, longer = prompts(1, 1000, 1100)[0], prompts(1, 2000, 2100)[0]
        first = asyncio.create_task(host.generate(one, 1))
        while host.prefill.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.001)
        second = await host.generate(longer, 1)  # which goes after all of the first one
        assert second.alive
        assert len((await first).tokens) == len(second.tokens) == 1


async def test_newcomers_wait_for_the_preempted(start_llama: StartHost) -> None:
    async with start_llama() as host:
        one, other = Key("one", 1, 2), Key("other", 1, 2)
        with host.decode.worker.admission.waiting_for_blocks(one) as is_first:
            with host.decode.worker.admission.waiting_for_blocks(other) as other_is_first:
                assert (is_first(), other_is_first()) == (True, False)
            with pytest.raises(grpc.aio.AioRpcError, match="they come first"):
                await host.generate([5, 6, 7], 3)
        assert len((await host.generate([5, 6, 7], 3)).tokens) == 3
