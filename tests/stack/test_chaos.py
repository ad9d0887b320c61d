"""Processes die while streams run, and no client notices; `make chaos` does it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack.chaos import Plan, chaos
from tests.stack.reference import PROMPTS

pytestmark = [pytest.mark.model, pytest.mark.stack]


async def test_streams_survive_kills_of_every_role(tmp_path: Path) -> None:
    kills = {"prefill": 2, "decode": 2, "kvtransfer": 1, "redis": 1}
    plan = Plan(kills, streams=8, tokens=32, pause=(0.2, 1.5), prompts=PROMPTS[:6])
    report = await chaos(plan, seed=1, log=tmp_path / "log")
    assert report.wrong == []
    assert report.leftovers == []
    assert report.kills == kills
    assert report.ended >= plan.streams
