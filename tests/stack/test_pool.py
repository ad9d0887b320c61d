"""A stack of an encoder: pool workers alone. They are killed, added and drained without a wrong or missing vector."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import transformers

from tests.services.pool.tiny_bert import WORDS, expected_embedding
from tests.stack.processes import Stack
from tests.stack.test_scaling import scale

pytestmark = pytest.mark.stack

TEXTS = [" ".join((2 * WORDS)[index % 7 :][: 1 + index % 45]) for index in range(300)]
CLIENTS = 6


@pytest.fixture(scope="module")
def reference(encoder: tuple[Path, transformers.BertModel]) -> transformers.BertModel:
    return encoder[1]


@pytest.fixture(scope="module")
def stack(encoder_stack: Stack) -> Stack:
    return encoder_stack


async def embed(client: httpx.AsyncClient, texts: list[str]) -> list[bytes]:
    answer = await client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(texts)))
    return [base64.b64decode(each["embedding"]) for each in data]


async def keep_asking(stack: Stack, expected: list[bytes], enough: asyncio.Event) -> int:
    """Ask for parts of the texts until it is enough, and compare each bit. Return the number of answers."""
    count = 0
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        while not enough.is_set():
            begin = 17 * count % len(TEXTS)
            end = begin + 1 + 13 * count % 120
            assert await embed(client, TEXTS[begin:end]) == expected[begin:end]
            count += 1
    return count


async def disturbed(stack: Stack, expected: list[bytes], disturb: Any) -> int:
    """Return the number of answers that came while `disturb` ran."""
    enough = asyncio.Event()
    clients = [asyncio.create_task(keep_asking(stack, expected, enough)) for _ in range(CLIENTS)]
    try:
        await disturb()
    finally:
        enough.set()
    return sum(await asyncio.gather(*clients))


async def test_vectors_are_right_and_stay_the_same_while_workers_are_killed_and_scaled(
    stack: Stack, reference: transformers.BertModel
) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        expected = await embed(client, TEXTS)
        for text, data in zip(TEXTS[:60], expected, strict=False):
            right = expected_embedding(reference, text).numpy()
            assert np.abs(np.frombuffer(data, "<f4") - right).max() < 2e-5
        roles = {each["role"] for each in stack.fleet()["workers"]}
        assert roles == {"pool"}
        assert stack.fleet()["hosts"] == []

    async def kill() -> None:
        await asyncio.sleep(1)
        killed = stack.living("pool")[0]
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(60):
            while len(living := stack.living("pool")) < 2 or killed in living:
                await asyncio.sleep(0.1)

    assert await disturbed(stack, expected, kill) > CLIENTS

    async def rescale() -> None:
        await scale(stack, pool=1)
        await scale(stack, pool=2)

    assert await disturbed(stack, expected, rescale) > CLIENTS


def test_the_client_of_openai_is_served_unmodified(stack: Stack, reference: transformers.BertModel) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        assert model.model_extra is not None
        assert model.model_extra["tasks"] == ["embed", "token_embed"]
        answer = client.embeddings.create(model=model.id, input=["a b", "c"])
        right = expected_embedding(reference, "a b").numpy()
        assert np.abs(np.array(answer.data[0].embedding) - right).max() < 2e-5
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 7
        numbers = client.embeddings.create(model=model.id, input="a b", encoding_format="float", dimensions=32)
        assert np.array_equal(numbers.data[0].embedding, np.array(answer.data[0].embedding))
        with pytest.raises(openai.BadRequestError, match=r"makes no text.*/v1/embeddings"):
            client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "x"}])
