"""Work on bodies beside the event loop, and the turns of callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.services.gateway.api.tokens import render_api
from paceline.services.gateway.http import reading
from paceline.services.gateway.http.pool import FairPool
from tests.services.gateway.conftest import Stack, eventually


async def test_callers_take_turns_and_none_has_all_threads() -> None:
    pool, go = FairPool(3), threading.Event()
    order: list[str] = []

    def work(name: str) -> str:
        order.append(name)
        assert go.wait(20)
        return name

    own = [asyncio.create_task(pool.run("a", work, f"a{number}")) for number in range(6)]
    await eventually(lambda: len(order) == 2)
    others = [asyncio.create_task(pool.run(name, work, name)) for name in ("b", "c", "d")]
    await eventually(lambda: len(order) == 3)
    assert order == ["a0", "a1", "b"]
    own[2].cancel()  # its turn goes to the next one
    go.set()
    assert await asyncio.gather(*own[:2], *own[3:], *others) == ["a0", "a1", "a3", "a4", "a5", "b", "c", "d"]
    assert max(order.index("c"), order.index("d")) < order.index("a5")
    assert (pool._turns._taken, pool._turns._waiting) == ({}, {})
    await asyncio.to_thread(pool.close)


async def test_work_that_fails_or_that_nobody_waits_for_gives_its_thread_back() -> None:
    pool = FairPool(2)

    def fail() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await pool.run("a", fail)
    go = threading.Event()
    left = asyncio.create_task(pool.run("a", go.wait, 20))
    await eventually(lambda: pool._turns._taken["a"] == 1)
    left.cancel()
    waiting = asyncio.create_task(pool.run("a", lambda: 5))
    await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    assert await waiting == 5
    await asyncio.to_thread(pool.close)


async def test_only_small_bodies_are_read_on_the_event_loop(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            threads.append(threading.current_thread().name.partition("_")[0])
            return work(*args)

        return note

    monkeypatch.setattr(reading, "read_body", noted(reading.read_body))
    monkeypatch.setattr(render_api, "render", noted(render_api.render))
    for body in ({"prompt": "x"}, {"prompt": "x" * 70_000}, {"prompt": [1] * 1001}, {"prompt": "x", "user": "{" * 999}):
        await stack.post("/v1/completions", **body)
    assert threads == ["MainThread", "body", "body", "MainThread"]
    threads.clear()
    assert (await stack.post("/v1/completions/render", prompt="x")).status_code == 200
    assert threads == ["MainThread", "body"]
