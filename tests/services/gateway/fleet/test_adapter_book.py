"""Gateways come to the same names of adapters, in whatever order they hear of changes."""

from __future__ import annotations

import random

import pytest

from paceline.core.adapters import Adapter
from paceline.core.errors import BusyError
from paceline.services.common.registry import Member
from paceline.services.gateway.fleet import adapter_book
from paceline.services.gateway.fleet.adapter_book import AdapterBook


def adapter(name: str, content: int = 0) -> Adapter:
    return Adapter(name, f"/loras/{name}", bytes([content]))


def heard(book: AdapterBook) -> Member:
    """Return a gateway's member as other gateways read it."""
    member = Member("g", "gateway", 1, "address", "", adapters=book.changes)
    read = Member.from_bytes(member.to_bytes())
    assert read is not None
    return read


def test_a_name_comes_changes_and_goes_at_all_gateways() -> None:
    one, two, late = AdapterBook({}), AdapterBook({}), AdapterBook({})
    one.put(adapter("sql"))
    two.merge(heard(one).adapters)
    assert two.find("sql") == adapter("sql")
    two.put(adapter("sql", 1))
    one.merge(heard(two).adapters)
    one.merge(heard(one).adapters)
    assert one.find("sql") == adapter("sql", 1)
    before = heard(one)
    one.remove("sql")
    two.merge(heard(one).adapters)
    two.merge(before.adapters)  # late
    late.merge(heard(two).adapters)
    assert [list(book) for book in (one, two, late)] == [[], [], []]


def test_random_changes_end_in_one_state() -> None:
    rng, books = random.Random(1), [AdapterBook({}) for _ in range(3)]
    for _ in range(300):
        book, name = rng.choice(books), rng.choice("abcd")
        if rng.random() < 0.3:
            book.remove(name)
        else:
            book.put(adapter(name, rng.randrange(256)))
        if rng.random() < 0.5:
            rng.choice(books).merge(heard(rng.choice(books)).adapters)
    for book in books:
        for other in books:
            book.merge(heard(other).adapters)
    assert len({frozenset(book) for book in books}) == 1


def test_names_that_were_taken_away_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_book, "MOST_CHANGES", 2)
    book = AdapterBook({})
    for name in "ab":
        book.put(adapter(name))
    with pytest.raises(BusyError, match="at most 2 names"):
        book.put(adapter("c"))
    book.put(adapter("b", 1))
    book.remove("a")
    book.put(adapter("c"))
    assert {own.name for own in book} == {"b", "c"}
    assert len(book.changes) == 2
