from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.context import Tail, full_block_names
from paceline.core.kv_layout import KVGroup, KVLayout
from paceline.core.prefix import BlockHolders, match_prefix
from tests.services.kvtransfer.kv_toolkit import chain, make_layout

LAYOUTS = [
    make_layout((16, 0)),
    make_layout((16, 0), (64, 0)),
    make_layout((64, 0), (16, 40)),
    make_layout((32, 40), (16, 20)),
    make_layout((32, 0), (64, 2)),
]
LINKS = chain("abcdefghijkl")
HOSTS = (0, 1, 7, 64)
TAILS = [Tail(length, bytes([length])) for length in (20, 70, 100, 150)]

Change = tuple[int, str, int, int]
changes = st.lists(
    st.tuples(st.sampled_from(HOSTS), st.sampled_from(["stored", "removed"]), st.integers(0, 1), st.integers(0, 15)),
    max_size=40,
)


def names_of(group: KVGroup) -> Sequence[bytes]:
    """Return the names of all blocks of a group in the context, and of its blocks at the tails."""
    return [*full_block_names(group, LINKS, 16 * len(LINKS)), *(tail.name for tail in TAILS)]


def length_of(layout: KVLayout, own: set[tuple[int, bytes]], most: int) -> int:
    return match_prefix(layout, lambda group, name: 0 if (group, name) in own else None, LINKS, most, TAILS)[0]


@given(st.sampled_from(LAYOUTS), changes, st.integers(0, 200))
def test_hosts_are_searched_together_as_they_would_be_one_by_one(
    layout: KVLayout, steps: list[Change], most: int
) -> None:
    holders = BlockHolders(layout)
    everything = {(index, name) for index, group in enumerate(layout.groups) for name in names_of(group)}
    sets: dict[int, set[tuple[int, bytes]]] = {host: set(everything) if host % 2 else set() for host in HOSTS}
    for host, own in sets.items():
        holders.apply(host, [("stored", *block) for block in own])
    for host, op, group, number in steps:
        group %= len(layout.groups)
        names = names_of(layout.groups[group])
        block = group, names[number % len(names)]
        holders.apply(host, [(op, *block)])
        (sets[host].add if op == "stored" else sets[host].discard)(block)
    lengths = {host: length_of(layout, own, most) for host, own in sets.items()}
    assert holders.cached_tokens(LINKS, most, TAILS) == {host: length for host, length in lengths.items() if length}


def test_of_an_encoding_all_rows_are_counted() -> None:
    layout = make_layout((16, 0), encoding_tokens=32)
    links = chain("abcd")
    holders = BlockHolders(layout)
    holders.apply(0, [("stored", 1, links[1]), ("stored", 1, links[3])])
    holders.apply(1, [("stored", 1, links[1]), ("stored", 0, links[3])])
    assert holders.cached_rows(links, 64) == {0: 64, 1: 32}
    assert holders.cached_tokens(links, 64) == {}
