"""How much the hints of a source are believed."""

from __future__ import annotations

from paceline.core.cache_policy.history import LEVELS, Sources


def test_a_new_source_is_believed() -> None:
    assert Sources().level(b"new") == LEVELS - 1


def test_a_source_is_believed_as_its_hints_come_true() -> None:
    sources = Sources()
    for number in range(1000):
        sources.count(b"right", came_true=True)
        sources.count(b"often", came_true=number % 3 == 0)
        sources.count(b"wrong", came_true=False)
    assert [sources.level(name) for name in (b"wrong", b"often", b"right")] == [0, 1, 1]


def test_newer_hints_count_more() -> None:
    sources = Sources()
    for came_true in (False, True):
        for _ in range(10_000):
            sources.count(b"better", came_true)
    assert sources.level(b"better") == LEVELS - 1


def test_few_sources_are_remembered() -> None:
    sources = Sources()
    for _ in range(100):
        sources.count(b"first", came_true=False)
    for number in range(5000):
        sources.count(str(number).encode(), came_true=True)
    assert len(sources._records) <= 1024
    assert sources.level(b"first") == LEVELS - 1
