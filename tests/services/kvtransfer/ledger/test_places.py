"""Which cached block needs which other block, and the order in which policies evict them."""

from __future__ import annotations

import pytest

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.ranking import Name, Place
from paceline.core.kv_layout import KVLayout
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.block_tables import place_of
from paceline.services.kvtransfer.ledger.claim import Claim
from paceline.services.kvtransfer.ledger.ledger import Ledger
from tests.core.cache_policy.policies import MostRecent
from tests.services.kvtransfer.kv_toolkit import DECODE, LEASE, chain, make_layout

FULL = make_layout((16, 0))
WITH_WINDOW = make_layout((32, 64), (16, 0))
COARSE = make_layout((32, 0), (16, 64))
WINDOW_ALONE = make_layout((16, 64))
DIVIDED = make_layout((16, 64), (32, 0), (16, 64))

A, B = chain("ab")


@pytest.mark.parametrize(
    ("layout", "group", "block", "expected"),
    [
        (FULL, 0, 0, Place(None, 16)),
        (FULL, 0, 1, Place((0, A), 32)),
        (WITH_WINDOW, 1, 1, Place((1, A), 32)),
        (WITH_WINDOW, 0, 0, Place((1, B), 32)),  # the later of the two full-attention blocks with the same tokens
        (COARSE, 1, 1, Place((0, B), 32)),
        (COARSE, 1, 0, Place(None, 16)),  # no full-attention block ends at this token
        (WINDOW_ALONE, 0, 1, Place(None, 32)),
        (DIVIDED, 2, 1, Place((1, B), 32, 0, (0,))),
        (DIVIDED, 1, 0, Place(None, 32)),
    ],
)
def test_places(layout: KVLayout, group: int, block: int, expected: Place) -> None:
    digest, before = (B, A) if (block + 1) * layout.groups[group].block_tokens == 32 else (A, b"")
    assert place_of(layout, group, block, digest, before if block else b"") == expected


def ledger_of(policy: CachePolicy, layout: KVLayout) -> Ledger:
    return Ledger(layout, policy.slots, LEASE, policy)


def cache(ledger: Ledger, layout: KVLayout, request: str, context: str, priority: int = 0) -> None:
    """Cache a context, sealing one block after another."""
    key, hashes = Key(request, 1, 1), chain(context)
    lease = ledger.reserve(DECODE, key, hashes, 16 * len(context), 1 << 20, 0.0, priority)
    for index, group in enumerate(layout.groups):
        stride = group.block_tokens // 16
        for block, digest in enumerate(hashes[stride - 1 :: stride]):
            ledger.seal(DECODE, lease.key, index, block, [digest], 0.0)
    ledger.release(DECODE, lease.key, 0.0)


def evicted(ledger: Ledger, blocks: int) -> list[Name]:
    """Return the blocks that a new lease of this many blocks evicts, in order."""
    ledger.take_events()
    ledger.reserve(DECODE, Key("room", 1, 1), [], 16 * blocks, 0, 0.0)
    return [(event.group, event.hash) for event in ledger.take_events() if event.op == "removed"]


def test_no_policy_evicts_a_block_before_those_that_need_it() -> None:
    ledger = ledger_of(MostRecent(4), FULL)
    cache(ledger, FULL, "r", "abcd")
    assert evicted(ledger, 4) == [(0, digest) for digest in reversed(chain("abcd"))]


def test_nor_full_attention_before_the_window_beside_it() -> None:
    ledger = ledger_of(MostRecent(12), WITH_WINDOW)
    cache(ledger, WITH_WINDOW, "r", "abcdefgh")
    gone = evicted(ledger, 8)
    for index, (group, digest) in enumerate(gone):
        if group == 1:
            assert (0, digest) not in gone[index:]


def test_the_order_survives_the_service() -> None:
    names = chain("abc")
    ledger = ledger_of(MostRecent(3), FULL)
    ledger.restore([Claim(DECODE, Key("r", 1, 1), 48, 48, [[2, 0, 1]], [names], True)], 0.0)
    ledger.release(DECODE, Key("r", 1, 1), 0.0)
    assert evicted(ledger, 3) == [(0, digest) for digest in reversed(names)]


def test_the_most_urgent_request_of_a_block_counts() -> None:
    policy = LRU(4)
    ledger = ledger_of(policy, FULL)
    cache(ledger, FULL, "patient", "xy", priority=1)
    cache(ledger, FULL, "usual", "uv")
    ledger.reserve(DECODE, Key("urgent", 1, 1), chain("xy"), 32, 32, 0.0, -1)
    assert {block.name[1]: block.priority for block in policy.blocks()} == {
        **dict.fromkeys(chain("xy"), -1),
        **dict.fromkeys(chain("uv"), 0),
    }


def test_who_computed_a_block_once_more_has_used_it() -> None:
    ledger = ledger_of(LRU(3), FULL)
    first, second = (ledger.reserve(DECODE, Key(name, 1, 1), chain("a"), 16, 16, 0.0) for name in ("first", "second"))
    for lease in (first, second):
        ledger.seal(DECODE, lease.key, 0, 0, chain("a"), 0.0)
    ledger.release(DECODE, first.key, 0.0)
    cache(ledger, FULL, "other", "x")
    ledger.release(DECODE, second.key, 0.0)
    assert evicted(ledger, 2) == [(0, digest) for digest in chain("x")]
