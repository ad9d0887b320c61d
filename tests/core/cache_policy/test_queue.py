"""The order of blocks by last use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cache_policy.lru import UseQueue
from tests.core.cache_policy.policies import name


@given(st.lists(st.integers(0, 300), unique=True), st.lists(st.integers(0, 300)))
def test_the_least_recently_used_name_is_first(times: list[int], gone: list[int]) -> None:
    queue = UseQueue()
    for used in times:
        queue.add(name(str(used)), used)
    for used in gone:
        assert queue.discard(name(str(used))) == (used in times)
        times = [other for other in times if other != used]
    for used in sorted(times):
        assert queue.first() == name(str(used))
        queue.discard(name(str(used)))
    assert not queue
