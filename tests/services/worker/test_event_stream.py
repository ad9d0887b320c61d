"""What prefill and decode workers report of a request besides its tokens."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.kv_layout import NO_SLOT, GroupShape, make_layout
from paceline.core.types import Key
from paceline.services.worker.event_stream import count_blocks
from paceline.services.worker.leases import Reservation
from tests.services.worker.conftest import StartHost, prompts

PROMPT = list(range(1, 101))


async def test_chunks_and_the_handoff(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=48) as host:
        first = await host.generate(PROMPT, 20)
        assert first.chunks() == [(0, 48), (48, 26), (74, 26)]
        assert all(chunk.step_ms > 0 for report in first.reports for chunk in report.chunks)
        (adopted,) = [report.adopted for report in first.reports if report.HasField("adopted")]
        assert (adopted.blocks, adopted.bytes_moved, adopted.path) == (7, 0, "shared memory")
        assert first.admitted is not None
        assert (first.admitted.blocks, first.admitted.cached_blocks) == (8, 0)  # for 100 tokens, and 20 to come
        assert (first.effort().steps, first.effort().drafts, first.effort().preemptions) == (19, 0, 0)
        # The reused blocks are not computed again.
        second = await host.generate(PROMPT, 20)
        assert second.admitted is not None
        assert (second.cached_tokens, second.admitted.cached_blocks) == (96, 6)
        assert second.chunks() == [(96, 4)]


async def test_a_prompt_of_which_all_but_the_last_token_is_cached(start_llama: StartHost) -> None:
    async with start_llama() as host:
        await host.generate(PROMPT[:97], 2)
        for aggregated in (False, True):
            assert (await host.generate(PROMPT[:97], 2, aggregated)).chunks() == [(96, 1)]


async def test_a_decode_worker_that_computes_the_prompt_tells_the_same(start_llama: StartHost) -> None:
    async with start_llama(max_batched_tokens=48) as host:
        outcome = await host.generate(PROMPT, 20, aggregated=True)
        assert outcome.chunks() == [(0, 48), (48, 26), (74, 26)]
        assert outcome.effort().steps == 20
        assert not any(report.HasField("adopted") for report in outcome.reports)


async def test_nothing_is_told_per_token(start_llama: StartHost) -> None:
    async with start_llama() as host:
        outcome = await host.generate(PROMPT, 400)
    seconds = 1 + sum(report.HasField("effort") for report in outcome.reports)
    assert len(outcome.tokens) == 400
    assert len(outcome.reports) <= 2 + seconds
    assert seconds < 100


async def test_drafts_are_counted(start_llama: StartHost) -> None:
    speculation = '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false}'
    async with start_llama(speculative_config=speculation) as host:
        outcome = await host.generate([5, 6, 7, 8] * 10, 150)
        effort, stats = outcome.effort(), host.decode.worker.engine.stats
    assert (effort.drafts, effort.draft_tokens, effort.accepted_tokens) == (
        stats.drafts,
        stats.draft_tokens,
        stats.accepted_tokens,
    )
    assert effort.accepted_tokens > 0
    assert effort.steps + effort.accepted_tokens >= 149


async def test_a_preemption_is_told_and_so_is_what_is_computed_again(start_llama: StartHost) -> None:
    # A block has 12 KiB. Both requests have room when they begin, but not when they end.
    async with start_llama(kv_memory=18 * 12288, max_model_len=256) as host:
        cases = prompts(2, 60, 60)
        outcomes = await asyncio.gather(*(host.generate(prompt, 150) for prompt in cases))
        preempted = [outcome for outcome in outcomes if outcome.effort().preemptions]
        assert sum(outcome.effort().preemptions for outcome in outcomes) == host.decode.worker.engine.stats.preemptions
    assert preempted
    assert all(max(first + tokens for first, tokens in outcome.chunks()) > 61 for outcome in preempted)
    assert all(outcome.effort().steps == 149 for outcome in outcomes)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 3), (65, 5)])
def test_blocks_are_counted_in_all_groups_without_those_given_back(tokens: int, blocks: int) -> None:
    full = GroupShape("full", (0,), 1, 16)
    sliding = GroupShape("sliding", (1, 2, 3, 4), 1, 16, window=32)
    layout = make_layout((full, sliding), 2, "x")
    assert [group.block_tokens for group in layout.groups] == [64, 16]
    lease = Reservation(Key("r", 1, 1), 0, [[1, 2], [NO_SLOT, NO_SLOT, 3, 4, 5]])
    assert count_blocks(layout, lease, tokens) == blocks
