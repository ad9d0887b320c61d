from __future__ import annotations

from paceline.core.media import MediaInput, MediaKind
from paceline.services.gateway.planning.media.items import Expansion, TokenRun
from paceline.services.gateway.planning.media.loading import RecentMedia


def expansion(size: int) -> Expansion:
    return Expansion((TokenRun.of(1, MediaInput(MediaKind.IMAGE, 1, "uint8", (size,), bytes(size))),))


def test_the_ones_used_longest_ago_make_room() -> None:
    recent = RecentMedia(3000)
    first, second, third = (expansion(1000 + index) for index in range(3))
    recent.put("a", first)
    recent.put("b", second)
    assert recent.get("a") is first
    recent.put("c", third)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (first, None, third)


def test_a_newer_item_replaces_the_one_with_the_same_name() -> None:
    recent = RecentMedia(3000)
    for size in (2000, 2001, 2002):
        recent.put("a", expansion(size))
    found = recent.get("a")
    assert found is not None
    assert found.size == 2002


def test_an_item_that_is_larger_than_the_cache_is_not_kept_and_others_stay() -> None:
    recent = RecentMedia(3000)
    small = expansion(1000)
    recent.put("a", small)
    recent.put("b", expansion(5000))
    assert (recent.get("a"), recent.get("b")) == (small, None)
    recent.put("a", expansion(5000))
    assert recent.get("a") is None
