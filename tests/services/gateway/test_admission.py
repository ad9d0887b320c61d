"""A worker that does not answer an admission delays requests only briefly, unless it is healthy and needs the time."""

from __future__ import annotations

import asyncio

import pytest

from paceline.services.gateway.sequences import attempt, worker_call
from tests.services.gateway.conftest import StartStack, eventually
from tests.services.gateway.toy_calls import ADMISSION
from tests.services.gateway.toy_workers import TEXT

FOR_EVER = 3600.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no silence be too long by itself, and let the gateway ask for a worker's health after 0.1 s of silence."""
    monkeypatch.setattr(attempt, "ADMIT_SECONDS", FOR_EVER)
    monkeypatch.setattr(worker_call, "QUIET_SECONDS", 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_one_that_stands_still_is_left_alone(
    start_stack: StartStack, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    stack = await start_stack(prefill=2, decode=2, stall_seconds=FOR_EVER)
    still = stack.workers[f"{role}-0"]
    still.pause_after = ADMISSION
    await still.serve_health(False)
    for _ in range(3):
        async with asyncio.timeout(20):
            answer = await stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0)
        assert answer.json()["choices"][0]["text"] == TEXT[:9]
    # The gateway set the worker aside, so only the first request was sent to it.
    await eventually(lambda: still.outcomes() == ["cancelled"])
    assert f"{role} worker {role}-0 hangs: it does not answer" in caplog.text


async def test_those_in_line_behind_it_get_room_elsewhere(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2, stall_seconds=FOR_EVER)
    still, well = stack.workers.values()
    still.max_seqs = well.max_seqs = 0
    tasks = [asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0)) for _ in range(3)]
    await eventually(lambda: len(still.calls) >= 3)
    still.pause_after = ADMISSION
    await still.serve_health(False)
    still.max_seqs = well.max_seqs = 8
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*tasks)
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [TEXT[:9]] * 3
    assert "finished" not in still.outcomes()


@pytest.mark.slow
async def test_one_that_is_well_is_waited_for(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=2, stall_seconds=FOR_EVER)
    slow, other = stack.workers.values()
    slow.pause_after = ADMISSION
    task = asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=9, seed=0))
    await eventually(lambda: bool(slow.calls))
    await asyncio.sleep(0.3)  # long enough for the gateway to ask for its health
    slow.resume.set()
    assert (await task).json()["choices"][0]["text"] == TEXT[:9]
    assert (slow.outcomes(), other.calls) == (["finished"], [])
