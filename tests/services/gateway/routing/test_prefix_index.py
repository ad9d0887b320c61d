"""The prefix index, against the block pool whose events it follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.block_pool import BlockEvent
from paceline.core.context import Context, encoding_context, full_block_names
from paceline.core.kv_layout import KVLayout
from paceline.core.prefix import match_prefix
from paceline.core.types import Key
from paceline.services.common.streams import BlockBatch
from paceline.services.gateway.routing import prefix_index
from paceline.services.gateway.routing.prefix_index import IndexedBlocks, PrefixIndex
from tests.services.kvtransfer.kv_toolkit import DECODE, Desk, make_layout

FULL = make_layout((16, 0))
MIXED = make_layout((64, 0), (16, 40))


def names(layout: KVLayout, tokens: list[int], salt: str = "") -> list[list[bytes]]:
    """Return the names of all full blocks of a context, by group."""
    links = Context(tokens, salt).links(layout.fingerprint)
    return [list(full_block_names(group, links, len(tokens))) for group in layout.groups]


def blocks(layout: KVLayout, tokens: list[int], salt: str = "") -> IndexedBlocks:
    return IndexedBlocks("p", 0, layout, names(layout, tokens, salt))


def stored(*digests: bytes, first: int = 0, pool: str = "p", host: str = "a") -> BlockBatch:
    return BlockBatch(host, pool, first, tuple(BlockEvent("stored", 0, digest) for digest in digests))


TOKENS = list(range(200))


def cached_tokens(blocks: IndexedBlocks, context: Context | None = None) -> int:
    """Return what an index finds of a context on a host; by default of TOKENS."""
    index = PrefixIndex()
    index.replace("host", blocks)
    return index.cached_tokens(context or Context(TOKENS), 1000).get("host", 0)


def test_each_host_tells_how_much_it_has() -> None:
    index = PrefixIndex()
    index.replace("a", blocks(FULL, TOKENS[:100]))
    index.replace("b", blocks(MIXED, TOKENS[:150]))
    index.replace("none", blocks(FULL, TOKENS[1:]))
    assert index.cached_tokens(Context(TOKENS), 199) == {"a": 96, "b": 128}
    assert index.cached_tokens(Context(TOKENS), 90) == {"a": 80, "b": 64}


def test_a_salt_finds_its_own_blocks_alone() -> None:
    index = PrefixIndex()
    index.replace("a", blocks(FULL, TOKENS, "tenant"))
    assert index.cached_tokens(Context(TOKENS), 199) == {}
    assert index.cached_tokens(Context(TOKENS, "other"), 199) == {}
    assert index.cached_tokens(Context(TOKENS, "tenant"), 199) == {"a": 192}


def test_what_is_generated_is_found_too() -> None:
    index, context = PrefixIndex(), Context(TOKENS[:40])
    index.replace("a", blocks(FULL, TOKENS))
    assert index.cached_tokens(context, 1000) == {"a": 32}
    context.token_ids += TOKENS[40:64]
    assert index.cached_tokens(context, 1000) == {"a": 64}


def test_behind_a_window_only_what_can_be_seen_is_needed() -> None:
    full, windowed = names(MIXED, TOKENS[:128])
    seen = IndexedBlocks("p", 0, MIXED, [full, windowed[-3:]])
    assert cached_tokens(seen) == 128
    assert cached_tokens(IndexedBlocks("p", 0, MIXED, [full, windowed[:-1]])) == 64


def test_events_are_followed_and_gaps_are_noticed() -> None:
    index = PrefixIndex()
    (chain,) = names(FULL, TOKENS)
    assert not index.apply(stored(chain[0]))  # this host has sent no list yet
    index.replace("a", IndexedBlocks("p", 2, FULL, [chain[:2]]))
    assert index.apply(stored(b"0" * 16, b"1" * 16, chain[2], first=0))  # two of the three events are old
    assert index.cached_tokens(Context(TOKENS), 199) == {"a": 48}
    assert index.apply(stored(chain[2], first=2))  # the same event again
    assert not index.apply(stored(chain[4], first=4))
    assert not index.apply(stored(chain[3], first=3, pool="another"))
    assert index.cached_tokens(Context(TOKENS), 199) == {"a": 48}
    assert index.apply(BlockBatch("a", "p", 3, (BlockEvent("removed", 0, chain[0]),)))
    assert index.cached_tokens(Context(TOKENS), 199) == {}
    assert index.apply(stored(chain[0], first=1))  # the event from before the block was removed
    assert index.cached_tokens(Context(TOKENS), 199) == {}
    index.replace("a", blocks(FULL, TOKENS))
    index.forget("a")
    assert index.cached_tokens(Context(TOKENS), 199) == {}


def test_the_hosts_with_an_encoding_are_found() -> None:
    index, salt = PrefixIndex(), "tenant"
    for host, text, rows in (("a", salt, 64), ("b", salt, 32), ("c", "another", 64)):
        layout = make_layout((16, 0), encoding_tokens=32)
        links = encoding_context(b"cat", 64, text, layout).links(layout.fingerprint)
        assert layout.encodings is not None
        (group,) = layout.encodings.groups
        index.replace(host, IndexedBlocks("p", 0, layout, [[], full_block_names(group, links, rows)]))
    index.replace("blind", blocks(FULL, TOKENS))
    assert index.encoding_hosts(b"cat", 40, salt) == ["a"]  # rounded up to two blocks
    assert index.encoding_hosts(b"cat", 32, salt) == ["a", "b"]
    assert index.encoding_hosts(b"dog", 64, salt) == []
    assert index.cached_tokens(Context([0] * 64, salt), 64) == {}


LAYOUTS = (FULL, MIXED)
blocks_of_a_host = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 11)))
steps_of_hosts = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["list", "stored", "removed", "leaves"]), blocks_of_a_host),
    max_size=20,
)


def reusable(layout: KVLayout, sets: list[set[bytes]], context: Context) -> int:
    """Return what the ledger's own search finds of the first 199 tokens in sets of blocks, by group."""
    links = context.links(layout.fingerprint)
    return match_prefix(layout, lambda group, name: 0 if name in sets[group] else None, links, 199)[0]


