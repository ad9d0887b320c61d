"""The adapters that a gateway takes a worker to have between its reports."""

from __future__ import annotations

from paceline.services.gateway.fleet.known_adapters import KnownAdapters


def test_adapters_of_newer_calls_count_until_a_report_must_have_them() -> None:
    known = KnownAdapters([1, 2])
    assert known.now == {1, 2}
    known.send(3)
    known.send(0)
    assert known.now == {1, 2, 3}
    known.update([1, 2])  # this report may have been written before the call
    assert known.now == {1, 2, 3}
    known.send(4)
    known.update([2])
    assert known.now == {2, 4}
    known.update([1, 2])
    assert known.now == {1, 2}
