"""Greedy tokens through HTTP equal those of `transformers` in fp32. In bf16, all stacks of a model give the same
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bench.common.mixed import Outcome, Request, answers, requests
from tests.stack.processes import Stack
from tests.stack.reference import PROMPTS, generate
from tests.stack.stacks import Way, on

pytestmark = [pytest.mark.model, pytest.mark.stack]

MAX_TOKENS = 24
SHORT_AND_LONG = (*PROMPTS[::6], PROMPTS[7])
VOCABULARY = 49_152
"""Vocabulary size that bounds the token ids in requests; both models have at least as many tokens."""

SEED = 1814
"""With this seed, 12 requests have all kinds of sampling, constraints, prompts and ends that requests can have."""

Outcomes = dict[str, list[Outcome]]


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    """Outcomes of `mixed` on the first stack of each model."""
    return {}


def mixed(salt: str) -> list[Request]:
    """Return requests of all kinds, and longer greedy ones. `salt` keeps them from using the cached blocks of other
    runs.
    """
    plain = {"max_tokens": MAX_TOKENS, "temperature": 0, "stream": True, "return_token_ids": True}
    greedy = [Request({"prompt": prompt, **plain}) for prompt in PROMPTS[::9]]
    asked = [*requests(12, SEED, VOCABULARY), *greedy]
    return [replace(each, body={**each.body, "cache_salt": salt}) for each in asked]


@on("default", "two workers", "aggregated", "pools", thorough=["gemma", "gemma pools"])
async def test_requests_of_all_kinds_get_the_same_tokens_in_every_stack(
    stack: Stack, way: Way, outcomes: Outcomes
) -> None:
    if way.model not in outcomes:
        outcomes[way.model] = await answers(stack.url, way.model, mixed("one at a time"), concurrency=1)
    found = await answers(stack.url, way.model, mixed("together"), concurrency=8)
    assert all(outcome.tokens for outcome in found)
    assert differences(outcomes[way.model], found) == []
    await stack.settled()


def differences(wanted: Iterable[Outcome], found: Iterable[Outcome]) -> list[str]:
    return [text for one, other in zip(wanted, found, strict=True) if (text := one.difference(other))]


@on("float32", thorough=["gemma float32"])
async def test_tokens_are_those_of_transformers(stack: Stack, way: Way, real_model: Callable[[str], Path]) -> None:
    inputs, expected = await asyncio.to_thread(generate, real_model(way.model), SHORT_AND_LONG, MAX_TOKENS)
    tokens = await complete_all(stack.url, way.model, inputs)
    assert differing_prompts(tokens, expected) == []
    await stack.settled()


def differing_prompts(tokens: list[list[int]], expected: list[list[int]]) -> list[str]:
    pairs = zip(SHORT_AND_LONG, tokens, expected, strict=True)
    return [prompt[:30] for prompt, own, theirs in pairs if own != theirs]


async def complete_all(url: str, model: str, inputs: list[list[int]]) -> list[list[int]]:
    """Send all prompts at once and return the greedy tokens after each."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def complete(prompt: list[int]) -> list[int]:
            body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
            response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert response.status_code == 200, response.text
            return list(response.json()["choices"][0]["token_ids"])

        return list(await asyncio.gather(*(complete(prompt) for prompt in inputs)))
