"""Leases of batches and the answers of their lines, on SQLite's own module and on SQLAlchemy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from paceline.services.gateway.api.batches import batch_store
from paceline.services.gateway.api.batches.batch import Batch, LineError, TransitionError
from paceline.services.gateway.api.batches.batch_store import BatchStore, LeaseLostError, LineAnswer
from paceline.services.gateway.api.batches.file_store import QuotaError
from paceline.services.gateway.store.database import Execute, StoreError, open_database
from paceline.services.gateway.store.store import Store

OpenStore = Callable[[], BatchStore]
LATER = 1e12
PAST = 1.0


def allowed(execute: Execute) -> None:
    """Allow a batch without looking at its input file."""


@pytest.fixture(params=["", "sqlite:///"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Return a function that opens the store of another gateway; all have the same database."""
    if request.param:
        pytest.importorskip("sqlalchemy")
    with contextlib.ExitStack() as stack:

        def open_() -> BatchStore:
            shared = Store(open_database(f"{request.param}{tmp_path / 'store.db'}"))
            stack.callback(shared.close)
            return BatchStore(shared, most=3, seconds=100.0)

        yield open_


def batch(name: str, owner: str = "me", created: float = 1764000000.123456) -> Batch:
    return Batch(
        id=name,
        owner=owner,
        endpoint="/v1/completions",
        input_file_id="f",
        completion_window="24h",
        created=created,
        expires=LATER,
    )


def running(state: Batch) -> Batch:
    return state.moved("in_progress", 5.0, total=3)


