"""The store of responses, on SQLite's own module and on SQLAlchemy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.services.gateway.api.responses import store as store_module
from paceline.services.gateway.api.responses.store import Record, ResponseStore
from paceline.services.gateway.store.database import Execute, Row, SqliteDatabase, StoreError, open_database
from paceline.services.gateway.store.store import Store

OpenStore = Callable[..., ResponseStore]


@pytest.fixture(params=["", "sqlite:///"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Return a function that opens a store; all of them have the same database."""
    if request.param:
        pytest.importorskip("sqlalchemy")
    with contextlib.ExitStack() as stack:

        def open_(entries: int = 10, max_bytes: int = 10_000, seconds: float = 100.0) -> ResponseStore:
            database = open_database(f"{request.param}{tmp_path / 'store.db'}")
            shared = Store(database)
            stack.callback(shared.close)
            return ResponseStore(shared, entries=entries, max_bytes=max_bytes, seconds=seconds)

        yield open_


def record(name: str, previous: str = "", owner: str = "me", status: str = "completed", **fields: Any) -> Record:
    response = {"id": name, "status": status, "output": [], **fields}
    return Record(
        name, owner, previous, status, "gateway" if status == "in_progress" else "", 5.0, response, [{"é": 1}]
    )


async def names(store: ResponseStore, *wanted: str, owner: str = "me") -> list[str]:
    return [name for name in wanted if await store.get(name, owner) is not None]


