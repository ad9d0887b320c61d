"""Work on bodies beside the event loop, and the turns of callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.services.gateway.api.tokens import render_api
from paceline.services.gateway.http import fair_pool, reading
from paceline.services.gateway.http.fair_pool import FairPool, OwnerTurns
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


class Crowd:
    """Requests that take a place each, and give it back when they are told to."""

    def __init__(self, turns: OwnerTurns) -> None:
        self._turns = turns
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Let requests come. The first letter of a name is its owner, "-" for none."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._stay(name))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _stay(self, name: str) -> None:
        owner = name[0].strip("-")
        await self._turns.take(owner)
        try:
            self.inside.append(name)
            await self._leave[name].wait()
            self.inside.remove(name)
        finally:
            self._turns.give_back(owner)


async def test_owners_take_turns_and_none_has_all_places() -> None:
    crowd = Crowd(OwnerTurns(3))
    await crowd.come("a1", "a2", "a3", "a4")
    assert crowd.inside == ["a1", "a2"]
    await crowd.come("b1", "b2", "c1")
    assert crowd.inside == ["a1", "a2", "b1"]
    await crowd.leave("a1")
    assert crowd.inside == ["a2", "b1", "a3"]  # "a" has waited longest
    await crowd.leave("a2")
    assert crowd.inside == ["b1", "a3", "b2"]
    await crowd.leave("a3")
    assert crowd.inside == ["b1", "b2", "c1"]
    for name in ("b1", "b2", "c1", "a4"):
        await crowd.leave(name)
    assert crowd.inside == []


async def test_a_single_place_goes_round() -> None:
    crowd = Crowd(OwnerTurns(1))
    await crowd.come("a1", "a2", "b1")
    order = [*crowd.inside]
    for _ in range(2):
        await crowd.leave(order[-1])
        order += crowd.inside
    assert order == ["a1", "a2", "b1"] or order == ["a1", "b1", "a2"]
    await crowd.leave(order[-1])


async def test_a_request_that_is_cancelled_gives_its_place_back() -> None:
    crowd = Crowd(OwnerTurns(1))
    await crowd.come("a1", "b1", "c1")
    await crowd.cancel("b1")
    await crowd.cancel("a1")
    assert crowd.inside[-1:] == ["c1"]
    await crowd.leave("c1")


async def test_callers_without_a_key_have_all_places() -> None:
    crowd = Crowd(turns := OwnerTurns(2))
    await crowd.come("-1", "-2", "-3")
    assert crowd.inside == ["-1", "-2"]
    assert turns.waiting("") == 1
    await crowd.leave("-1")
    assert (crowd.inside, turns.waiting("")) == (["-2", "-3"], 0)
    for name in ("-2", "-3"):
        await crowd.leave(name)
    assert (turns._taken, turns._waiting) == ({}, {})


async def test_work_that_holds_the_interpreter_is_done_alone() -> None:
    pool, running, most = FairPool(4), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    await asyncio.gather(*(pool.run_alone(owner, work) for owner in ("", "", "a", "a", "b")))

    assert (most, running) == (1, 0)
    await asyncio.to_thread(pool.close)


async def test_a_key_waits_after_long_work_that_holds_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_pool, "ALONE_SHARE", 0.2)
    pool, order = FairPool(4), []

    def work(name: str) -> None:
        order.append(name)
        begun = time.thread_time()
        while time.thread_time() < begun + 0.1:
            pass

    await pool.run_alone("a", work, "a")
    mine = asyncio.create_task(pool.run_alone("a", work, "a again"))
    left = asyncio.create_task(pool.run_alone("a", work, "a left"))
    await asyncio.sleep(0)
    left.cancel()  # a client that goes while its body waits
    await pool.run_alone("b", work, "b")
    await mine

    assert order == ["a", "b", "a again"]
    await asyncio.sleep(0.5)
    await pool.run_alone("c", work, "c")
    assert pool._paces.keys() == {"c"}
    await asyncio.to_thread(pool.close)
