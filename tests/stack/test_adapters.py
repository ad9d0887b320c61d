"""Adapters in a real stack: requests of three adapters and of the model alone run in the same steps."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import httpx
import pytest

from tests.adapters import merged, write_adapter
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.stack.reference import PROMPTS
from tests.stack.test_models import TOKENS, generated
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

ASKED = PROMPTS[:3]
NAMES = ("one", "two", "three")

Expected = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Write a model and its adapters, and return the greedy tokens of `transformers` after each prompt, by name."""
    folder = tmp_path_factory.getbasetemp() / "adapters"
    reference = write_tiny(
        write_toy_model(folder / "base"), "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256
    )
    tokens = {"base": [generated(reference, prompt) for prompt in ASKED]}
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, reference, seed=seed, size=3.0)
        changed = merged(reference, folder / name)
        tokens[name] = [generated(changed, prompt) for prompt in ASKED]
    write_adapter(folder / "misfit", write_tiny(folder / "other", "llama", hidden_size=96))
    assert len({str(own) for each in tokens.values() for own in each}) == len(ASKED) * len(tokens)
    return tokens


@pytest.fixture(scope="module")
def stack(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.getbasetemp() / "adapters"
    modules = ",".join(f"{name}={folder / name}" for name in NAMES[:2])
    options = ("--dtype=float32", "--threads=1", "--max-model-len=1024", "--kv-memory=8MiB")
    with serve(
        folder / "log", str(folder / "base"), "--enable-lora", f"--lora-modules={modules}", "--max-loras=2", *options
    ) as running:
        yield running


async def tokens(client: httpx.AsyncClient, model: str, prompt: str) -> list[int]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = await client.post("/v1/completions", json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


async def check_tokens(client: httpx.AsyncClient, expected: Expected, *models: str) -> None:
    """Ask for all prompts at the same time, and compare the tokens."""
    asked = [(model, index) for index in range(len(ASKED)) for model in models]
    found = await asyncio.gather(*(tokens(client, model, ASKED[index]) for model, index in asked))
    assert found == [expected[model][index] for model, index in asked]


async def all_in_memory(client: httpx.AsyncClient) -> None:
    """Wait until decode workers have reported all adapters. They report once in a second."""
    async with asyncio.timeout(60):
        while True:
            told = (await client.get("/fleet")).json()["adapters"]
            if all(any(worker.startswith("decode") for worker in each["workers"]) for each in told):
                break
            await asyncio.sleep(0.1)
    assert [(each["name"], each["model_name"]) for each in told] == [(name, "base") for name in sorted(NAMES)]


async def test_adapters_are_served_beside_their_model(
    stack: Stack, expected: Expected, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "adapters"
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        misfit = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folder / "misfit")}
        )
        assert misfit.status_code == 400
        assert "lora_A and lora_B are" in misfit.text
        load = {"lora_name": "three", "lora_path": str(folder / "three")}
        assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == 200
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("base", None), *((name, "base") for name in NAMES)]
        await check_tokens(client, expected, "base", *NAMES)
        await check_tokens(client, expected, "base", *NAMES)  # now with cached prompts
        await all_in_memory(client)
        # The name gets other content: nothing that is cached of the old one may be found.
        shutil.copytree(folder / "two", folder / "new")
        again = {**load, "lora_path": str(folder / "new"), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=again)).status_code == 200
        await check_tokens(client, {**expected, "three": expected["two"]}, "three", "two")
        await stack.settled()
