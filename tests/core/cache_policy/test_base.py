"""Properties that hold for every policy, including those of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paceline.core.cache_policy.base import CachePolicy, HintCounts
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.hazard import HORIZON
from paceline.core.cache_policy.hints import Hint
from paceline.core.cache_policy.ranking import Block, Name, Place
from paceline.core.cache_policy.registry import POLICIES
from tests.core.cache_policy.policies import MostRecent, Stubborn, name

SLOTS = 12
CONTEXTS = st.text("ab", min_size=1, max_size=6)
"""Contexts with one block per letter. Contexts with equal beginnings share blocks."""


class PolicyMachine(RuleBasedStateMachine):
    """Requests that use and release the blocks of contexts, with evictions at any time."""

    make: Callable[[int], CachePolicy]
    held = Bundle("held")

    @initialize()
    def start(self) -> None:
        self.policy, self.twin = (type(self).make(SLOTS) for _ in range(2))
        self.holds: list[list[Name]] = []
        self.here: set[Name] = set()

    def both(self, call: str, *arguments: Any) -> Any:
        """Call a method of both policies, check that they return the same, and return it."""
        found = getattr(self.policy, call)(*arguments)
        assert getattr(self.twin, call)(*arguments) == found
        return found

    def in_use(self) -> set[Name]:
        return {one for hold in self.holds for one in hold}

    @rule(target=held, context=CONTEXTS, priority=st.integers(-2, 2))
    def use(self, context: str, priority: int) -> object:
        names = [name(context[: end + 1]) for end in range(len(context))]
        cached = 0
        while cached < len(names) and names[cached] in self.here:
            cached += 1
        missing = [one for one in names[cached:] if one not in self.here]
        room = len(self.here) + len(missing) - SLOTS
        if room > 0:
            gone = self.both("evict", room, names)
            if gone is None:
                return multiple()
            self.here -= {*gone}
        for one in names:
            if one in self.here:
                self.both("hold", one)
                self.both("touch", [one], priority)
            else:
                place = Place(name(context[: len(one[1]) - 1]) if len(one[1]) > 1 else None, 16 * len(one[1]), priority)
                self.both("insert", one, place)
                self.here.add(one)
        self.holds.append(names)
        return names

    @rule(context=CONTEXTS, seconds=st.sampled_from([30.0, 300.0, 3600.0]), source=st.sampled_from([b"", b"x"]))
    def hint(self, context: str, seconds: float, source: bytes) -> None:
        self.both("expect", name(context), Hint(16 * len(context), seconds, source))

    @rule(names=consumes(held))
    def let_go(self, names: list[Name]) -> None:
        self.holds.remove(names)
        for one in reversed(names):
            if one not in self.in_use():
                self.both("release", one)

    @rule(count=st.integers(0, SLOTS), protected=st.lists(CONTEXTS, max_size=2))
    def make_room(self, count: int, protected: list[str]) -> None:
        kept = {name(text) for text in protected}
        needed = {one for text in protected for end in range(len(text)) for one in [name(text[: end + 1])]}
        before = self.here - self.in_use()
        possible = len(before - {one for one in needed if self._needed_here(one, kept)})
        gone = self.both("evict", count, kept)
        if gone is None:
            assert count > possible, "it could have made room"
            return
        assert len(gone) == len({*gone}) == count <= possible
        assert not {*gone} & (kept | self.in_use())
        for place, one in enumerate(gone):
            still = before - {*gone[:place]}
            assert not any(child[1][:-1] == one[1] for child in still), "a block was evicted before its child"
        self.here -= {*gone}

    def _needed_here(self, one: Name, kept: set[Name]) -> bool:
        """Return whether a cached block among `kept` needs this block or is this block."""
        return any(block in self.here and block[1].startswith(one[1]) for block in kept)

    @invariant()
    def adds_up(self) -> None:
        assert self.policy.check() == []
        assert {block.name for block in self.policy.blocks()} == self.here
        assert {block.name for block in self.policy.blocks() if not block.evictable} == self.in_use()
        assert self.policy.evictable == len(self.here - self.in_use())
        assert len(self.here) <= SLOTS


MAKERS = {**POLICIES, "third party": MostRecent, "fast learner": lambda slots: Forecast(slots, remembered=HORIZON)}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_promises_hold_under_any_calls(make: Callable[[int], CachePolicy]) -> None:
    machine = type("Machine", (PolicyMachine,), {"make": staticmethod(make)})
    machine.TestCase.settings = settings(stateful_step_count=30)
    machine.TestCase().runTest()


def filled(policy: CachePolicy, *contexts: str) -> None:
    """Use each context once, one after the other."""
    for context in contexts:
        names = [name(context[: end + 1]) for end in range(len(context))]
        for end, one in enumerate(names):
            if policy.get(one) is None:
                policy.insert(one, Place(names[end - 1] if end else None, 16 * (end + 1)))
            else:
                policy.hold(one)
                policy.touch([one])
        for one in reversed(names):
            policy.release(one)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_all_can_go_in_the_end_and_parents_last(make: Callable[[int], CachePolicy]) -> None:
    policy = make(8)
    filled(policy, "abc", "abd", "x")
    gone = policy.evict(5)
    assert gone is not None
    assert len(gone) == 5
    assert gone.index(name("a")) > gone.index(name("ab")) > max(gone.index(name("abc")), gone.index(name("abd")))
    assert policy.evict(1) is None


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_protected_blocks_keep_their_ancestors(make: Callable[[int], CachePolicy]) -> None:
    policy = make(8)
    filled(policy, "abc", "abd")
    assert policy.evict(2, [name("abc")]) is None
    assert policy.evict(1, [name("abc")]) == [name("abd")]
    assert policy.evictable == 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_parent_that_was_released_first_stays_as_long_as_its_child(make: Callable[[int], CachePolicy]) -> None:
    policy = make(8)
    policy.insert(name("a"), Place(None, 16))
    policy.insert(name("ab"), Place(name("a"), 32))
    policy.release(name("a"))
    policy.release(name("ab"))
    assert policy.check() == []
    assert policy.evict(2) == [name("ab"), name("a")]


def test_a_block_whose_parent_is_not_here_goes_first() -> None:
    policy = POLICIES["lru"](8)
    filled(policy, "x")
    policy.insert(name("ab"), Place(name("a"), 32))
    policy.release(name("ab"))
    assert policy.evict(1) == [name("ab")]


def test_a_block_whose_parent_came_back_is_one_like_others() -> None:
    policy = POLICIES["lru"](8)
    filled(policy, "x")
    policy.insert(name("ab"), Place(name("a"), 32))
    policy.release(name("ab"))
    filled(policy, "a")
    assert policy.evict(3) == [name("x"), name("ab"), name("a")]


def test_blocks_that_are_needed_together_go_together() -> None:
    policy = POLICIES["lru"](8)
    for text in (b"a", b"b", b"c"):
        for group in (0, 1, 2):
            policy.insert((group, text), Place(partners=tuple({0, 1} - {group}) if group < 2 else ()))
    for group in (0, 1, 2):
        for text in (b"a", b"b", b"c"):
            policy.release((group, text))
    assert policy.evict(3) == [(0, b"a"), (1, b"a"), (0, b"b")]
    assert policy.check() == []
    policy.insert((0, b"b"), Place(partners=(1,)))  # somebody needed it again, so its partner is of use as well
    assert policy.evict(3) == [(0, b"c"), (1, b"c"), (1, b"b")]
    assert policy.check() == []


def test_removed_blocks_are_forgotten() -> None:
    for make in POLICIES.values():
        policy = make(8)
        filled(policy, "ab")
        policy.remove(name("ab"))
        assert policy.get(name("ab")) is None
        assert policy.check() == []
        assert policy.evict(1) == [name("a")]


def test_a_policy_cannot_choose_what_is_not_on_offer() -> None:
    policy = Stubborn(8)
    filled(policy, "ab")
    with pytest.raises(RuntimeError, match=r"Stubborn chose .* not on offer"):
        policy.evict(1)


def test_the_most_urgent_user_counts() -> None:
    policy = POLICIES["lru"](8)
    policy.insert(name("a"), Place(None, 16, priority=2))
    for priority in (5, 1, None):
        policy.touch([name("a")], priority)
    block = policy.get(name("a"))
    assert block is not None
    assert (block.priority, block.touches) == (1, 3)
    assert isinstance(block, Block)


def test_hints_are_counted_once_until_the_next_use() -> None:
    policy = POLICIES["lru"](8)
    filled(policy, "abc")
    hint = Hint(48, 60.0)
    for text in ("a", "ab", "ab", "abc", "elsewhere"):
        policy.expect(name(text), hint)
    policy.touch([name("a"), name("ab")])
    policy.touch([name("a")])
    assert policy.evict(1) == [name("abc")]
    assert policy.hint_counts == HintCounts(hinted=3, kept=2, wasted=1)
