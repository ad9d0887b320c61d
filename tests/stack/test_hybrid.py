"""A hybrid of Mamba-2 and attention in real stacks. Its states are cached, handed off, evicted and lost like KV."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from bench.cache.agent_loop import FORMS, agent_loop, ratio
from bench.common.namespaces import ONE_HOST
from tests.services.gateway.toy_model import CHAT_TEMPLATE, REASONING_TEMPLATE, VOCAB_SIZE, write_toy_model
from tests.stack.chaos import Plan, Prey, chaos, one_host
from tests.stack.chaos_clients import completions
from tests.stack.cluster import Cluster
from tests.stack.processes import serve
from tests.stack.reference import PROMPTS
from tests.tiny_checkpoints import write_tiny

# `make test` has tests of hybrids with the services of one host in tests/services/worker.
pytestmark = [pytest.mark.stack, pytest.mark.thorough]

TOKENS = 40
ASKED = PROMPTS[:10]


def drafts(**fields: object) -> str:
    return f"--speculative-config={json.dumps({'adaptive': False, **fields})}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_toy_model(tmp_path / "hybrid")


@pytest.fixture
def reference(model: Path) -> transformers.PreTrainedModel:
    return write_tiny(model, "granite_hybrid", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)


def generated(reference: transformers.PreTrainedModel, prompt: str | list[int]) -> list[int]:
    """Return the greedy tokens of `transformers`. The toy model's tokens are bytes."""
    ids = torch.tensor([list(prompt.encode()) if isinstance(prompt, str) else prompt])
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    return list(output[0, ids.shape[1] :].tolist())


async def complete_all(url: str, prompts: Sequence[str | list[int]]) -> list[tuple[list[int], int]]:
    """Send all prompts at once. Return for each the tokens of its answer, and how many tokens of the prompt were
    cached.
    """
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def complete(prompt: str | list[int]) -> tuple[list[int], int]:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            found: Any = answer.json()
            return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

        return await asyncio.gather(*map(complete, prompts))


async def check_tokens(url: str, expected: Sequence[list[int]]) -> None:
    """Check the tokens of all prompts without a cache, and the tokens of one prompt with a cached prefix."""
    assert [tokens for tokens, _ in await complete_all(url, ASKED)] == expected
    # If memory is small, the prompt's blocks may have been evicted. The first request then caches them again.
    (back,) = await complete_all(url, ASKED[7:8])
    (warm,) = await complete_all(url, ASKED[7:8])
    assert back[0] == warm[0] == expected[7]
    assert warm[1] == 512  # of 540 tokens, because the last part fills no block


@contextlib.asynccontextmanager
async def checked(plan: Plan, folder: Path, expected: Sequence[list[int]]) -> AsyncIterator[Prey]:
    """Start a stack and check its tokens before any process is killed."""
    async with one_host(plan, folder) as stack:
        await check_tokens(stack.url, expected)
        yield stack


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("3MiB", ("--threads=1", "--max-batched-tokens=32", "--max-seqs=32", drafts(method="ngram"))),
        (
            "6MiB",
            (
                *("--kv-pool=device", "--kv-pool-memory=1536KiB", "--max-model-len=1024"),
                drafts(method="early_layers", num_layers=4),
            ),
        ),
    ],
    ids=["in the arena, chunked prefill, looked-up drafts", "pools of their own, drafts of early layers"],
)
async def test_tokens_are_those_of_transformers_in_little_memory_and_when_processes_are_killed(
    model: Path, reference: transformers.PreTrainedModel, tmp_path: Path, memory: str, options: tuple[str, ...]
) -> None:
    kills = {"prefill": 1, "decode": 1, "kvtransfer": 1}
    options = ("--dtype=float32", *options)
    plan = Plan(
        kills, 8, 80, (0.2, 1.0), questions=completions(ASKED), model=str(model), kv_memory=memory, options=options
    )
    expected = [generated(reference, prompt) for prompt in ASKED]
    report = await chaos(plan, seed=1, starting=checked(plan, tmp_path, expected))
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == kills
    assert report.ended >= plan.streams


