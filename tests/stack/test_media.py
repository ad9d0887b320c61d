"""Media through real stacks: tokens are those of `transformers`, wherever media are encoded and whoever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.namespaces import ONE_HOST
from paceline.services.gateway.media.processors.families import read_processor
from tests.services.gateway.toy_model import (
    AUDIO,
    END,
    IMAGE,
    IMAGE_PAD,
    VIDEO,
    VIDEO_PAD,
    write_toy_media_model,
    write_toy_vision_model,
)
from tests.stack.cluster import Cluster
from tests.stack.media_chats import Chat, Model, ask_about_media, ask_all, converse
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_gemma4_with_media, write_qwen3_vl

pytestmark = pytest.mark.stack

VOCAB = 272


@pytest.fixture(scope="module", params=["edge", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny Gemma 4 or Qwen 3-VL."""
    folder = tmp_path_factory.mktemp("media") / "model"
    is_gemma = request.param == "edge"
    (write_toy_media_model if is_gemma else write_toy_vision_model)(folder)
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "token" in name}
    sizes = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": END}
    reference = (
        write_gemma4_with_media(folder, "edge", audio_features=128, vocab_size_per_layer_input=VOCAB, **sizes)
        if is_gemma
        else write_qwen3_vl(folder, **sizes)
    )
    for name, value in ids.items():
        setattr(reference.config, name, value)
    with torch.no_grad():  # a placeholder is never the best token, because the reference would take it for an image
        reference.get_output_embeddings().weight[[IMAGE, VIDEO, AUDIO] if is_gemma else [IMAGE_PAD, VIDEO_PAD]] = 0
    reference.save_pretrained(folder)
    processor = read_processor(folder)
    assert processor is not None
    options: dict[str, Any] = {"max_soft_tokens": 70} if is_gemma else {"size": {"longest_edge": 1 << 14}}
    return Model(request.param, folder, reference, processor.with_options(options), options)


async def kill_each(stack: Stack, roles: Sequence[str], done: asyncio.Event) -> None:
    """Kill one process of each role, one after another, while requests run."""
    draw = random.Random(3)
    for role in roles:
        await asyncio.sleep(draw.uniform(0.2, 1.0))
        async with asyncio.timeout(60):
            while not (living := stack.living(role)):
                await asyncio.sleep(0.1)
        victim = psutil.Process(draw.choice(living))
        victim.kill()
    done.set()


async def wait_until_encoded(count: int, role: str, workers: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
    """Wait until workers of a role report that they have computed `count` encodings. Nobody may have computed more."""
    async with asyncio.timeout(10):  # the figures come with the heartbeats
        while True:
            figures = [(worker["role"], worker["stats"].get("encodings_computed", 0)) for worker in await workers()]
            assert sum(own for _, own in figures) <= count
            if sum(own for each, own in figures if each == role) == count:
                return
            await asyncio.sleep(0.1)


WORKERS = ("--dtype=float32", "--prefill=2", "--decode=2", "--threads=1", "--max-batched-tokens=32", "--max-seqs=16")


@pytest.mark.parametrize("encode", [0, 2])
async def test_tokens_are_those_of_transformers_also_when_workers_are_killed(
    model: Model, tmp_path: Path, encode: int
) -> None:
    with serve(tmp_path / "log", str(model.folder), *WORKERS, f"--encode={encode}", "--kv-memory=24MiB") as stack:
        chats = [Chat(model, number, images=1 + number % 3, choices=1 + (number == 0)) for number in range(6)]
        await ask_all(stack.url, chats)
        await ask_all(stack.url, chats)  # from the cache
        await converse(stack.url, model)
        encodings = sum(1 + number % 3 for number in range(6)) + 4 + await ask_about_media(stack.url, model)
        await stack.settled()

        async def workers() -> list[dict[str, Any]]:
            return list(stack.fleet()["workers"])

        await wait_until_encoded(encodings, "encode" if encode else "prefill", workers)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_each(stack, ["prefill", "decode", *["encode"] * bool(encode)], done))
            number = 100
            while not done.is_set():
                await ask_all(stack.url, [Chat(model, number + each, images=2) for each in range(4)])
                number += 4
        await stack.settled()


async def test_a_stack_without_prefill_workers_reads_images(model: Model, tmp_path: Path) -> None:
    options = ("--dtype=float32", "--prefill=0", "--threads=1", "--max-batched-tokens=64", "--kv-memory=12MiB")
    with serve(tmp_path / "log", str(model.folder), *options) as stack:
        await ask_all(stack.url, [Chat(model, number, images=2) for number in range(4)])
        await stack.settled()


async def test_an_encoding_of_another_host_is_fetched(model: Model, tmp_path: Path) -> None:
    with Cluster(tmp_path, model.folder, ONE_HOST) as cluster:
        names = [cluster.start_worker(role, 0, host) for role, host in (("prefill", 0), ("decode", 0), ("encode", 1))]
        cluster.start_gateway()
        cluster.wait_ready(*names)
        await cluster.wait_workers(2)
        chats = [Chat(model, number, images=2) for number in range(3)]
        await ask_all(cluster.url, chats)
        await converse(cluster.url, model)
        await cluster.settled()

        async def workers() -> list[dict[str, Any]]:
            return list((await cluster.fleet())["workers"])

        await wait_until_encoded(2 * 3 + 4, "encode", workers)
        assert os.kill(cluster.living("encode")[0], signal.SIGKILL) is None
        await ask_all(cluster.url, [*chats, Chat(model, 9)])
        await cluster.settled()
