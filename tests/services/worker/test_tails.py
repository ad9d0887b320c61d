"""Hybrids keep the last blocks of answers and prompts, so that the next turn computes only what is new."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.proto import worker_pb2
from tests.services.worker.conftest import StartHost, prompts
from tests.tiny_checkpoints import SaveTiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kv_pool", ["arena", "device"])
@pytest.mark.parametrize(
    "architecture",
    ["granite_hybrid", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_next", "qwen3_5"))],
)
async def test_short_turns_of_a_hybrid_compute_only_what_is_new(
    architecture: str, kv_pool: str, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reference = request.getfixturevalue(f"save_{architecture}")()
    context, ends, answers, computed = prompts(1, 30, 40)[0], list[int](), list[int](), []
    async with start_host(tmp_path, kv_pool=kv_pool) as host:
        stats = [role.worker.engine.stats for role in (host.prefill, host.decode)]
        for turn in range(20):
            before = sum(own.computed_tokens for own in stats)
            outcome = await host.generate(context, 12, aggregated=turn % 2 == 1, tails=ends)
            # The prompt's tokens without those that were cached, and one less than the answer's.
            computed.append(sum(own.computed_tokens for own in stats) - before)
            assert outcome.cached_tokens == (ends[-1] if ends else 0)
            await host.all_blocks_back()  # the end of the context is kept after the last token was sent
            answers += range(len(context), len(context) + 12)
            context = [*context, *outcome.tokens]
            ends.append(len(context) - 1)
            context += prompts(turn + 1, 20, 30)[turn]
        # A request that is cancelled before it begins leaves the end of the last one as it was.
        call, work = host.decode_call(), host.work("refused", context, 12)
        work.tails.extend(ends)
        await call.write(worker_pb2.DecodeCommand(admit=work))
        assert (await call.read()).admitted.cached_tokens == ends[-1]
        call.cancel()
        # One token is sampled by the prefill worker, which keeps the end of the prompt.
        await host.all_blocks_back()
        assert (await host.generate(context, 1, tails=ends)).cached_tokens == ends[-1]
        await host.all_blocks_back()
        assert (await host.generate([*context, 7], 1, tails=[len(context)])).cached_tokens == len(context)
        new = len(context) - len(prompts(1, 30, 40)[0]) - 12
        assert await host.all_blocks_back()
    assert sum(computed[1:]) <= 1.1 * new
    best = reference(torch.tensor([context])).logits[0].argmax(dim=-1).tolist()
    assert [best[place - 1] for place in answers] == [context[place] for place in answers]


@pytest.mark.parametrize("kv_pool", ["arena", "device"])
@pytest.mark.parametrize(
    "architecture",
    ["granite_hybrid", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_next", "qwen3_5"))],
)
@pytest.mark.parametrize("dropped", [0, 2], ids=["answers change", "answers begin with a mark that is dropped"])
async def test_a_hybrid_goes_on_from_the_end_of_each_prompt(
    dropped: int, architecture: str, kv_pool: str, start_host: StartHost, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    reference = request.getfixturevalue(f"save_{architecture}")()
    context, mark, ends = prompts(1, 30, 40)[0], [98, 99][:dropped], list[int]()
    computed = new = 0
    async with start_host(tmp_path, kv_pool=kv_pool) as host:
        stats = [role.worker.engine.stats for role in (host.prefill, host.decode)]
        for turn in range(20):
            before, asked = sum(own.prompt_tokens for own in stats), [*context, *mark]
            outcome = await host.generate(asked, 12, aggregated=turn % 2 == 1, tails=ends, kept=len(context))
            computed += sum(own.prompt_tokens for own in stats) - before
            new += len(asked) - (ends[-1] if ends else 0)
            assert outcome.cached_tokens == (ends[-1] if ends else 0)
            await host.all_blocks_back()
            ends.append(len(context))
            # The next prompt has neither the mark nor the answer as it was, so it has only this prompt in common.
            best = reference(torch.tensor([[*asked, *outcome.tokens]])).logits[0].argmax(dim=-1).tolist()
            assert best[len(asked) - 1 : -1] == outcome.tokens
            context += prompts(turn + 1, 20, 30)[turn]
        if dropped:  # a prompt that is sent again goes on from its own end
            for _ in range(2):
                again = await host.generate(asked, 12, aggregated=True, tails=ends, kept=ends[-1])
                assert (again.cached_tokens, again.tokens) == (ends[-1], outcome.tokens)
                await host.all_blocks_back()
        assert await host.all_blocks_back()
    assert computed <= 1.1 * new


@pytest.mark.parametrize("aggregated", [False, True])
async def test_nothing_of_the_spare_blocks_is_left_when_a_hybrid_s_client_leaves(
    aggregated: bool, start_host: StartHost, save_granite_hybrid: SaveTiny, tmp_path: Path
) -> None:
    save_granite_hybrid()
    async with start_host(tmp_path) as host:
        for length in (20, 150):
            for kept in (length, length - 2):
                await host.generate(prompts(1, length, length)[0], 50, aggregated, cancel_after=1, kept=kept)
        call, work = host.decode_call(), host.work("refused", [7] * 20, 12)
        work.kept_tokens = 20
        await call.write(worker_pb2.DecodeCommand(admit=work))
        assert (await call.read()).HasField("admitted")
        call.cancel()
        assert await host.all_blocks_back()


async def test_a_hybrid_without_spare_blocks_goes_on_as_before(
    start_host: StartHost, save_granite_hybrid: SaveTiny, tmp_path: Path
) -> None:
    save_granite_hybrid()
    prompt = prompts(1, 100, 100)[0]
    async with start_host(tmp_path) as host:
        wanted = (await host.generate(prompt, 12)).tokens
        slots = (await host.ledger()).total
        layout = host.decode.worker.layout
    free = layout.slots_for(len(prompt) + 12)
    assert free < slots
    async with start_host(tmp_path, kv_memory=free * layout.slot_bytes) as host:
        for aggregated in (False, True):
            outcome = await host.generate(prompt, 12, aggregated, kept=len(prompt))
            assert outcome.tokens == wanted
            assert await host.all_blocks_back()
