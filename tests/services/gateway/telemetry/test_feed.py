"""The stream of events that open consoles read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

import paceline
from paceline.services.gateway.telemetry import feed
from paceline.services.gateway.telemetry.history import COLUMNS
from tests.services.gateway.conftest import PATIENCE, Stack, StartStack, eventually

Event = tuple[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def quick_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LIVE_SECONDS", 0.05)
    monkeypatch.setattr(feed, "BIN_SECONDS", 0.2)


@contextlib.asynccontextmanager
async def watch(stack: Stack) -> AsyncIterator[AsyncIterator[Event]]:
    """Open the console's stream and yield its events."""

    async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
        name = ""
        async for line in lines:
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)

    async with stack.http.stream("GET", "/console/feed") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer.aiter_lines())


async def until(events: AsyncIterator[Event], name: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        async for kind, data in events:
            if kind == name:
                return data
    raise AssertionError(f"the stream ended before {name}")


async def test_it_begins_with_the_history_and_goes_on_with_the_fleet(stack: Stack) -> None:
    await stack.post("/v1/completions", prompt="abcd", max_tokens=5, seed=0)
    async with watch(stack) as events:
        kind, first = await anext(events)
        assert (kind, first["model"], first["media"], first["version"]) == ("history", "toy", [], paceline.__version__)
        assert all(len(row) == len(first["columns"]) for row in first["rows"])
        assert first["hour"]["ttft"]["count"] == 1
        assert first["hour"]["itl"]["p50"] is not None
        live = await until(events, "live")
    assert [(worker["id"], worker["role"], worker["state"]) for worker in live["workers"]] == [
        ("decode-0", "decode", "ready"),
        ("prefill-0", "prefill", "ready"),
    ]
    assert (live["running"], live["waiting"], live["hosts"]) == (0, 0, [])


async def test_blocks_are_shown_by_state_and_owner(stack: Stack) -> None:
    await stack.add("kvtransfer", "kv-0")
    silent = await stack.add("kvtransfer", "kv-1")
    await eventually(stack.sees_all)
    async with watch(stack) as events:
        while len((live := await until(events, "live"))["hosts"]) < 2:
            pass
        (host, _) = live["hosts"]
        assert host["blocks"] == {"held": 2, "in_flight": 3, "cached": 1, "free": 4}
        assert host["owners"] == [
            {"owner": "p", "state": "filling", "blocks": 3},
            {"owner": "d", "state": "active", "blocks": 2},
        ]
        await silent.stop()

        async def is_silent() -> bool:
            hosts = (await until(events, "live"))["hosts"]
            return len(hosts) < 2 or "error" in hosts[1]

        await eventually(is_silent)


async def test_rows_follow_with_what_has_changed(stack: Stack) -> None:
    async with watch(stack) as events:
        await stack.post("/v1/completions", prompt="abcd", max_tokens=5, seed=0)
        while True:
            data = await until(events, "rows")
            if data["recent"]["ttft"]["count"] == 1:
                break
    assert sum(row[1 + COLUMNS.index("ended")] for row in data["rows"]) == 1


async def test_viewers_share_events_and_cost_nothing_when_they_have_left(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    describe = feed.describe_fleet

    async def counted(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return await describe(*arguments)

    monkeypatch.setattr(feed, "describe_fleet", counted)
    async with watch(stack) as one, watch(stack) as other:
        seen = [[await until(each, "live") for _ in range(3)] for each in (one, other)]
        assert all(live["at"] > 0 for live in seen[0] + seen[1])
        assert made < 12

    async def is_idle() -> bool:
        before = made
        await asyncio.sleep(0.3)
        return made == before

    await eventually(is_idle)


async def test_a_viewer_that_reads_nothing_is_left(stack: Stack) -> None:
    own = feed.Feed(*_parts())
    own._is_open = True
    events = own.watch()
    assert (await anext(events)).startswith(b"event: history")
    for number in range(100):
        own._publish(str(number).encode())
    async with asyncio.timeout(PATIENCE):
        assert [event async for event in events] == []


async def test_streams_end_at_once_when_the_gateway_stops(start_stack: StartStack) -> None:
    stack = await start_stack()
    async with watch(stack) as events:
        await until(events, "live")
        stack.stop.set()
        async with asyncio.timeout(3):  # uvicorn would wait for five seconds
            async for _ in events:
                pass
            await stack.gateway


def _parts() -> tuple[Any, ...]:
    return feed.ConsoleHistory(), None, None, None, {}


async def test_the_newest_requests_come_first(stack: Stack) -> None:
    for name in ("one", "two", "three"):
        await stack.http.post(
            "/v1/completions", json={"prompt": "abcd", "max_tokens": 5}, headers={"X-Request-Id": name}
        )
    told = (await stack.http.get("/console/requests?limit=2")).json()["requests"]
    assert [each["request_id"] for each in told] == ["three", "two"]
    newest = told[0]
    assert (newest["state"], newest["prompt_tokens"], newest["generated_tokens"], newest["attempts"]) == (
        "finished",
        4,
        5,
        1,
    )
    assert newest["workers"] == ["decode-0", "prefill-0"]
    assert 0 < newest["ttft_ms"] <= newest["ms"]
    assert (await stack.http.get(f"/trace/{newest['own_id']}")).json()["request_id"] == "three"


async def test_a_running_request_is_listed(start_stack: StartStack) -> None:
    stack = await start_stack()
    stack.pause_decode()
    request = asyncio.create_task(stack.post("/v1/completions", prompt="abcd", max_tokens=9, seed=0))

    async def runs() -> bool:
        told = (await stack.http.get("/console/requests")).json()["requests"]
        return [(each["state"], each["generated_tokens"]) for each in told] == [("running", 6)]

    await eventually(runs)
    for worker in stack.workers.values():
        worker.resume.set()
    await request


async def test_data_needs_the_key(start_stack: StartStack) -> None:
    stack = await start_stack(api_key="sesame")
    for path in ("/console/feed", "/console/requests"):
        assert (await stack.http.get(path)).status_code == 401
