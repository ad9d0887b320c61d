"""A planner scales a real stack: up under load, down to nothing while idle, and up again for a request that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.services.planner.recording import replay_file
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

PATIENCE = 120.0
"""Longest wait for a change of the fleet, in seconds."""
OPTIONS = (
    "--planner",
    "--prefill=0",
    "--least-prefill=0",
    "--most-prefill=0",
    "--least-decode=0",
    "--most-decode=2",
    "--ttft-seconds=0.5",
    "--fast-seconds=1",
    "--slow-seconds=5",
    "--idle-seconds=2",
    "--drain-seconds=2",
    "--max-seqs=2",
    "--kv-memory=4MiB",
    "--threads=1",
    "--served-model-name=m",
    "--max-model-len=4000",
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    folder = tmp_path_factory.mktemp("planned")
    model = write_toy_model(folder / "model")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=4096)
    record = folder / "record"
    with serve(folder / "log", str(model), *OPTIONS, f"--record={record}") as stack:
        yield stack, record


async def complete(client: httpx.AsyncClient, seed: int, tokens: int) -> str:
    body = {"model": "m", "prompt": f"Number {seed}", "max_tokens": tokens, "seed": seed, "ignore_eos": True}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def keep_asking(client: httpx.AsyncClient, seed: int, enough: asyncio.Event) -> None:
    """Send one request after another until `enough` is set. Each must be answered."""
    while not enough.is_set():
        await complete(client, seed, 400)


async def wait_for_decode(client: httpx.AsyncClient, *counts: int) -> dict[str, Any]:
    """Wait until so many decode workers are wanted and ready, and none drains."""
    async with asyncio.timeout(PATIENCE):
        while True:
            state = (await client.get("/fleet/scale")).json()["decode"]
            if state["wanted"] in counts and state["ready"] == state["wanted"] and not state["draining"]:
                return dict((await client.get("/fleet")).json())
            await asyncio.sleep(0.1)


async def wait_for_pins(client: httpx.AsyncClient, pinned: dict[str, int]) -> None:
    """Wait until the planner knows the numbers of workers that people have set."""
    async with asyncio.timeout(PATIENCE):
        while (await client.get("/fleet")).json()["planners"][0]["pinned"] != pinned:
            await asyncio.sleep(0.1)


async def test_a_fleet_follows_its_load_to_nothing_and_back(planned: tuple[Stack, Path]) -> None:
    stack, record = planned
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE) as client:
        alone = await complete(client, 0, 40)
        enough = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(client, seed, enough)) for seed in range(12)]
        fleet = await wait_for_decode(client, 2)
        enough.set()
        (planner,) = fleet["planners"]
        assert planner["leads"]
        assert any(each["acted"] and each["decision"].startswith("add decode") for each in planner["decisions"])
        await asyncio.gather(*asking)

        await wait_for_decode(client, 0)
        assert (await client.get("/health")).status_code == 200  # or a load balancer would send nobody here
        assert await complete(client, 0, 40) == alone
        await wait_for_decode(client, 1, 2)

        # What a person sets stays, although there is no load.
        await client.post("/fleet/scale", json={"decode": 2})
        await wait_for_pins(client, {"decode": 2})
        await wait_for_decode(client, 2)
        await client.post("/fleet/scale", json={"release": ["decode"]})
        await wait_for_pins(client, {})
        metrics = (await client.get("/metrics")).text
    assert 'paceline:planner_decisions_total{action="add"' in metrics
    replayed = list(replay_file(record))
    assert replayed
    assert not [each for each in replayed if not each.same]
