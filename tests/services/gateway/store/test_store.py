"""The store of a gateway, on SQLite."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.http.access.callers import set_current_owner
from paceline.services.gateway.store import store as store_module
from paceline.services.gateway.store.database import Execute, Row, StoreError, open_database
from paceline.services.gateway.store.store import Store, Tables

MADE = Tables(["made"], lambda database: ["CREATE TABLE made (name VARCHAR(8) PRIMARY KEY)"])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(open_database(str(tmp_path / "store.db")))) as opened:
        opened.add_tables(MADE)
        yield opened


def made(execute: Execute) -> list[Row]:
    return execute("SELECT name FROM made")[0]


async def test_owners_take_turns(store: Store) -> None:
    order: list[str] = []
    go = threading.Event()

    async def use(name: str) -> None:
        set_current_owner(name[0])

        def work(execute: Execute) -> None:
            assert go.wait(10.0)
            order.append(name)

        await store.run(work)

    own = [asyncio.create_task(use(f"a{number}")) for number in range(4)]
    await asyncio.sleep(0)
    other = asyncio.create_task(use("b"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*own, other)
    assert order == ["a0", "a1", "b", "a2", "a3"]


@pytest.mark.parametrize("end", ["time-out", "cancelled"])
async def test_a_write_takes_no_effect_if_its_caller_has_gone(
    store: Store, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await store.run(made) == []
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.05 if end == "time-out" else 60.0)
    begun, go_on = threading.Event(), threading.Event()

    def slow(execute: Execute) -> None:
        execute("INSERT INTO made (name) VALUES ('a')")
        begun.set()
        go_on.wait(10.0)

    task = asyncio.create_task(store.run(slow))
    try:
        await asyncio.to_thread(begun.wait, 10.0)
        if end == "cancelled":
            task.cancel()
        with pytest.raises(StoreError if end == "time-out" else asyncio.CancelledError):
            await task
    finally:
        go_on.set()
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 60.0)
    assert await store.run(made) == []


@pytest.mark.parametrize("name", ["a\0", "\ud800"])
async def test_what_some_database_cannot_store_is_the_clients_fault(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="NUL"):
        await store.run(lambda execute: execute("SELECT name FROM made WHERE name = :name", {"name": name}))
    assert await store.run(lambda execute: execute("SELECT :name", {"name": "é"})[0]) == [("é",)]
