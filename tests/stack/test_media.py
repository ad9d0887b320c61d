"""Images through real stacks: tokens are those of `transformers`, wherever images are encoded and whoever is killed."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from bench.namespaces import ONE_HOST
from paceline.core.media import MediaSpan
from paceline.services.gateway.media.expansion import Run
from paceline.services.gateway.media.processors.base import Processor
from paceline.services.gateway.media.processors.families import read_processor
from tests.engine.media_models import MediaModel, Prompt
from tests.models.test_encoders import reference_of_patches
from tests.services.gateway.toy_model import AUDIO, IMAGE, VIDEO, write_toy_media_model
from tests.stack.cluster import Cluster
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_gemma4_with_media

pytestmark = pytest.mark.stack

VOCAB = 272
TOKENS = 12
QUESTIONS = ("What is this?", "And this one? " * 6, "Which of both, then, is the older one, and why?")
SHAPES = ((50, 70), (64, 64), (60, 44))


@dataclass(frozen=True)
class Model:
    """A tiny Gemma 4 in a folder, with its reference."""

    folder: Path
    reference: Any
    processor: Processor

    def expect(self, token_ids: Sequence[int], images: Sequence[Run], output: Sequence[int]) -> None:
        """Check that the output is what `transformers` generates after a prompt with these images."""
        media, begin = [], 0
        for run in images:
            begin = list(token_ids).index(IMAGE, begin)
            pixels = np.frombuffer(run.input.data, dtype=np.uint8).reshape(run.input.shape).copy()
            rows = reference_of_patches(self.reference, torch.from_numpy(pixels), 16, padded=0)
            assert len(rows) == run.input.length
            media.append((MediaSpan(begin, len(rows), run.digest, run.input.kind), rows))
            begin += len(rows)
        made = MediaModel(None, self.reference, "edge")  # type: ignore[arg-type]
        made.check(Prompt(list(token_ids), media), list(output))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_toy_media_model(tmp_path_factory.mktemp("gemma4") / "model")
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "token" in name}
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "bos_token_id": None, "eos_token_id": 256}
    reference = write_gemma4_with_media(folder, "edge", **sizes)
    for name, value in ids.items():
        setattr(reference.config, name, value)
    with torch.no_grad():  # a placeholder is never the best token, because the reference would take it for an image
        reference.get_input_embeddings().weight[[IMAGE, VIDEO, AUDIO]] = 0
    reference.save_pretrained(folder)
    processor = read_processor(folder)
    assert processor is not None
    return Model(folder, reference, processor.with_options({"max_soft_tokens": 70}))


def images_of(number: int, count: int) -> list[np.ndarray]:
    """Return `count` images uint8 [height, width, 3]. The same number gives the same images."""
    draw = np.random.default_rng(number)
    shapes = [SHAPES[(number + index) % len(SHAPES)] for index in range(count)]
    return [draw.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def image_part(pixels: np.ndarray) -> dict[str, Any]:
    """Return the part of a message that has an image."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


async def ask(
    client: httpx.AsyncClient, model: Model, messages: Sequence[dict[str, Any]], images: Sequence[np.ndarray]
) -> int:
    """Ask for the next message of a conversation, and check the answer.

    Args:
        images: all images in the messages, in order.

    Returns:
        The number of prompt tokens that were not cached.
    """
    body = {
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "mm_processor_kwargs": {"max_soft_tokens": 70},
    }
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    runs = [model.processor.image(pixels).pieces[1] for pixels in images]
    output = found["choices"][0]["token_ids"]
    assert len(output) == TOKENS
    await asyncio.to_thread(model.expect, found["prompt_token_ids"], runs, output)  # type: ignore[arg-type]
    usage = found["usage"]
    return int(usage["prompt_tokens"] - (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


class Chat:
    """A question about some images.

    Args:
        number: number of the question. The same number gives the same images.
        images: number of images.
    """

    def __init__(self, model: Model, number: int, images: int = 1) -> None:
        self._model = model
        self._images = images_of(number, images)
        parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]}]
        for pixels in self._images:
            parts += [image_part(pixels), {"type": "text", "text": f"{number}?"}]
        self._messages = [{"role": "user", "content": parts}]

    async def ask(self, client: httpx.AsyncClient) -> None:
        """Send the question and check the answer."""
        await ask(client, self._model, self._messages, self._images)


async def converse(url: str, model: Model) -> None:
    """Hold a conversation of ten turns over four images. A turn computes hardly more than what is new in it."""
    messages: list[dict[str, Any]] = []
    images: list[np.ndarray] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for turn in range(10):
            new = images_of(1000 + turn, 1) if turn % 3 == 0 else []
            images += new
            parts: list[dict[str, Any]] = [image_part(pixels) for pixels in new]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": f"Turn {turn}?"}]})
            computed = await ask(client, model, messages, images)
            assert turn == 0 or computed < 200
            messages.append({"role": "assistant", "content": f"Answer {turn}."})


async def ask_all(url: str, chats: Sequence[Chat]) -> None:
    """Ask all questions at once."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client, asyncio.TaskGroup() as group:
        for chat in chats:
            group.create_task(chat.ask(client))


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
        chats = [Chat(model, number, images=1 + number % 3) for number in range(6)]
        await ask_all(stack.url, chats)
        await ask_all(stack.url, chats)  # from the cache
        await converse(stack.url, model)
        await stack.settled()
        images = sum(1 + number % 3 for number in range(6)) + 4

        async def workers() -> list[dict[str, Any]]:
            return list(stack.fleet()["workers"])

        await wait_until_encoded(images, "encode" if encode else "prefill", workers)
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
