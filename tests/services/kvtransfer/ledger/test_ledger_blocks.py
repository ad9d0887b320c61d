"""Which blocks a lease gets, shares and gives back, and which blocks are evicted."""

from __future__ import annotations

import pytest

from paceline.core.context import Tail
from paceline.core.errors import BusyError, InvalidRequestError, StaleError
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, UnknownLeaseError
from paceline.services.kvtransfer.ledger.owners import Lookups
from tests.services.kvtransfer.kv_toolkit import DECODE, OTHER, PREFILL, Desk, chain

# ---- capacity


def test_a_reservation_is_all_or_nothing_over_groups() -> None:
    desk = Desk(7, (64, 0), (16, 0))
    desk.reserve("a", tokens=16)
    before = desk.counts()
    assert before == (5, 2, 0, 0)
    with pytest.raises(BusyError, match="7 blocks are needed and 5 are available"):
        desk.reserve("b", tokens=65)
    assert desk.counts() == before
    desk.reserve("b", tokens=64, generation=2)
    assert desk.counts() == (0, 7, 0, 0)


def test_an_extension_is_all_or_nothing_over_groups() -> None:
    desk = Desk(7, (64, 0), (16, 0))
    lease = desk.reserve("a", tokens=16)
    other = desk.reserve("b", tokens=32)
    with pytest.raises(BusyError):
        desk.ledger.extend(DECODE, lease.key, 80, desk.now)
    assert [len(table) for table in lease.tables] == [1, 1]
    assert desk.counts() == (2, 5, 0, 0)
    desk.ledger.release(DECODE, other.key, desk.now)
    desk.ledger.extend(DECODE, lease.key, 80, desk.now)
    assert [len(table) for table in lease.tables] == [2, 5]
    assert desk.counts() == (0, 7, 0, 0)


def test_extending_to_less_changes_nothing() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", tokens=40)
    desk.ledger.extend(DECODE, lease.key, 17, desk.now)
    assert (lease.token_count, desk.counts()) == (40, (1, 3, 0, 0))


def test_what_an_open_writer_adds_is_in_flight() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=16)
    desk.ledger.extend(PREFILL, lease.key, 32, desk.now)
    assert desk.counts() == (2, 0, 2, 0)


def test_more_than_the_arena_is_refused_for_ever() -> None:
    desk = Desk(4)
    with pytest.raises(InvalidRequestError, match=r"65 tokens take 5 blocks and the arena has 4.*--kv-memory"):
        desk.reserve("r", tokens=65)
    lease = desk.reserve("r", tokens=64)
    with pytest.raises(InvalidRequestError, match="the arena has 4"):
        desk.ledger.extend(DECODE, lease.key, (1 << 32) - 1, desk.now)
    assert desk.counts() == (0, 4, 0, 0)


def test_a_reservation_does_not_evict_what_it_reuses() -> None:
    desk = Desk(4)
    (old,), (kept,) = desk.cache("old", "ab"), desk.cache("kept", "xy")
    lease = desk.reserve("r", "xyz", 64)
    assert lease.tables[0][:2] == kept
    assert set(lease.tables[0][2:]) == set(old)


def test_what_a_reservation_reuses_is_no_room_for_it() -> None:
    desk = Desk(4)
    desk.cache("warm", "abc")
    desk.reserve("other", tokens=16)
    with pytest.raises(BusyError, match="2 blocks are needed and 1 are available"):
        desk.reserve("r", "abxy")
    assert desk.counts() == (0, 1, 0, 3)
    assert desk.reserve("r", "abx", generation=2).filled_tokens == 32


# ---- sealing and sharing


def test_sealed_blocks_are_shared() -> None:
    desk = Desk(8)
    first = desk.reserve("first", "ab", 48)
    desk.seal(first, "ab")
    second = desk.reserve("second", "abc", 64)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.filled_tokens == 32
    assert desk.counts() == (3, 5, 0, 0)
    desk.ledger.release(DECODE, first.key, desk.now)
    assert desk.counts() == (4, 4, 0, 0)
    desk.ledger.release(DECODE, second.key, desk.now)
    assert desk.counts() == (6, 0, 0, 2)


def test_a_shared_block_is_in_flight_while_any_lease_is() -> None:
    desk = Desk(8)
    desk.cache("warm", "ab")
    flying = desk.filling("flying", "ab")
    desk.reserve("held", "ab")
    assert desk.counts() == (6, 0, 2, 0)
    desk.ledger.release(PREFILL, flying.key, desk.now)
    assert desk.counts() == (6, 2, 0, 0)


def test_the_second_block_of_equal_content_stays_private() -> None:
    desk = Desk(8)
    first, second = desk.reserve("first", "ab"), desk.reserve("second", "ab")
    desk.seal(first, "ab")
    desk.seal(second, "ab")
    assert desk.reserve("third", "ab").tables == first.tables
    desk.ledger.release(DECODE, second.key, desk.now)
    assert desk.counts() == (6, 2, 0, 0)