async def test_a_prompt_computed_on_another_host_gives_the_same_tokens(
    model: Path, reference: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    first, other = list(PROMPTS[7].encode()), list(PROMPTS[5].encode())
    answer = generated(reference, first)
    turns = [first, [*first, *answer, *other], other]
    expected = [answer, *(generated(reference, turn) for turn in turns[1:])]
    # The prefill host has cached the first prompt. It computes the rest of the second one. The decode host has cached
    # the second one up to the end of the first answer, and fetches the other blocks.
    with Cluster(tmp_path, model, ONE_HOST) as cluster:
        names = [cluster.start_worker("prefill", 0, host=0), cluster.start_worker("decode", 0, host=1)]
        # By cost, a gateway may let the prefill host fetch the whole prefix, if fetching was measured to be fast.
        cluster.start_gateway("--router-mode=round-robin")
        cluster.wait_ready(*names)
        await cluster.wait_workers(2)
        for turn, wanted, cached in zip(turns, expected, (0, len(first), 0)):
            assert await complete_all(cluster.url, [turn]) == [(wanted, cached)]
        async with asyncio.timeout(10):
            while await transfers(cluster) < len(turns):
                await asyncio.sleep(0.1)
        await cluster.settled()


async def short_turns(url: str) -> float:
    """Have a chat of 20 short turns. Return the computed tokens of prompts, relative to the tokens that were new."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return ratio(await agent_loop(client, FORMS["completions"], calls=20, flood_tokens=0, result_words=30))


def write_long_blocks(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Write a hybrid whose blocks have 512 tokens, as those of real models."""
    write_tiny(
        write_toy_model(folder, chat_template=chat_template),
        "granite_hybrid",
        vocab_size=VOCAB_SIZE,
        bos_token_id=None,
        eos_token_id=256,
        mamba_d_state=128,
        num_key_value_heads=1,
    )
    return folder


async def test_short_turns_compute_only_what_is_new(tmp_path: Path) -> None:
    model = write_long_blocks(tmp_path / "model")
    with serve(tmp_path / "log", str(model), "--threads=1", "--served-model-name=m") as stack:
        # All but the new words, and the last token of each answer, is reused.
        assert await short_turns(stack.url) == pytest.approx(31 / 70)
        assert all(host["balanced"] for host in stack.fleet()["hosts"])
        await stack.settled()


async def test_short_turns_between_hosts_compute_only_what_is_new(tmp_path: Path) -> None:
    model = write_long_blocks(tmp_path / "model")
    with Cluster(tmp_path, model, ONE_HOST) as cluster:
        names = [cluster.start_worker("prefill", 0, host=0), cluster.start_worker("decode", 0, host=1)]
        cluster.start_gateway("--router-mode=round-robin")  # so that all prompts go to the prefill worker
        cluster.wait_ready(*names)
        await cluster.wait_workers(2)
        # The prefill host has cached each prompt. It computes the answer, which it does not have, and the new words.
        assert await short_turns(cluster.url) == pytest.approx(1.0)
        await cluster.settled()


async def reasoning_turns(url: str) -> float:
    """Have a chat of 20 short turns in which the answers change, as those of a model that reasons.

    Return the computed tokens of prompts, relative to the tokens that the prompt before did not have.
    """
    computed, new, before = 0, 0, list[int]()
    messages: list[dict[str, str]] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for turn in range(20):
            messages.append({"role": "user", "content": f"Question {turn}: what comes next?"})
            body = {"messages": messages, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            found: Any = answer.json()
            prompt, usage = found["prompt_token_ids"], found["usage"]
            common = next((place for place, pair in enumerate(zip(before, prompt)) if pair[0] != pair[1]), len(before))
            if turn:
                computed += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                new += len(prompt) - common
            before = prompt
            # The random model's answer is neither reasoning nor text, as the words here are.
            messages.append({"role": "assistant", "reasoning_content": "Hm.", "content": f"Answer {turn} is this one."})
    return computed / new


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, REASONING_TEMPLATE], ids=["answers change", "a mark is dropped"])
async def test_turns_after_reasoning_compute_only_what_is_new(template: str, tmp_path: Path) -> None:
    model = write_long_blocks(tmp_path / "model", template)
    with serve(tmp_path / "log", str(model), "--threads=1") as stack:
        assert await reasoning_turns(stack.url) <= 1.1
        assert all(host["balanced"] for host in stack.fleet()["hosts"])
        await stack.settled()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, REASONING_TEMPLATE], ids=["answers change", "a mark is dropped"])
async def test_turns_after_reasoning_between_hosts_compute_only_what_is_new(template: str, tmp_path: Path) -> None:
    model = write_long_blocks(tmp_path / "model", template)
    with Cluster(tmp_path, model, ONE_HOST) as cluster:
        names = [cluster.start_worker("prefill", 0, host=0), cluster.start_worker("decode", 0, host=1)]
        cluster.start_gateway("--router-mode=round-robin")  # so that all prompts go to the prefill worker
        cluster.wait_ready(*names)
        await cluster.wait_workers(2)
        assert await reasoning_turns(cluster.url) <= 1.1
        await cluster.settled()


async def transfers(cluster: Cluster) -> float:
    """Return the number of transfers to host 1 as of its last report."""
    (stats,) = [each["stats"] for each in (await cluster.fleet())["workers"] if each["worker_id"] == "host-1"]
    assert stats.get("transfer_failures", 0) == 0
    return float(stats.get("transfers_grpc", 0))
