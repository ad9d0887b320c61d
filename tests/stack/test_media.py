"""Images through real stacks: tokens are those of `transformers`, wherever images are encoded and whoever is killed."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import signal
from collections.abc import Sequence
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


class Chat:
    """A question about some images.

    Args:
        number: number of the question. The same number gives the same images.
        images: number of images.
    """

    def __init__(self, model: Model, number: int, images: int = 1) -> None:
        self._model = model
        draw = np.random.default_rng(number)
        self._pixels = [
            draw.integers(0, 256, (*SHAPES[(number + index) % len(SHAPES)], 3), dtype=np.uint8)
            for index in range(images)
        ]
        parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTIONS[number % len(QUESTIONS)]}]
        for pixels in self._pixels:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": f"{number}?"}]
        self._body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "mm_processor_kwargs": {"max_soft_tokens": 70},
        }

    async def ask(self, client: httpx.AsyncClient) -> None:
        """Send the question and check the answer."""
        answer = await client.post("/v1/chat/completions", json=self._body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        runs = [self._model.processor.image(pixels).pieces[1] for pixels in self._pixels]
        output = found["choices"][0]["token_ids"]
        assert len(output) == TOKENS
        await asyncio.to_thread(self._model.expect, found["prompt_token_ids"], runs, output)  # type: ignore[arg-type]


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


def figure(stack: Stack, role: str, name: str) -> float:
    """Return the sum of a figure over all workers of a role."""
    return sum(worker["stats"].get(name, 0) for worker in stack.fleet()["workers"] if worker["role"] == role)


WORKERS = ("--dtype=float32", "--prefill=2", "--decode=2", "--threads=1", "--max-batched-tokens=32", "--max-seqs=16")


@pytest.mark.parametrize("encode", [0, 2])
async def test_tokens_are_those_of_transformers_also_when_workers_are_killed(
    model: Model, tmp_path: Path, encode: int
) -> None:
    with serve(tmp_path / "log", str(model.folder), *WORKERS, f"--encode={encode}", "--kv-memory=24MiB") as stack:
        chats = [Chat(model, number, images=1 + number % 3) for number in range(6)]
        await ask_all(stack.url, chats)
        await ask_all(stack.url, chats)  # from the cache
        await stack.settled()
        images = sum(1 + number % 3 for number in range(6))
        async with asyncio.timeout(10):  # the figures come with the heartbeats
            while figure(stack, "encode" if encode else "prefill", "encodings_computed") != images:
                await asyncio.sleep(0.1)
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
        await cluster.settled()
        assert os.kill(cluster.living("encode")[0], signal.SIGKILL) is None
        await ask_all(cluster.url, [*chats, Chat(model, 9)])
        await cluster.settled()
