"""Media through real stacks: tokens are those of `transformers`, wherever media are encoded and whoever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.common.namespaces import ONE_HOST
from tests.stack.chaos import Plan, chaos, one_host
from tests.stack.cluster import Cluster
from tests.stack.media_chats import (
    MANY_TOKENS,
    Chat,
    Model,
    ask_about_media,
    ask_all,
    converse,
    questions_about_media,
    write_model,
)
from tests.stack.processes import Stack, serve

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module", params=["edge", pytest.param("qwen3_vl", marks=pytest.mark.thorough)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny Gemma 4 or Qwen 3-VL."""
    return write_model(tmp_path_factory.mktemp("media") / "model", request.param)


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


async def wait_until_encoded(
    count: int, role: str, workers: Callable[[], Awaitable[list[dict[str, Any]]]], more: int = 0
) -> None:
    """Wait until workers of a role report that they have computed `count` encodings.

    All workers together may have computed at most `more` others.
    """
    give_up = time.monotonic() + 10  # the figures come with the heartbeats
    while True:
        figures = [(worker["role"], worker["stats"].get("encodings_computed", 0)) for worker in await workers()]
        assert sum(own for _, own in figures) <= count + more
        if sum(own for each, own in figures if each == role) >= count:
            return
        assert time.monotonic() < give_up, figures
        await asyncio.sleep(0.1)


WORKERS = ("--dtype=float32", "--prefill=2", "--decode=2", "--threads=1", "--max-batched-tokens=32", "--max-seqs=16")


@pytest.mark.parametrize("encode", [pytest.param(0, marks=pytest.mark.thorough), 2])
async def test_tokens_are_those_of_transformers_also_when_workers_are_killed(
    model: Model, tmp_path: Path, encode: int
) -> None:
    with serve(tmp_path / "log", str(model.folder), *WORKERS, f"--encode={encode}", "--kv-memory=24MiB") as stack:
        chats = [
            Chat(model, number, images=1 + number % 3, choices=1 + (number == 0), tokens=MANY_TOKENS)
            for number in range(6)
        ]
        await ask_all(stack.url, chats)
        await ask_all(stack.url, chats)  # from the cache
        await converse(stack.url, model)
        encodings = sum(1 + number % 3 for number in range(6)) + 4 + await ask_about_media(stack.url, model)
        await stack.settled()

        async def workers() -> list[dict[str, Any]]:
            return list(stack.fleet()["workers"])

        encoder = "encode" if encode else "prefill"
        await wait_until_encoded(encodings, encoder, workers)
        (service,) = stack.living("kvtransfer")
        await converse(stack.url, model, number=3000, disturb=lambda: os.kill(service, signal.SIGKILL))
        await stack.settled()
        await wait_until_encoded(encodings + 4, encoder, workers, more=4)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_each(stack, ["prefill", "decode", *["encode"] * bool(encode)], done))
            number = 100
            while not done.is_set():
                await ask_all(stack.url, [Chat(model, number + each, images=2) for each in range(4)])
                number += 4
        await stack.settled()


@pytest.mark.parametrize("model", ["qwen3_vl", pytest.param("edge", marks=pytest.mark.thorough)], indirect=True)
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
        await cluster.wait_workers(3)
        chats = [Chat(model, number, images=2, tokens=MANY_TOKENS) for number in range(3)]
        await ask_all(cluster.url, chats)
        await converse(cluster.url, model)
        await cluster.settled()

        async def workers() -> list[dict[str, Any]]:
            return list((await cluster.fleet())["workers"])

        await wait_until_encoded(2 * 3 + 4, "encode", workers)
        assert os.kill(cluster.living("encode")[0], signal.SIGKILL) is None
        await ask_all(cluster.url, [*chats, Chat(model, 9)])
        await cluster.settled()


# The questions have audio clips, which Qwen 3-VL does not hear.
@pytest.mark.thorough
@pytest.mark.parametrize("model", ["edge"], indirect=True)
async def test_answers_about_media_survive_kills_of_every_role(model: Model, tmp_path: Path) -> None:
    kills = {"prefill": 1, "decode": 1, "encode": 1, "kvtransfer": 1, "gateway": 1}
    plan = Plan(
        kills,
        streams=8,
        tokens=64,
        pause=(0.2, 1.0),
        encode=2,
        questions=questions_about_media(model, 24),
        model=str(model.folder),
        kv_memory="12MiB",
        options=("--dtype=float32", "--threads=1", "--max-batched-tokens=64"),
    )
    report = await chaos(plan, seed=1, starting=one_host(plan, tmp_path))
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == kills
    assert report.ended >= plan.streams
