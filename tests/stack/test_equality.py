"""Greedy tokens through HTTP are those of `transformers` in fp32, and in bf16 the same however the stack is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from bench.equality import shorten, ways
from bench.mixed import Outcome, answers, requests
from tests.stack.processes import serve
from tests.stack.reference import PROMPTS, generate, tokenize

MAX_TOKENS = 64

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive": false}'

ALL = slice(None)
SOME = slice(0, None, 6)
FEW = slice(0, None, 12)

# Each of what cuts a request into steps or moves it between workers stands in one of them.
STACKS: dict[str, tuple[str, ...]] = {
    "one worker of each role": (),
    "two workers of each role, chunked prefill, short prompts where they are decoded": (
        "--prefill=2",
        "--decode=2",
        "--threads=1",
        "--max-batched-tokens=32",
        "--max-seqs=32",
        "--local-prefill-tokens=64",
    ),
    "aggregated, drafts": ("--prefill=0", f"--speculative-config={DRAFTS}"),
}


@pytest.fixture(scope="module", params=["smollm2-135m-instruct", "gemma-3-270m"])
def reference(
    request: pytest.FixtureRequest, real_model: Callable[[str], Path]
) -> tuple[str, list[list[int]], list[list[int]]]:
    inputs, outputs = generate(real_model(request.param), PROMPTS, MAX_TOKENS)
    return request.param, inputs, outputs


@pytest.mark.model
@pytest.mark.stack
@pytest.mark.parametrize("cut", STACKS)
async def test_tokens_are_those_of_transformers(
    cut: str, reference: tuple[str, list[list[int]], list[list[int]]], tmp_path: Path
) -> None:
    model, inputs, expected = reference
    options = STACKS[cut]
    # What comes again must not find its own blocks, or its prompt would not be computed: a salt for each.
    asked = [(8, SOME, "together")] if options else [(1, FEW, "one at a time"), (16, ALL, "together")]
    with serve(tmp_path / "log", model, "--dtype=float32", "--kv-memory=1GiB", *options) as stack:
        for concurrency, which, salt in asked:
            tokens = await complete_all(stack.url, model, inputs[which], concurrency, salt)
            pairs = zip(PROMPTS[which], tokens, expected[which], strict=True)
            assert [prompt[:30] for prompt, own, theirs in pairs if own != theirs] == [], salt
        await stack.settled()


@pytest.mark.model
@pytest.mark.stack
async def test_requests_of_all_kinds_do_not_notice_how_the_loop_runs(
    real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = real_model("smollm2-135m-instruct")
    asked = requests(20, seed=5, vocab_size=49152)
    shorten(folder, 8, tmp_path / "draft")
    stacks = ways(tmp_path / "draft", 8)
    wanted: list[Outcome] = []
    first, *others = stacks
    for way in (first, *(name for name in others if name.startswith("asynchronous, ") and "no drafts" not in name)):
        with serve(tmp_path / "log", str(folder), "--dtype=bfloat16", "--kv-memory=1GiB", *stacks[way]) as stack:
            found = await answers(stack.url, folder.name, asked, concurrency=8 if wanted else 1)
            await stack.settled()
        wanted = wanted or found
        assert [one.difference(other) for one, other in zip(wanted, found)] == [""] * len(asked), way


@pytest.mark.model
@pytest.mark.stack
@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "gemma-3-270m"])
async def test_bf16_tokens_are_the_same_in_every_cut(
    model: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    inputs = tokenize(real_model(model), PROMPTS[SOME])
    first: list[list[int]] = []
    for cut, options in STACKS.items():
        with serve(tmp_path / "log", model, "--dtype=bfloat16", "--kv-memory=1GiB", *options) as stack:
            first = first or await complete_all(stack.url, model, inputs, 1, "one at a time")
            assert all(len(each) > 0 for each in first)
            assert await complete_all(stack.url, model, inputs, 8, "together") == first, cut
            await stack.settled()


async def complete_all(url: str, model: str, inputs: list[list[int]], concurrency: int, salt: str) -> list[list[int]]:
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def complete(prompt: list[int]) -> list[int]:
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
                "cache_salt": salt,
            }
            async with slots:
                response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return list(response.json()["choices"][0]["token_ids"])

        return list(await asyncio.gather(*(complete(prompt) for prompt in inputs)))