def test_a_private_copy_takes_the_place_of_an_evicted_original() -> None:
    desk = Desk(4)
    first, second = desk.reserve("first", "ab"), desk.reserve("second", "ab")
    desk.seal(first, "ab")
    desk.seal(second, "ab")
    desk.ledger.release(DECODE, first.key, desk.now)
    other = desk.reserve("other", tokens=32)  # evicts the first lease's blocks
    desk.ledger.release(DECODE, second.key, desk.now)
    assert desk.counts() == (0, 2, 0, 2)
    assert desk.reserve("third", "ab").tables == second.tables
    desk.ledger.release(DECODE, other.key, desk.now)


def test_sealing_twice_is_no_error_unless_the_hash_differs() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", "ab")
    desk.seal(lease, "ab")
    desk.seal(lease, "ab")
    with pytest.raises(InvalidRequestError, match="sealed with another hash"):
        desk.ledger.seal(DECODE, lease.key, 0, 0, chain("x"), desk.now)


@pytest.mark.parametrize(
    ("group", "first", "hashes", "message"),
    [
        (0, 2, chain("a"), r"has 2 blocks in group 0: \[2, 3\)"),
        (0, 1, chain("ab"), r"\[1, 3\) cannot be sealed"),
        (0, (1 << 32) - 1, chain("a"), "cannot be sealed"),
        (0, 0, [b"short"], "16 bytes"),
        (0, 0, [b""], "16 bytes"),
        (1, 0, chain("a"), "there is no group 1"),
    ],
)
def test_what_cannot_be_sealed(group: int, first: int, hashes: list[bytes], message: str) -> None:
    desk = Desk(4)
    lease = desk.reserve("r", tokens=32)
    with pytest.raises(InvalidRequestError, match=message):
        desk.ledger.seal(DECODE, lease.key, group, first, hashes, desk.now)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