async def test_a_batch_is_kept_as_it_is(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    await one.add(batch("a"), allowed)
    errors = (LineError("invalid_json_line", "why", 3),)
    changed = await other.change("a", lambda state: state.moved("failed", 7.5, errors=errors))
    assert await one.get("a", "me") == changed == batch("a").moved("failed", 7.5, errors=errors)
    assert await one.get("a", None) == changed
    assert await one.get("a", "you") is None


async def test_one_gateway_has_the_lease_until_it_ends(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    await one.add(batch("a"), allowed)
    assert [each.id for each in await one.claim("one", LATER, 5, 4, [])] == ["a"]
    assert await other.claim("other", LATER, 5, 4, []) == []
    assert set(await one.renew("one", PAST, ["a"])) == {"a"}
    assert [each.id for each in await other.claim("other", LATER, 5, 4, [])] == ["a"]
    assert await one.renew("one", LATER, ["a"]) == {}
    await other.release("a", "other")
    assert [each.id for each in await one.claim("one", LATER, 5, 4, [])] == ["a"]


async def test_who_has_lost_the_lease_writes_nothing(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    await one.add(batch("a"), allowed)
    await one.claim("one", PAST, 1, 4, [])
    await one.change("a", running, "one")
    await one.answer("a", "one", [LineAnswer(1, "first", True)])
    await other.claim("other", LATER, 1, 4, [])
    with pytest.raises(LeaseLostError):
        await one.answer("a", "one", [LineAnswer(2, "late", True)])
    with pytest.raises(LeaseLostError):
        await one.change("a", lambda state: state.moved("finalizing", 1.0), "one")
    assert await other.answered("a") == {1}


async def test_a_line_gets_no_second_answer(open_store: OpenStore) -> None:
    store = open_store()
    await store.add(batch("a"), allowed)
    await store.claim("one", LATER, 1, 4, [])
    await store.change("a", running)
    await store.answer("a", "one", [LineAnswer(2, "second", True), LineAnswer(1, "first", False)])
    with pytest.raises(StoreError):
        await store.answer("a", "one", [LineAnswer(3, "third", True), LineAnswer(1, "again", True)])
    found = await store.get("a", "me")
    assert found is not None
    assert (found.completed, found.failed, found.is_answered) == (1, 1, False)
    assert [text async for text in store.answers("a", is_ok=True)] == ["second"]
    assert [text async for text in store.answers("a", is_ok=False)] == ["first"]


@pytest.mark.parametrize(("lines", "size"), [(200, 1), (200, 10), (200, 25), (3, 1000), (200, 1000)])
async def test_answers_are_read_in_pages(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, lines: int, size: int
) -> None:
    monkeypatch.setattr(batch_store, "PAGE_LINES", lines)
    monkeypatch.setattr(batch_store, "PAGE_BYTES", size)
    store = open_store()
    await store.add(batch("a"), allowed)
    await store.claim("one", LATER, 1, 4, [])
    await store.change("a", running)
    texts = [str(number) * (1 + number % 9) for number in range(1, 30)]
    await store.answer("a", "one", [LineAnswer(3 * number, text, True) for number, text in enumerate(texts, 1)])
    await store.answer("a", "one", [LineAnswer(1, "an error", False)])
    assert [text async for text in store.answers("a", is_ok=True)] == texts
    assert await store.answer_bytes("a") == sum(map(len, texts)) + len("an error")


async def test_a_change_that_may_not_be_changes_nothing(open_store: OpenStore) -> None:
    store = open_store()
    await store.add(batch("a"), allowed)
    with pytest.raises(TransitionError):
        await store.change("a", lambda state: state.moved("completed", 1.0))
    assert await store.get("a", "me") == batch("a")
    with pytest.raises(LeaseLostError):
        await store.change("none", running)


async def test_a_gateway_takes_a_batch_again_that_it_does_not_run(open_store: OpenStore) -> None:
    """It was not told that its claim had succeeded, or that a release had failed."""
    one, other = open_store(), open_store()
    await one.add(batch("a"), allowed)
    await one.claim("one", LATER, 5, 4, [])
    assert await one.claim("one", LATER, 5, 4, ["a"]) == []
    assert await one.renew("one", PAST, []) == {}
    assert [each.id for each in await one.claim("one", LATER, 5, 4, [])] == ["a"]
    assert await other.claim("other", LATER, 5, 4, []) == []


async def test_a_batch_that_is_added_again_is_the_first_one(open_store: OpenStore) -> None:
    one, other = open_store(), open_store()
    first = await one.add(batch("a"), allowed)
    assert await other.add(batch("a", created=5.0), allowed) == first
    assert len(await one.page("me", None, 9)) == 1


async def test_owners_take_turns(open_store: OpenStore) -> None:
    store = open_store()
    for number, (name, owner) in enumerate([("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]):
        await store.add(batch(name, owner, created=number), allowed)
    assert [each.id for each in await store.claim("one", LATER, 3, 4, [])] == ["a1", "b1", "a2"]


async def test_a_gateway_runs_so_many_batches_of_an_owner(open_store: OpenStore) -> None:
    store = open_store()
    for number, (name, owner) in enumerate([("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]):
        await store.add(batch(name, owner, created=number), allowed)
    assert [each.id for each in await store.claim("one", LATER, 1, 2, [])] == ["a1"]
    assert [each.id for each in await store.claim("one", LATER, 9, 2, ["a1"])] == ["b1", "a2"]
    assert await store.claim("one", LATER, 9, 2, ["a1", "b1", "a2"]) == []
    await store.change("a1", lambda state: state.moved("failed", 1.0))
    assert [each.id for each in await store.claim("one", LATER, 9, 2, ["b1", "a2"])] == ["a3"]


async def test_an_owner_may_have_so_many_batches_that_have_not_ended(open_store: OpenStore) -> None:
    store = open_store()
    for number in range(3):
        await store.add(batch(f"a{number}"), allowed)
    with pytest.raises(QuotaError, match="--max-batches"):
        await store.add(batch("a3"), allowed)
    await store.change("a0", lambda state: state.moved("failed", 1.0))
    await store.add(batch("a3"), allowed)
    assert [each.id for each in await store.page("me", None, 2)] == ["a3", "a2"]
