"""Caches of names, which tell what a ranking would have found."""

from __future__ import annotations

from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.ranking import Name
from paceline.core.cache_policy.shadow import Shadow
from tests.core.cache_policy.policies import name


def use(shadow: Shadow, context: str) -> str:
    """Request the blocks of a context, one per letter. Return the letters of the blocks that were found."""
    names = [name(context[: end + 1]) for end in range(len(context))]
    parents = [None, *names[:-1]]
    return "".join(letter for letter, *pair in zip(context, names, parents) if shadow.use(*pair))


def test_it_finds_what_a_memory_of_its_size_would_find() -> None:
    shadow = Shadow(LRU(3), in_use=lambda _: False)
    assert [use(shadow, context) for context in ("ab", "ab", "x", "ab", "y", "x", "ab")] == [
        "",
        "ab",
        "",
        "ab",
        "",
        "",
        "a",
    ]


def test_children_go_before_their_parents() -> None:
    shadow = Shadow(LRU(3), in_use=lambda _: False)
    for context in ("abc", "x"):
        use(shadow, context)
    assert use(shadow, "abc") == "ab"


def test_blocks_in_use_stay_until_they_are_released() -> None:
    running: set[Name] = {name("a")}
    shadow = Shadow(LRU(2), running.__contains__)
    for context in ("a", "x", "y"):
        use(shadow, context)
    assert use(shadow, "a") == "a"
    for context in ("x", "y"):
        use(shadow, context)
    running.clear()
    shadow.release(name("a"))
    use(shadow, "z")
    assert use(shadow, "a") == ""


def test_it_grows_while_all_blocks_are_in_use() -> None:
    shadow = Shadow(LRU(2), in_use=lambda _: True)
    use(shadow, "abcd")
    assert use(shadow, "abcd") == "abcd"