@given(steps_of_hosts, st.lists(st.sampled_from(LAYOUTS), min_size=20, max_size=20))
def test_hosts_come_change_and_go(steps: list[tuple[str, str, set[tuple[int, int]]]], layouts: list[KVLayout]) -> None:
    """The index knows at any time what a search of each host's own set would find."""
    index = PrefixIndex()
    context = Context(TOKENS)
    truth: dict[str, tuple[KVLayout, list[set[bytes]]]] = {}
    for (host, what, numbers), layout in zip(steps, layouts):
        known = truth.get(host)
        layout = layout if what == "list" or known is None else known[0]
        chosen = [
            (group, own[n])
            for group, own in enumerate(names(layout, TOKENS))
            for g, n in numbers
            if g == group and n < len(own)
        ]
        if what == "list":
            sets = [set(own) for own in names(layout, TOKENS)]
            for group, name in chosen:
                sets[group].discard(name)
            truth[host] = layout, sets
            index.replace(host, IndexedBlocks("p", 0, layout, [list(own) for own in sets]))
        elif what == "leaves":
            truth.pop(host, None)
            index.forget(host)
        elif known is not None:
            for group, name in chosen:
                (known[1][group].add if what == "stored" else known[1][group].discard)(name)
            first = index.host(host).next_event  # type: ignore[union-attr]
            events = tuple(BlockEvent(what, group, name) for group, name in chosen)  # type: ignore[arg-type]
            assert index.apply(BlockBatch(host, "p", first, events))
    found = {host: reusable(layout, sets, context) for host, (layout, sets) in truth.items()}
    assert index.cached_tokens(context, 199) == {host: tokens for host, tokens in found.items() if tokens}


def test_what_was_not_noted_of_a_full_host_is_not_found_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_MOST_BLOCKS", 2)
    index = PrefixIndex()
    (chain,) = names(FULL, TOKENS)
    index.replace("a", IndexedBlocks("p", 0, FULL, [[]]))
    assert index.apply(stored(*chain[2:0:-1], chain[0]))
    assert index.cached_tokens(Context(TOKENS), 199) == {}
    index.forget("a")
    index.replace("b", IndexedBlocks("p", 0, FULL, [chain[1:3]]))
    assert index.cached_tokens(Context(TOKENS), 199) == {}


operations = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.sampled_from(["events", "again", "lost", "asked"])), max_size=30
)


