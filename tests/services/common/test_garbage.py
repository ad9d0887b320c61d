from __future__ import annotations

import asyncio
import gc

import pytest

from paceline.services.common import lifecycle
from paceline.services.common.lifecycle import BUSY_SECONDS, WORTHWHILE, collect_when_idle, is_due


@pytest.mark.parametrize(
    ("collections", "seconds", "running", "due"),
    [
        (WORTHWHILE, 1.0, 0, True),
        (WORTHWHILE - 1, 1e6, 0, False),
        (WORTHWHILE, BUSY_SECONDS - 1, 1, False),
        (WORTHWHILE, BUSY_SECONDS, 1000, True),
        (WORTHWHILE - 1, BUSY_SECONDS, 1000, False),
    ],
)
def test_a_full_collection_waits_for_a_pause(collections: int, seconds: float, running: int, due: bool) -> None:
    assert is_due(collections, seconds, running) is due


async def test_garbage_is_collected_when_no_request_runs_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LOOK_SECONDS", 0.01)
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(info["generation"])

    gc.callbacks.append(note)
    thresholds, running = gc.get_threshold(), 1
    task = asyncio.create_task(collect_when_idle(lambda: running))
    try:
        await asyncio.sleep(0.05)
        for _ in range(5 * WORTHWHILE):
            gc.collect(1)
        await asyncio.sleep(0.05)
        assert not full
        running = 0
        async with asyncio.timeout(10):
            while not full:
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gc.callbacks.remove(note)
    assert gc.get_threshold() == thresholds