@pytest.mark.parametrize(("hashes", "message"), [([b"x" * 15], "16 bytes"), (chain("abc"), "cover more")])
def test_what_cannot_be_reserved(hashes: list[bytes], message: str) -> None:
    desk = Desk(4)
    with pytest.raises(InvalidRequestError, match=message):
        desk.ledger.reserve(DECODE, Key("r", 1, 1), hashes, 32, 32, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


# ---- windows


def test_trim_gives_back_what_is_behind_the_window() -> None:
    desk = Desk(8, (16, 32))
    lease = desk.reserve("r", "abcd", 64)
    desk.ledger.seal(DECODE, lease.key, 0, 0, chain("a"), desk.now)
    kept = lease.tables[0][2:]
    for _ in range(2):
        desk.ledger.trim(DECODE, lease.key, 0, 2, desk.now)
    assert lease.tables[0] == [NO_SLOT, NO_SLOT, *kept]
    assert desk.counts() == (5, 2, 0, 1)
    with pytest.raises(InvalidRequestError, match="given back block 1"):
        desk.ledger.seal(DECODE, lease.key, 0, 1, chain("ab")[1:], desk.now)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.counts() == (7, 0, 0, 1)


def test_a_prefill_worker_trims_what_is_in_flight() -> None:
    desk = Desk(8, (16, 32))
    lease = desk.filling("r", tokens=64)
    desk.ledger.trim(PREFILL, lease.key, 0, 1, desk.now)
    assert desk.counts() == (5, 0, 3, 0)


@pytest.mark.parametrize(("group", "kept", "message"), [(0, 1, "full attention"), (1, 5, "only 4"), (2, 1, "no group")])
def test_what_cannot_be_trimmed(group: int, kept: int, message: str) -> None:
    desk = Desk(16, (16, 0), (16, 32))
    lease = desk.reserve("r", tokens=64)
    with pytest.raises(InvalidRequestError, match=message):
        desk.ledger.trim(DECODE, lease.key, group, kept, desk.now)
    assert NO_SLOT not in lease.tables[0] + lease.tables[1]


def test_a_reused_prefix_takes_only_the_window() -> None:
    desk = Desk(16, (64, 0), (16, 40))
    desk.cache("warm", "abcdefgh")
    lease = desk.reserve("r", "abcdefgh", 144)
    assert lease.filled_tokens == 128
    assert lease.tables[1][:5] == [NO_SLOT] * 5
    # 2 + 3 blocks are reused, 1 + 1 are fresh. 5 blocks outside the window stay cached.
    assert desk.counts() == (4, 7, 0, 5)


# ---- eviction


def test_least_recently_used_goes_first() -> None:
    desk = Desk(4)
    (a,), (b,) = desk.cache("a", "a"), desk.cache("b", "b")
    desk.ledger.release(DECODE, desk.reserve("again", "a").key, desk.now)
    taken = desk.reserve("r", tokens=48)
    assert set(b) < set(taken.tables[0])
    assert set(a).isdisjoint(taken.tables[0])
    assert desk.ledger.evicted_blocks == 1


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    desk = Desk(4)
    ((a, b, c, d),) = desk.cache("warm", "abcd")
    assert desk.reserve("one", tokens=16).tables == [[d]]
    assert desk.reserve("two", tokens=16).tables == [[c]]
    assert desk.reserve("again", "abcd"[:2]).tables == [[a, b]]


def test_blocks_of_all_groups_go_from_the_tail() -> None:
    desk = Desk(10, (64, 0), (16, 0))
    wide, narrow = desk.cache("warm", "abcdefgh")
    lease = desk.reserve("r", tokens=64)  # 5 blocks, as many as half of the context has
    assert set(lease.slots()) == {wide[1], *narrow[4:]}
    assert desk.reserve("again", "abcd").filled_tokens == 64


def test_a_copys_children_go_before_its_original() -> None:
    desk = Desk(5)
    original = desk.reserve("original", "a")
    copy = desk.reserve("copy", "ab", cached=0)
    desk.seal(original, "a")
    desk.seal(copy, "ab")
    desk.ledger.release(DECODE, original.key, desk.now)
    desk.ledger.release(DECODE, copy.key, desk.now)
    lease = desk.reserve("r", tokens=64)
    assert copy.tables[0][1] in lease.tables[0]
    assert original.tables[0][0] not in lease.tables[0]


def test_referenced_blocks_are_never_evicted() -> None:
    desk = Desk(3)
    desk.cache("warm", "ab")
    lease = desk.reserve("r", "ab")
    with pytest.raises(BusyError):
        desk.reserve("other", tokens=32)
    assert desk.counts() == (1, 2, 0, 0)
    assert lease.filled_tokens == 32


def test_what_is_pinned_is_cached_blocks_alone() -> None:
    desk = Desk(4)
    tables = desk.cache("warm", "ab")
    for name, context, found in (("x", "abc", tables), ("y", "z", [[]])):
        lease = desk.ledger.pin(TRANSFER, Key(name, 1, 1), chain(context), desk.now)
        assert lease.tables == found
        assert lease.filled_tokens == lease.token_count == 16 * len(found[0])
    assert desk.counts() == (2, 2, 0, 0)
    with pytest.raises(BusyError):
        desk.reserve("other", tokens=16 * 3)
    desk.ledger.release(TRANSFER, Key("x", 1, 1), desk.now)
    assert desk.counts() == (2, 0, 0, 2)


# ---- forgetting


def test_cached_blocks_are_forgotten_and_blocks_in_use_stay() -> None:
    desk = Desk(8)
    desk.cache("old", "abc")
    desk.cache("other", "xy")
    desk.reserve("r", "abq", cached=32)
    assert desk.counts() == (2, 3, 0, 3)
    desk.ledger.take_events()
    assert desk.ledger.forget() == 3
    assert desk.counts() == (5, 3, 0, 0)
    removed = {("removed", 0, digest) for digest in (chain("abc")[2], *chain("xy"))}
    assert set(desk.ledger.take_events()) == removed
    assert desk.reserve("again", "abc").filled_tokens == 32
    assert desk.ledger.evicted_blocks == 0


# ---- events


def test_events_tell_what_can_be_reused() -> None:
    desk = Desk(3, (16, 0), (16, 0))
    (a,) = chain("a")
    lease = desk.reserve("r", "a")
    desk.ledger.seal(DECODE, lease.key, 0, 0, [a], desk.now)
    desk.ledger.seal(DECODE, lease.key, 0, 0, [a], desk.now)
    assert desk.ledger.take_events() == [("stored", 0, a)]
    desk.ledger.seal(DECODE, lease.key, 1, 0, [a], desk.now)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.ledger.take_events() == [("stored", 1, a)]
    desk.reserve("next", tokens=16)
    assert desk.ledger.take_events() == [("removed", 1, a)]
    assert desk.ledger.take_events() == []
    assert desk.ledger.event_count == 3
    assert desk.ledger.reusable() == [[a], []]


def test_prefix_hits_are_counted_when_a_reservation_succeeds() -> None:
    desk = Desk(4)
    desk.cache("warm", "ab")
    desk.reserve("r", "abx", cached=40)
    with pytest.raises(BusyError):
        desk.reserve("refused", "abxy")
    assert desk.ledger.lookups == {False: Lookups(2 * 16 + 3 * 16, 32), True: Lookups()}


STATES = (64, 0), (128, 2)
TAIL = Tail(137, b"t" * 16)


def ended(desk: Desk, request: str) -> list[list[int]]:
    """Let a request end after TAIL. Return its block tables."""
    lease = desk.reserve(request, "abcdefgh", 150, cached=0)
    tables = [list(table) for table in lease.tables]
    desk.seal(lease, "abcdefgh")
    desk.ledger.keep(DECODE, lease.key, TAIL, desk.now)
    return tables


def next_turn(desk: Desk, request: str, cached: int = 1 << 20) -> Lease:
    return desk.ledger.reserve(DECODE, Key(request, 1, 1), chain("abcdefghi"), 200, cached, desk.now, tails=[TAIL])


def test_the_next_turn_goes_on_in_the_blocks_at_the_end_of_the_last_one() -> None:
    desk = Desk(20, *STATES)
    full, states = ended(desk, "first")
    # They are cached before the lease has ended, because the next turn may come first.
    lease = next_turn(desk, "next")
    assert (lease.filled_tokens, lease.context_hash) == (137, TAIL.name)
    assert lease.tables[0][:3] == full[:3]
    assert lease.tables[1] == [NO_SLOT, states[1]]
    # Nobody finds them any more, because the next turn writes to them.
    assert (desk.ledger.names(lease)[0][2], desk.ledger.names(lease)[1][1]) == (b"", b"")
    desk.counts()
    # A third request finds only full blocks..
    other = next_turn(desk, "other")
    assert other.filled_tokens == 128
    for each in (lease, other):
        desk.ledger.release(DECODE, each.key, desk.now)
    assert desk.counts()[1:3] == (3, 0)  # the first lease still has its full blocks


def test_a_tail_that_cannot_be_reused_whole_is_left_alone() -> None:
    desk = Desk(20, *STATES)
    ended(desk, "first")
    assert next_turn(desk, "next", cached=136).filled_tokens == 128
    lease = desk.ledger.reserve(DECODE, Key("pin", 1, 1), [], 16, 0, desk.now)
    assert lease.filled_tokens == 0
    assert next_turn(desk, "again").filled_tokens == 137


def test_copies_at_a_tail_are_found_while_their_request_writes_on_in_its_own_blocks() -> None:
    desk = Desk(20, *STATES)
    lease, copies = desk.reserve("first", "abcdefgh", 150, cached=0), desk.reserve("copies", tokens=1)
    own, copied = ([list(table) for table in each.tables] for each in (lease, copies))
    desk.seal(lease, "abcdefgh")
    desk.ledger.keep(DECODE, lease.key, TAIL, desk.now, copies.key)
    desk.ledger.release(DECODE, copies.key, desk.now)
    assert desk.ledger.find(lease.key, desk.now).tables == own
    # The policy knows what the copies need: the attention before them, and the state the attention at the tail.
    places = {block.name: block.parent for block in desk.ledger.blocks() if block.name[1] == TAIL.name}
    assert places == {(0, TAIL.name): (0, chain("abcdefgh")[-1]), (1, TAIL.name): (0, TAIL.name)}
    found = next_turn(desk, "next")
    assert found.filled_tokens == 137
    assert [table[-1] for table in (found.tables[0][:3], found.tables[1])] == [slot for (slot,) in copied]
    for key in (lease.key, found.key):
        desk.ledger.release(DECODE, key, desk.now)
    assert desk.counts()[1:3] == (0, 0)


def test_copies_that_are_not_the_caller_s_are_not_kept() -> None:
    desk = Desk(20, *STATES, encoding_tokens=16)
    lease = desk.reserve("first", "abcdefgh", 150, cached=0)
    others = desk.reserve("other's", tokens=1, session=OTHER)
    encoding = desk.reserve("encoding", "", 16, encoding=True)
    before = desk.counts()
    for copies, error in ((others, StaleError), (encoding, InvalidRequestError), (lease, InvalidRequestError)):
        with pytest.raises(error):
            desk.ledger.keep(DECODE, lease.key, TAIL, desk.now, copies.key)
    with pytest.raises(UnknownLeaseError):
        desk.ledger.keep(DECODE, lease.key, TAIL, desk.now, Key("unknown", 1, 1))
    with pytest.raises(StaleError):
        desk.ledger.keep(OTHER, lease.key, TAIL, desk.now, others.key)
    assert desk.counts() == before
    assert list(desk.ledger.blocks()) == []


def test_blocks_that_are_not_there_are_not_kept() -> None:
    desk = Desk(20, *STATES)
    lease = desk.reserve("first", "abcdefgh", 128, cached=0)
    with pytest.raises(InvalidRequestError, match="cannot be sealed"):
        desk.ledger.keep(DECODE, lease.key, TAIL, desk.now)
    assert desk.ledger.cached() == []
    assert desk.counts()[1] == len(lease.slots())
