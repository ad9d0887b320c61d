"""Processes are killed while streams run, and no client notices. `make chaos` does this for longer."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from bench.common.namespaces import NoNamespacesError
from tests.stack.chaos import Plan, chaos, one_host, two_hosts, vectors_plan
from tests.stack.chaos_clients import Client, Report, attempts, completions
from tests.stack.processes import Stack, arenas
from tests.stack.reference import PROMPTS
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack]


async def test_streams_survive_kills_of_every_role(tmp_path: Path) -> None:
    kills = {"prefill": 1, "decode": 1, "kvtransfer": 1, "redis": 1, "gateway": 1}
    plan = Plan(kills, streams=8, tokens=32, pause=(0.2, 1.0), questions=completions(PROMPTS[:6]))
    report = await chaos(plan, seed=1, starting=one_host(plan, tmp_path))
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == kills
    assert report.ended >= plan.streams


@pytest.mark.thorough
async def test_vectors_survive_kills_and_scaling_beside_chats(tmp_path: Path) -> None:
    plan = Plan(Counter(prefill=8), streams=4, tokens=32, pause=(0.2, 1.0), questions=completions(PROMPTS[:6]))
    plan = vectors_plan(tmp_path / "models", plan)
    report = await chaos(plan, seed=1, starting=one_host(plan, tmp_path))
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == plan.kills
    assert report.ended >= plan.streams + plan.vectors


@pytest.mark.thorough
async def test_streams_survive_cuts_of_the_link_between_two_hosts(tmp_path: Path) -> None:
    kills = {"prefill": 1, "decode": 1, "kvtransfer": 1, "redis": 1}
    cuts = ((0.1, 1.0), (3.0, 4.0), (3.0, 4.0))
    plan = Plan(kills, streams=8, tokens=32, pause=(0.2, 1.5), questions=completions(PROMPTS[:6]), cuts=cuts)
    try:
        report = await chaos(plan, seed=1, starting=two_hosts(plan, tmp_path, lease_seconds=2.0))
    except NoNamespacesError as error:
        pytest.skip(str(error))
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == kills
    assert len(report.cuts) == len(cuts)
    assert report.ended >= plan.streams


@on("default")
async def test_the_arena_survives_its_service(stack: Stack) -> None:
    questions = completions(PROMPTS[:4])
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as http:
        client = Client(http, questions, tokens=100, report=Report())
        await client.learn(len(questions))
        before, shared, workers = await attempts(http), arenas(stack.family()), stack.living("decode")
        (service,) = stack.living("kvtransfer")
        assert await client.read_all(lambda: os.kill(service, signal.SIGKILL)) == client.expected
        assert await attempts(http) == before + len(questions)
        await stack.settled()
        assert [token async for token in client.stream(questions[0])] == client.expected[questions[0]]
    assert stack.living("decode") == workers
    assert stack.living("kvtransfer") != [service]
    assert arenas(stack.family()) == shared
    assert "2 workers came back" in stack.process.text
