"""Two models of other families behind one gateway, in a real stack: each has its own workers, memory and planner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.stack.reference import PROMPTS
from tests.stack.sleeping import blocks_in_memory, long_answer, weights_in_memory, workers
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

FAMILIES = {"plain": "llama", "org/hybrid": "granite_hybrid"}
"""The family of each model, by its name."""
LENGTHS = {"plain": 1024, "org/hybrid": 2048}
MEMORIES = {"plain": "4MiB", "org/hybrid": "6MiB"}
TOKENS = 20
ASKED = PROMPTS[:4]

Expected = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Write the checkpoints, and return the greedy tokens of `transformers` after each prompt, by model."""
    tokens: Expected = {}
    for name, family in FAMILIES.items():
        folder = write_toy_model(tmp_path_factory.getbasetemp() / "two-models" / family)
        reference = write_tiny(folder, family, vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
        tokens[name] = [generated(reference, prompt) for prompt in ASKED]
    return tokens


def generated(reference: transformers.PreTrainedModel, prompt: str) -> list[int]:
    ids = torch.tensor([list(prompt.encode())])
    output = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    return list(output[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def stack(expected: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.getbasetemp() / "two-models"
    tables = [
        f'["{name}"]\nmodel = "{folder / family}"\nmax-model-len = {LENGTHS[name]}\nkv-memory = "{MEMORIES[name]}"\n'
        for name, family in FAMILIES.items()
    ]
    file = folder / "models.toml"
    file.write_text("".join(tables) + "planner = true\nmost-decode = 1\nmost-prefill = 1\n")
    options = ("--dtype=float32", "--threads=1")
    with serve(folder / "log", f"--models-file={file}", *options, fleets=2) as running:
        yield running


async def complete(client: httpx.AsyncClient, model: str, prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return await client.post("/v1/completions", json={"model": model, **body})


async def scale(client: httpx.AsyncClient, model: str, decode: int) -> None:
    answer = await client.post("/fleet/scale", json={"model": model, "decode": decode})
    assert answer.status_code == 200, answer.text


async def check_tokens(client: httpx.AsyncClient, expected: Expected, *models: str) -> None:
    """Ask the models all prompts at the same time, and compare the tokens."""
    asked = [(model, index) for index in range(len(ASKED)) for model in models]
    answers = await asyncio.gather(*(complete(client, model, ASKED[index]) for model, index in asked))
    tokens = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert tokens == [expected[model][index] for model, index in asked]


async def answers_of_batch(client: httpx.AsyncClient, expected: Expected) -> dict[str, int]:
    """Answer a batch with a line for each model and one for a model that there is not. Return the status of each."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, "prompt": "x"}}
        for name in (*expected, "other")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    made = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await client.post("/v1/batches", json=made)).json()
    async with asyncio.timeout(60):
        while batch["status"] != "completed":
            await asyncio.sleep(0.1)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    files = [
        (await client.get(f"/v1/files/{batch[name]}/content")).text for name in ("output_file_id", "error_file_id")
    ]
    found = [json.loads(line) for text in files for line in text.splitlines()]
    return {each["custom_id"]: each["response"]["status_code"] for each in found}


async def test_two_models_behind_one_gateway(stack: Stack, expected: Expected) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == LENGTHS
        unknown = await complete(client, "other", "x")
        assert unknown.status_code == 404
        assert all(repr(name) in unknown.json()["error"]["message"] for name in FAMILIES)
        await check_tokens(client, expected, *FAMILIES)
        assert await answers_of_batch(client, expected) == {"plain": 200, "org/hybrid": 200, "other": 404}
        async with asyncio.timeout(60):  # the planner may register after the stack is ready
            while not (fleet := stack.fleet())["planners"]:
                await asyncio.sleep(0.1)
        sizes = {host["model_name"]: host["total"] * host["slot_bytes"] >> 20 for host in fleet["hosts"]}
        assert sizes == {"plain": 4, "org/hybrid": 6}
        assert [each["model_name"] for each in fleet["planners"]] == ["org/hybrid"]

        # A fleet without a decode worker leaves the other one alone, and its requests wait for the next worker.
        await scale(client, "plain", decode=0)
        async with asyncio.timeout(60):
            while (await client.get("/health", params={"model": "plain"})).is_success:
                await asyncio.sleep(0.1)
        waiting = asyncio.create_task(check_tokens(client, expected, "plain"))
        assert (await client.get("/health")).is_success
        await check_tokens(client, expected, "org/hybrid")
        await scale(client, "plain", decode=1)
        await check_tokens(client, expected, "plain")
        await waiting


async def test_no_request_fails_while_the_only_decode_worker_is_killed_or_another_one_is_started_in_vain(
    stack: Stack, expected: Expected
) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        enough = asyncio.Event()

        async def keep_asking() -> None:
            while not enough.is_set():
                await check_tokens(client, expected, "plain")

        async with asyncio.TaskGroup() as asking:
            for _ in range(2):
                asking.create_task(keep_asking())
            await check_tokens(client, expected, "plain")
            # The one that serves stays, although it is older and has no more work.
            await scale(client, "plain", decode=2)
            await scale(client, "plain", decode=1)
            await check_tokens(client, expected, "plain")
            (pid,) = stack.living("plain/decode")
            os.kill(pid, signal.SIGKILL)
            await check_tokens(client, expected, "plain")
            enough.set()


async def test_a_model_sleeps_while_the_other_one_serves(stack: Stack, expected: Expected) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, params={"model": "plain"}) as client:
        whole, _ = await long_answer(client, "plain", asyncio.Event())
        awake = blocks_in_memory(workers(stack, "plain"))
        for level, mode in ((1, "wait"), (2, "keep"), (1, "abort")):
            begun = asyncio.Event()
            answering = asyncio.create_task(long_answer(client, "plain", begun))
            await begun.wait()
            assert (await client.post("/sleep", params={"level": level, "mode": mode})).status_code == 200
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            asleep = workers(stack, "plain")
            assert weights_in_memory(asleep) == 0
            assert blocks_in_memory(asleep) < awake // 20
            assert (await client.get("/health")).is_success
            await check_tokens(client, expected, "org/hybrid")
            assert answering.done() == (mode != "keep")
            assert (await client.post("/wake_up")).status_code == 200
            tokens, reason = await answering
            assert reason == ("abort" if mode == "abort" else "length")
            assert tokens == (whole[: len(tokens)] if mode == "abort" else whole)
            await check_tokens(client, expected, "plain")
            assert blocks_in_memory(workers(stack, "plain")) == awake


async def test_a_sleeping_model_survives_the_end_of_its_processes(stack: Stack, expected: Expected) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, params={"model": "plain"}) as client:
        assert (await client.post("/sleep")).status_code == 200
        before = {process.pid for process in workers(stack, "plain")}
        for role in ("decode", "kvtransfer"):
            (pid,) = stack.living(f"plain/{role}")
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):  # the new worker is put to sleep, too
            while not _sleeps(stack, "plain", before):
                await asyncio.sleep(0.1)
        assert weights_in_memory(workers(stack, "plain")) == 0
        assert (await client.post("/wake_up")).status_code == 200
        await check_tokens(client, expected, "plain")
        await stack.settled()


def _sleeps(stack: Stack, model: str, before: set[int]) -> bool:
    """Return whether all workers of a model sleep, at least one of which is not among the processes `before`."""
    own = [each for each in stack.fleet()["workers"] if each["model_name"] == model]
    states = [each["state"] for each in own if each["role"] in ("prefill", "decode")]
    living = {process.pid for process in workers(stack, model)}
    return len(living) == 2 and not living <= before and states == ["sleeping"] * 2