async def test_what_is_put_is_got_by_all_gateways(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    await one.put(record("a"))
    assert await other.get("a", "me") == record("a")
    assert await other.get("a", "you") is None
    assert not await other.delete("a", "you")
    assert await other.delete("a", "me")
    assert await one.get("a", "me") is None


async def test_a_conversation_is_all_turns_in_their_order(open_store: OpenStore) -> None:
    store = open_store()
    for name, previous in ("a", ""), ("b", "a"), ("c", "b"):
        await store.put(record(name, previous))
    assert [turn.id for turn in await store.conversation("c", "me", 1 << 20)] == ["a", "b", "c"]
    assert await store.conversation("c", "you", 1 << 20) == []


async def test_a_conversation_has_a_largest_number_of_turns(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_TURNS", 2)
    store = open_store()
    for name, previous in ("a", ""), ("b", "a"), ("c", "b"):
        await store.put(record(name, previous))
    assert [turn.id for turn in await store.conversation("b", "me", 1 << 20)] == ["a", "b"]
    with pytest.raises(InvalidRequestError, match="more than 2 turns"):
        await store.conversation("c", "me", 1 << 20)


async def test_a_conversation_has_a_largest_size_and_larger_ones_are_not_read(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for name, previous in ("a", ""), ("b", "a"), ("c", "b"):
        await store.put(record(name, previous))
    size = await store.size("a", "me")
    assert (size > 0, await store.size("a", "you")) == (True, 0)
    assert len(await store.conversation("c", "me", 3 * size)) == 3
    read: list[str] = []
    monkeypatch.setattr(store_module, "_get", lambda execute, name, owner: read.append(name))
    with pytest.raises(InvalidRequestError, match="--max-conversation-size"):
        await store.conversation("c", "me", 3 * size - 1)
    assert read == []


async def test_reading_does_not_wait_for_another_process_that_writes(tmp_path: Path) -> None:
    shared = Store(SqliteDatabase(tmp_path / "store.db"))
    store = ResponseStore(shared, entries=3, max_bytes=1000, seconds=100.0)
    await store.put(record("a"))
    with SqliteDatabase(tmp_path / "store.db").transaction():
        assert await names(store, "a") == ["a"]
    shared.close()


async def test_responses_that_were_used_longest_ago_make_room(open_store: OpenStore) -> None:
    store = open_store(entries=3)
    await store.put(record("foreign", owner="you"))
    for name, previous in ("a", ""), ("b", ""), ("c", "a"):
        await store.put(record(name, previous))
    await store.conversation("c", "me", 1 << 20)  # uses a as well
    await store.put(record("d"))
    assert await names(store, "a", "b", "c", "d") == ["a", "c", "d"]
    assert await names(store, "foreign", owner="you") == ["foreign"]


async def test_the_size_of_all_responses_is_limited(open_store: OpenStore) -> None:
    store = open_store(max_bytes=1000)
    for name in "abc":
        await store.put(record(name, text="x" * 300))
    assert await names(store, "a", "b", "c") == ["b", "c"]
    with pytest.raises(StoreError, match="only 1000"):
        await store.put(record("huge", text="x" * 1000))
    assert await names(store, "b", "c") == ["b", "c"]


async def test_responses_expire(open_store: OpenStore) -> None:
    lasting, brief = open_store(), open_store(seconds=-1.0)
    await lasting.put(record("a"))
    await brief.put(record("b"))
    assert await names(lasting, "a", "b") == ["a"]


async def test_only_the_first_end_of_a_response_counts(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    await one.put(record("a", status="in_progress"))
    assert await other.keep_alive("gateway", 7.0, {"a", "b"}) == {"a"}
    ends = [{"id": "a", "status": status} for status in ("cancelled", "completed")]
    results = await asyncio.gather(one.finish(ends[0]), other.finish(ends[1]))
    assert sorted(results) == [False, True]
    kept = await one.get("a", "me")
    assert kept
    assert (kept.status, kept.runner_until) == (ends[results.index(True)]["status"], 7.0)
    assert await one.keep_alive("gateway", 8.0, {"a"}) == set()


async def test_a_response_that_its_gateway_does_not_compute_is_not_kept_alive(open_store: OpenStore) -> None:
    """The gateway was not told that `put` had succeeded, so it does not know the response."""
    store = open_store()
    await store.put(record("a", status="in_progress"))
    assert await store.keep_alive("gateway", 7.0, set()) == set()
    kept = await store.get("a", "me")
    assert kept is not None
    assert kept.runner_until == 5.0


async def test_the_end_of_a_response_counts_with_its_own_size(open_store: OpenStore) -> None:
    store = open_store(max_bytes=1000)
    await store.put(record("a", text="x" * 300))
    await store.put(record("b", status="in_progress", text="x" * 400))
    # Only the new text counts: both together are within the limit.
    assert await store.finish(record("b", text="x" * 400).response)
    assert await names(store, "a", "b") == ["a", "b"]
    await store.put(record("c", status="in_progress"))
    assert await store.finish(record("c", text="x" * 500).response)
    assert await names(store, "a", "b", "c") == ["c"]


async def test_a_response_whose_end_is_too_large_has_failed(open_store: OpenStore) -> None:
    store = open_store(max_bytes=1000)
    await store.put(record("a", status="in_progress"))
    assert await store.finish({**record("a").response, "output": ["x" * 1000]})
    kept = await store.get("a", "me")
    assert kept
    assert (kept.status, kept.response["output"]) == ("failed", [])
    assert "only 1000" in kept.response["error"]["message"]


async def test_making_room_ends_if_another_gateway_has_deleted_the_rest(tmp_path: Path) -> None:
    class Emptied(SqliteDatabase):
        """A database that counts responses which are gone when they are listed."""

        @contextlib.contextmanager
        def transaction(self, **options: Any) -> Iterator[Execute]:
            with super().transaction(**options) as execute:

                def changed(statement: str, parameters: Mapping[str, Any] = {}) -> tuple[list[Row], int]:
                    if statement.startswith("SELECT COUNT"):
                        return [(7, 7000)], 0
                    return execute(statement, parameters)

                yield changed

    shared = Store(Emptied(tmp_path / "store.db"))
    store = ResponseStore(shared, entries=3, max_bytes=1000, seconds=100.0)
    await store.put(record("a"))
    assert await names(store, "a") == ["a"]
    shared.close()


@pytest.mark.parametrize("url", ["made_up://host/name", "sqlite+made_up:///x"])
def test_a_url_without_a_driver_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="--store"):
        open_database(url)
