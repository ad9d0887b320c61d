from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_pool import BlockEvent
from paceline.simulator.prefix_hints import PrefixHints

NAMES = [bytes([number]) for number in range(5)]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["stored", "removed"]), st.sampled_from(NAMES))))
def test_every_host_is_asked_as_if_it_had_a_set_of_its_own(changes: list[tuple[int, str, bytes]]) -> None:
    hints = PrefixHints()
    sets: list[set[bytes]] = [set() for _ in range(4)]
    for host, op, name in changes:
        hints.apply(host, [BlockEvent(op, 0, name)])  # type: ignore[arg-type]
        (sets[host].add if op == "stored" else sets[host].discard)(name)
    counts = {host: next((i for i, name in enumerate(NAMES) if name not in own), 5) for host, own in enumerate(sets)}
    assert hints.cached_blocks(NAMES) == {host: count for host, count in counts.items() if count}
