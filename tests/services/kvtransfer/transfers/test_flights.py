"""Which request fetches a prefix, and which requests wait for it. The proof (tests/proof) tests all failures."""

from __future__ import annotations

from paceline.services.kvtransfer.transfers.prefixes import Flights
from tests.services.kvtransfer.kv_toolkit import chain

LONG, SHORT, OTHER = chain("abcd"), chain("ab"), chain("abxy")


def test_who_lacks_what_another_brings_waits_and_then_looks_again() -> None:
    flights: Flights[str] = Flights()
    assert flights.ask("first", LONG)
    assert not flights.ask("short", SHORT)
    assert not flights.ask("other", OTHER)
    assert flights.end("first") == ["short", "other"]
    assert flights.ask("other", OTHER[2:])
    assert flights.ask("short", [])
    assert flights.end("short") == []


def test_who_lacks_only_what_nobody_brings_waits_for_nobody() -> None:
    flights: Flights[str] = Flights()
    assert flights.ask("first", LONG[2:])
    assert flights.ask("other", OTHER[2:])


def test_who_waits_no_longer_ends_no_flight_but_its_own() -> None:
    flights: Flights[str] = Flights()
    flights.ask("first", LONG)
    flights.ask("second", LONG)
    assert flights.end("second") == []
    assert not flights.ask("third", LONG)
    assert flights.end("first") == ["third"]