@given(operations)
def test_who_follows_knows_what_the_ledger_would_reuse(steps: list[tuple[int, int, str]]) -> None:
    """Contexts are cached and evicted. Their events arrive, arrive twice, or are lost."""
    desk = Desk(12, (32, 0), (16, 40))
    layout, index = desk.layout, PrefixIndex()
    contexts = [[family] * 16 * 12 for family in range(4)]

    def ask() -> None:
        index.replace("a", IndexedBlocks("p", desk.ledger.event_count, layout, desk.ledger.reusable()))

    ask()
    for number, (family, length, fate) in enumerate(steps):
        links = Context(contexts[family][: 16 * min(length, 6)]).links(layout.fingerprint)
        lease = desk.ledger.reserve(DECODE, Key(f"r{number}", 1, 1), links, len(links) * 16, 1 << 20, desk.now)
        for group, blocks_of in enumerate(layout.groups):
            stride = blocks_of.block_tokens // 16
            first = lease.filled_tokens // blocks_of.block_tokens
            digests = links[stride - 1 :: stride][first:]
            desk.ledger.seal(DECODE, lease.key, group, first, digests, desk.now)
        desk.ledger.release(DECODE, lease.key, desk.now)
        events = desk.ledger.take_events()
        batch = BlockBatch("a", "p", desk.ledger.event_count - len(events), tuple(events))
        if fate == "asked":
            ask()
        if fate != "lost" and not index.apply(batch):
            ask()
        if fate == "again":
            index.apply(batch)
        known = index.host("a")
        assert known is not None
        if known.next_event == desk.ledger.event_count:
            for tokens in contexts:
                reusable = desk.ledger.reusable()
                truth = cached_tokens(IndexedBlocks("p", 0, layout, reusable), Context(tokens))
                assert index.cached_tokens(Context(tokens), 1000).get("a", 0) == truth


def test_the_end_of_a_request_is_found_with_the_blocks_that_are_not_full() -> None:
    desk, index = Desk(20, (64, 0), (128, 2)), PrefixIndex()
    first, tail = Context(TOKENS[:150]), Context(TOKENS[:150]).tails("test", [137])[0]
    index.note_end(first, 137)  # before the index knows any host
    links = first.links("test")
    lease = desk.ledger.reserve(DECODE, Key("first", 1, 1), links, 150, 0, desk.now)
    for group, names_of_group in enumerate(names(desk.layout, TOKENS[:150])):
        desk.ledger.seal(DECODE, lease.key, group, 0, names_of_group, desk.now)
    desk.ledger.keep(DECODE, lease.key, tail, desk.now)
    index.replace("a", IndexedBlocks("p", 0, desk.layout, desk.ledger.reusable()))
    assert index.ends(Context(TOKENS)) == [137]
    assert index.cached_tokens(Context(TOKENS), 199) == {"a": 137}
    assert index.cached_tokens(Context(TOKENS), 136) == {"a": 128}
    # Not a request that is equal up to the last link before it only.
    assert index.cached_tokens(Context([*TOKENS[:130], 7, *TOKENS]), 199) == {"a": 128}
    desk.ledger.reserve(DECODE, Key("next", 1, 1), Context(TOKENS).links("test"), 200, 199, desk.now, tails=[tail])
    index.replace("a", IndexedBlocks("p", 0, desk.layout, desk.ledger.reusable()))
    assert index.cached_tokens(Context(TOKENS), 199) == {"a": 128}


def test_ends_belong_to_an_owner_even_after_a_shared_prompt() -> None:
    index = PrefixIndex()

    def context(salt: str) -> Context:
        return Context(TOKENS, salt, shared_tokens=96)

    assert context("alice").links("test")[5] == context("bob").links("test")[5]
    for length in (90, 100, 130):
        index.note_end(context("alice"), length)
    assert index.ends(context("alice")) == [90, 100, 130]
    assert index.ends(context("bob")) == []


def test_a_fleet_without_states_remembers_no_ends() -> None:
    index = PrefixIndex()
    index.replace("a", blocks(FULL, TOKENS))
    index.note_end(Context(TOKENS), 150)
    assert index.ends(Context(TOKENS)) == []


def test_of_many_ends_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_MOST_ENDS", 3)
    index = PrefixIndex()
    for length in (20, 36, 40, 60, 70):
        index.note_end(Context(TOKENS), length)
    assert index.ends(Context(TOKENS)) == [36, 40, 60, 70]
    index.note_end(Context(TOKENS), 38)
    index.note_end(Context(TOKENS), 90)
    assert index.ends(Context(TOKENS)) == [36, 38, 40, 70, 90]
    assert index.ends(Context(TOKENS[:70])) == [36, 38, 40]
