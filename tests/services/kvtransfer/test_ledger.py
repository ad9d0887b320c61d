"""The ledger, one rule at a time."""

from __future__ import annotations

import pytest

from paceline.core.errors import BusyError, InvalidRequestError, StaleError
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.hold import State, UnknownHoldError
from paceline.services.kvtransfer.hold_book import GRACE_SECONDS
from tests.services.kvtransfer.kv_toolkit import DECODE, LEASE, OTHER, PREFILL, Desk, chain

# ---- a hold's life


def test_handoff_moves_ownership_and_no_block() -> None:
    desk = Desk(8)
    reserved = desk.reserve("r", "abc", 64)
    tables = [list(table) for table in reserved.tables]
    assert desk.counts() == (4, 4, 0, 0)

    opened = desk.ledger.open(PREFILL, Key("r", 1, 1), desk.now)
    assert (opened.key.generation, opened.state, opened.tables) == (2, State.FILLING, tables)
    assert desk.counts() == (4, 0, 4, 0)

    desk.seal(opened, "abc", PREFILL)
    filled = desk.ledger.fill(PREFILL, opened.key, 50, desk.now)
    assert (filled.state, filled.filled_tokens) == (State.FILLED, 50)
    assert desk.counts() == (4, 0, 4, 0)

    adopted = desk.ledger.adopt(DECODE, Key("r", 1, 2), desk.now)
    assert (adopted.key.generation, adopted.state, adopted.tables) == (3, State.ACTIVE, tables)
    assert desk.counts() == (4, 4, 0, 0)

    desk.ledger.release(DECODE, adopted.key, desk.now)
    assert desk.counts() == (5, 0, 0, 3)


def test_aggregated_worker_never_hands_over() -> None:
    desk = Desk(8)
    hold = desk.reserve("r", "ab", 40)
    desk.seal(hold, "ab")
    desk.ledger.extend(DECODE, hold.key, 64, desk.now)
    assert desk.counts() == (4, 4, 0, 0)
    desk.ledger.release(DECODE, hold.key, desk.now)
    assert desk.counts() == (6, 0, 0, 2)


def test_handoff_of_no_blocks_succeeds() -> None:
    desk = Desk(2)
    hold = desk.filling("r", tokens=0)
    desk.ledger.fill(PREFILL, hold.key, 0, desk.now)
    adopted = desk.ledger.adopt(DECODE, hold.key, desk.now)
    desk.ledger.release(DECODE, adopted.key, desk.now)
    assert desk.counts() == (2, 0, 0, 0)
    assert not desk.holds()


@pytest.mark.parametrize("step", ["open", "fill", "adopt"])
def test_each_step_needs_its_state(step: str) -> None:
    desk = Desk(4)
    key = desk.reserve("r", tokens=16).key
    if step == "open":
        key = desk.ledger.open(PREFILL, key, desk.now).key
        with pytest.raises(InvalidRequestError, match="only a reserved one"):
            desk.ledger.open(PREFILL, key, desk.now)
    elif step == "fill":
        with pytest.raises(InvalidRequestError, match="only an opened one"):
            desk.ledger.fill(DECODE, key, 16, desk.now)
    else:
        with pytest.raises(InvalidRequestError, match="only a filled one"):
            desk.ledger.adopt(DECODE, key, desk.now)
    assert desk.counts()[0] == 3


@pytest.mark.parametrize("filled", [31, 65])
def test_fill_must_lie_between_the_reused_prefix_and_the_reservation(filled: int) -> None:
    desk = Desk(8)
    desk.cache("warm", "ab")
    hold = desk.filling("r", "abc", 64)
    assert hold.filled_tokens == 32
    with pytest.raises(InvalidRequestError, match=r"within \[32, 64\]"):
        desk.ledger.fill(PREFILL, hold.key, filled, desk.now)
    assert hold.state is State.FILLING


def test_a_filled_hold_is_not_written_before_it_is_adopted() -> None:
    desk = Desk(8)
    hold = desk.filling("r", tokens=16)
    desk.ledger.fill(PREFILL, hold.key, 16, desk.now)
    for session in (DECODE, PREFILL):
        with pytest.raises(InvalidRequestError, match="adopt it first"):
            desk.ledger.extend(session, hold.key, 32, desk.now)


# ---- generations


def test_only_the_newest_generation_acts() -> None:
    desk = Desk(8)
    desk.filling("r", tokens=16)
    old = Key("r", 1, 1)
    for act in (
        lambda: desk.ledger.open(OTHER, old, desk.now),
        lambda: desk.ledger.seal(DECODE, old, 0, 0, chain("a"), desk.now),
        lambda: desk.ledger.fill(DECODE, old, 16, desk.now),
        lambda: desk.ledger.adopt(DECODE, old, desk.now),
        lambda: desk.ledger.extend(DECODE, old, 32, desk.now),
        lambda: desk.ledger.trim(DECODE, old, 0, 0, desk.now),
    ):
        with pytest.raises(StaleError, match="generation is 2 now") as caught:
            act()
        assert not isinstance(caught.value, UnknownHoldError)
    assert desk.counts() == (7, 0, 1, 0)


def test_the_newest_generation_does_not_help_a_stranger() -> None:
    desk = Desk(8)
    hold = desk.filling("r", tokens=16)
    for act in (
        lambda: desk.ledger.seal(OTHER, hold.key, 0, 0, chain("a"), desk.now),
        lambda: desk.ledger.fill(OTHER, hold.key, 16, desk.now),
        lambda: desk.ledger.renew(OTHER, hold.key, desk.now),
        lambda: desk.ledger.release(OTHER, hold.key, desk.now),
    ):
        with pytest.raises(StaleError, match="another worker"):
            act()
    assert hold.state is State.FILLING


def test_a_generation_that_was_never_made_is_unknown() -> None:
    desk = Desk(8)
    desk.reserve("r", tokens=16)
    with pytest.raises(UnknownHoldError):
        desk.ledger.open(PREFILL, Key("r", 1, 2), desk.now)


def test_a_new_hold_needs_a_generation_above_all_before() -> None:
    desk = Desk(8)
    hold = desk.filling("r", tokens=16)
    desk.ledger.release(PREFILL, hold.key, desk.now)
    for generation in (1, 2):
        with pytest.raises(StaleError, match="generation 2 has been seen"):
            desk.reserve("r", tokens=16, generation=generation)
    assert desk.reserve("r", tokens=16, generation=3).state is State.RESERVED


def test_one_hold_for_each_attempt() -> None:
    desk = Desk(8)
    desk.reserve("r", tokens=16)
    with pytest.raises(StaleError):
        desk.reserve("r", tokens=16)
    with pytest.raises(InvalidRequestError, match="release it before"):
        desk.reserve("r", tokens=16, generation=2)
    desk.reserve("r", tokens=16, attempt=2)
    assert desk.counts() == (6, 2, 0, 0)


def test_a_late_release_does_not_end_a_newer_hold() -> None:
    desk = Desk(8)
    first = desk.reserve("r", tokens=16)
    desk.ledger.release(DECODE, first.key, desk.now)
    second = desk.reserve("r", tokens=16, generation=5)
    desk.ledger.release(DECODE, first.key, desk.now)
    assert desk.holds() == [second]


# ---- release and quarantine


def test_releasing_twice_or_what_never_was_is_no_error() -> None:
    desk = Desk(4)
    hold = desk.reserve("r", tokens=16)
    for key in (hold.key, hold.key, Key("never", 1, 1)):
        desk.ledger.release(DECODE, key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("ending", ["fill", "release", "lease", "session"])
def test_blocks_of_a_cancelled_hold_wait_for_their_writer(ending: str, generation: int) -> None:
    desk = Desk(4)
    hold = desk.filling("r", "ab", 64)
    desk.ledger.seal(PREFILL, hold.key, 0, 0, chain("a"), desk.now)
    desk.ledger.release(DECODE, Key("r", 1, generation), desk.now)

    # Nothing may be reused, and nobody may act: not the writer, who learns that it is over, nor a newcomer.
    assert desk.counts() == (0, 0, 4, 0)
    with pytest.raises(BusyError):
        desk.reserve("next", tokens=16)
    for act in (
        lambda: desk.ledger.seal(PREFILL, hold.key, 0, 1, chain("ab")[1:], desk.now),
        lambda: desk.ledger.renew(PREFILL, hold.key, desk.now),
        lambda: desk.ledger.adopt(DECODE, hold.key, desk.now),
    ):
        with pytest.raises(UnknownHoldError):
            act()
    desk.ledger.release(DECODE, hold.key, desk.now)  # the owner again: it cannot speak for the writer
    assert desk.counts() == (0, 0, 4, 0)

    if ending == "fill":
        with pytest.raises(UnknownHoldError):
            desk.ledger.fill(PREFILL, hold.key, 32, desk.now)
    elif ending == "release":
        desk.ledger.release(PREFILL, hold.key, desk.now)
    elif ending == "lease":
        desk.ledger.expire(desk.now + LEASE)
    else:
        desk.ledger.lose_session(PREFILL, desk.now)
        assert desk.counts() == (0, 0, 4, 0)
        desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.counts() == (3, 0, 0, 1)


def test_release_of_what_is_filled_frees_at_once() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, hold.key, 32, desk.now)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_a_writer_that_gives_up_ends_the_hold() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.release(PREFILL, hold.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)
    with pytest.raises(UnknownHoldError):
        desk.ledger.renew(DECODE, Key("r", 1, 1), desk.now)


def test_a_writer_that_has_filled_has_nothing_left_to_release() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, hold.key, 32, desk.now)
    with pytest.raises(StaleError):
        desk.ledger.release(PREFILL, hold.key, desk.now)
    assert desk.ledger.adopt(DECODE, hold.key, desk.now).state is State.ACTIVE


def test_an_owner_may_cancel_with_the_generation_it_knows_until_somebody_else_adopts() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, hold.key, 32, desk.now)
    desk.ledger.adopt(OTHER, hold.key, desk.now)
    with pytest.raises(StaleError):
        desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    assert desk.counts() == (2, 2, 0, 0)
    desk.ledger.release(OTHER, Key("r", 1, 2), desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_a_new_hold_of_the_attempt_lives_beside_the_one_that_drains() -> None:
    desk = Desk(4)
    old = desk.filling("r", tokens=32)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    new = desk.reserve("r", tokens=32, generation=3)
    assert set(new.slots()).isdisjoint(old.slots())
    assert desk.counts() == (0, 2, 2, 0)
    desk.ledger.release(PREFILL, Key("r", 1, 2), desk.now)
    assert desk.counts() == (2, 2, 0, 0)


# ---- leases and lost workers


def test_expiry_finds_every_hold_that_is_due() -> None:
    desk = Desk(8)
    early = [desk.reserve(f"early{i}", tokens=16) for i in range(3)]
    desk.now += 1
    desk.ledger.renew(DECODE, early[0].key, desk.now)  # the first in every order is not due: the others still are
    assert desk.ledger.expire(early[1].deadline) == 2
    assert [hold.key.request_id for hold in desk.holds()] == ["early0"]
    assert desk.counts() == (7, 1, 0, 0)
    assert desk.ledger.expired_holds == 2


def test_an_expired_hold_is_unknown_before_any_sweep() -> None:
    desk = Desk(4)
    hold = desk.reserve("r", tokens=64)
    desk.now += LEASE
    with pytest.raises(UnknownHoldError):
        desk.ledger.renew(DECODE, hold.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


@pytest.mark.parametrize("act", ["renew", "open", "seal", "fill", "adopt", "extend", "trim"])
def test_every_valid_act_restarts_the_lease(act: str) -> None:
    desk = Desk(8, (16, 32))
    key = desk.reserve("r", tokens=32).key
    if act in ("fill", "adopt"):
        key = desk.ledger.open(PREFILL, key, desk.now).key
    if act == "adopt":
        desk.ledger.fill(PREFILL, key, 32, desk.now)
    desk.now += LEASE - 1
    ledger, now = desk.ledger, desk.now
    {
        "renew": lambda: ledger.renew(DECODE, key, now),
        "open": lambda: ledger.open(PREFILL, key, now),
        "seal": lambda: ledger.seal(DECODE, key, 0, 0, chain("a"), now),
        "fill": lambda: ledger.fill(PREFILL, key, 32, now),
        "adopt": lambda: ledger.adopt(DECODE, key, now),
        "extend": lambda: ledger.extend(DECODE, key, 48, now),
        "trim": lambda: ledger.trim(DECODE, key, 0, 1, now),
    }[act]()
    assert ledger.expire(now + LEASE - 0.5) == 0
    assert ledger.expire(now + LEASE) == 1


def test_a_refused_act_does_not_restart_the_lease() -> None:
    desk = Desk(8)
    hold = desk.reserve("r", tokens=32)
    desk.now += LEASE - 1
    for act in (
        lambda: desk.ledger.renew(OTHER, hold.key, desk.now),
        lambda: desk.ledger.seal(DECODE, hold.key, 0, 2, chain("a"), desk.now),
        lambda: desk.ledger.extend(DECODE, hold.key, 16 * 9, desk.now),
    ):
        with pytest.raises((StaleError, InvalidRequestError)):
            act()
    assert desk.ledger.expire(desk.now + 1) == 1


def test_the_owner_renews_while_prefill_writes() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=16)
    desk.now += LEASE - 1
    desk.ledger.renew(DECODE, Key("r", 1, 1), desk.now)
    assert hold.deadline == desk.now + LEASE


def test_a_lost_owners_blocks_come_back_after_a_grace() -> None:
    desk = Desk(4)
    hold = desk.reserve("r", "ab", 48)
    desk.ledger.seal(DECODE, hold.key, 0, 0, chain("a"), desk.now)
    desk.ledger.lose_session(DECODE, desk.now)
    with pytest.raises(UnknownHoldError):
        desk.ledger.renew(DECODE, hold.key, desk.now)
    # It may not have noticed: what it reads must not change under it either.
    assert desk.counts() == (1, 0, 3, 0)
    assert desk.ledger.expire(desk.now + GRACE_SECONDS / 2) == 0
    assert desk.ledger.expire(desk.now + GRACE_SECONDS) == 1
    assert desk.counts() == (3, 0, 0, 1)
    assert desk.ledger.expired_holds == 1


def test_a_lost_owner_leaves_the_blocks_to_a_writer_that_lives() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.lose_session(DECODE, desk.now)
    assert desk.ledger.expire(desk.now + GRACE_SECONDS) == 0
    assert desk.counts() == (2, 0, 2, 0)
    desk.ledger.lose_session(PREFILL, desk.now + GRACE_SECONDS)
    assert desk.ledger.expire(desk.now + 2 * GRACE_SECONDS) == 1
    assert desk.counts() == (4, 0, 0, 0)
    assert hold.state is State.DRAINING


def test_a_prefill_worker_lost_after_it_filled_harms_nothing() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, hold.key, 32, desk.now)
    desk.ledger.lose_session(PREFILL, desk.now)
    desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.ledger.adopt(DECODE, hold.key, desk.now).state is State.ACTIVE


# ---- room


def test_a_reservation_is_all_or_nothing_over_groups() -> None:
    desk = Desk(7, (64, 0), (16, 0))
    desk.reserve("a", tokens=16)
    before = desk.counts()
    assert before == (5, 2, 0, 0)
    with pytest.raises(BusyError, match="7 blocks are needed and 5 can be had"):
        desk.reserve("b", tokens=65)
    assert desk.counts() == before
    desk.reserve("b", tokens=64)
    assert desk.counts() == (0, 7, 0, 0)


def test_an_extension_is_all_or_nothing_over_groups() -> None:
    desk = Desk(7, (64, 0), (16, 0))
    hold = desk.reserve("a", tokens=16)
    other = desk.reserve("b", tokens=32)
    with pytest.raises(BusyError):
        desk.ledger.extend(DECODE, hold.key, 80, desk.now)
    assert [len(table) for table in hold.tables] == [1, 1]
    assert desk.counts() == (2, 5, 0, 0)
    desk.ledger.release(DECODE, other.key, desk.now)
    desk.ledger.extend(DECODE, hold.key, 80, desk.now)
    assert [len(table) for table in hold.tables] == [2, 5]
    assert desk.counts() == (0, 7, 0, 0)


def test_extending_to_less_changes_nothing() -> None:
    desk = Desk(4)
    hold = desk.reserve("r", tokens=40)
    desk.ledger.extend(DECODE, hold.key, 17, desk.now)
    assert (hold.token_count, desk.counts()) == (40, (1, 3, 0, 0))


def test_what_an_open_writer_adds_is_in_flight() -> None:
    desk = Desk(4)
    hold = desk.filling("r", tokens=16)
    desk.ledger.extend(PREFILL, hold.key, 32, desk.now)
    assert desk.counts() == (2, 0, 2, 0)


def test_more_than_the_arena_is_refused_for_ever() -> None:
    desk = Desk(4)
    with pytest.raises(InvalidRequestError, match=r"65 tokens take 5 blocks and the arena has 4.*--kv-memory"):
        desk.reserve("r", tokens=65)
    hold = desk.reserve("r", tokens=64)
    with pytest.raises(InvalidRequestError, match="the arena has 4"):
        desk.ledger.extend(DECODE, hold.key, (1 << 32) - 1, desk.now)
    assert desk.counts() == (0, 4, 0, 0)


def test_a_reservation_does_not_evict_what_it_reuses() -> None:
    desk = Desk(4)
    (old,), (kept,) = desk.cache("old", "ab"), desk.cache("kept", "xy")
    hold = desk.reserve("r", "xyz", 64)
    assert hold.tables[0][:2] == kept
    assert set(hold.tables[0][2:]) == set(old)


def test_what_a_reservation_reuses_is_no_room_for_it() -> None:
    desk = Desk(4)
    desk.cache("warm", "abc")
    desk.reserve("other", tokens=16)
    with pytest.raises(BusyError, match="2 blocks are needed and 1 can be had"):
        desk.reserve("r", "abxy")
    assert desk.counts() == (0, 1, 0, 3)
    assert desk.reserve("r", "abx").filled_tokens == 32


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


def test_a_shared_block_is_in_flight_while_any_hold_is() -> None:
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
    other = desk.reserve("other", tokens=32)  # evicts the originals
    desk.ledger.release(DECODE, second.key, desk.now)
    assert desk.counts() == (0, 2, 0, 2)
    assert desk.reserve("third", "ab").tables == second.tables
    desk.ledger.release(DECODE, other.key, desk.now)


def test_sealing_twice_is_no_error_unless_the_hash_differs() -> None:
    desk = Desk(4)
    hold = desk.reserve("r", "ab")
    desk.seal(hold, "ab")
    desk.seal(hold, "ab")
    with pytest.raises(InvalidRequestError, match="sealed with another hash"):
        desk.ledger.seal(DECODE, hold.key, 0, 0, chain("x"), desk.now)


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
    hold = desk.reserve("r", tokens=32)
    with pytest.raises(InvalidRequestError, match=message):
        desk.ledger.seal(DECODE, hold.key, group, first, hashes, desk.now)
    desk.ledger.release(DECODE, hold.key, desk.now)
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
    hold = desk.reserve("r", "abcd", 64)
    desk.ledger.seal(DECODE, hold.key, 0, 0, chain("a"), desk.now)
    kept = hold.tables[0][2:]
    for _ in range(2):
        desk.ledger.trim(DECODE, hold.key, 0, 2, desk.now)
    assert hold.tables[0] == [NO_SLOT, NO_SLOT, *kept]
    assert desk.counts() == (5, 2, 0, 1)
    with pytest.raises(InvalidRequestError, match="given back block 1"):
        desk.ledger.seal(DECODE, hold.key, 0, 1, chain("ab")[1:], desk.now)
    desk.ledger.release(DECODE, hold.key, desk.now)
    assert desk.counts() == (7, 0, 0, 1)


def test_a_prefill_worker_trims_what_is_in_flight() -> None:
    desk = Desk(8, (16, 32))
    hold = desk.filling("r", tokens=64)
    desk.ledger.trim(PREFILL, hold.key, 0, 1, desk.now)
    assert desk.counts() == (5, 0, 3, 0)


@pytest.mark.parametrize(("group", "kept", "message"), [(0, 1, "full attention"), (1, 5, "only 4"), (2, 1, "no group")])
def test_what_cannot_be_trimmed(group: int, kept: int, message: str) -> None:
    desk = Desk(16, (16, 0), (16, 32))
    hold = desk.reserve("r", tokens=64)
    with pytest.raises(InvalidRequestError, match=message):
        desk.ledger.trim(DECODE, hold.key, group, kept, desk.now)
    assert NO_SLOT not in hold.tables[0] + hold.tables[1]


def test_a_reused_prefix_takes_only_the_window() -> None:
    desk = Desk(16, (64, 0), (16, 40))
    desk.cache("warm", "abcdefgh")
    hold = desk.reserve("r", "abcdefgh", 144)
    assert hold.filled_tokens == 128
    assert hold.tables[1][:5] == [NO_SLOT] * 5
    # 2 + 3 reused, 1 + 1 fresh; 5 blocks behind the window stay cached.
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
    hold = desk.reserve("r", tokens=64)  # 5 blocks, as many as half of the context
    assert set(hold.slots()) == {wide[1], *narrow[4:]}
    assert desk.reserve("again", "abcd").filled_tokens == 64


def test_a_copys_children_go_before_its_original() -> None:
    desk = Desk(5)
    original = desk.reserve("original", "a")
    copy = desk.reserve("copy", "ab", cached=0)
    desk.seal(original, "a")
    desk.seal(copy, "ab")
    desk.ledger.release(DECODE, original.key, desk.now)
    desk.ledger.release(DECODE, copy.key, desk.now)
    hold = desk.reserve("r", tokens=64)
    assert copy.tables[0][1] in hold.tables[0]
    assert original.tables[0][0] not in hold.tables[0]


def test_referenced_blocks_are_never_evicted() -> None:
    desk = Desk(3)
    desk.cache("warm", "ab")
    hold = desk.reserve("r", "ab")
    with pytest.raises(BusyError):
        desk.reserve("other", tokens=32)
    assert desk.counts() == (1, 2, 0, 0)
    assert hold.filled_tokens == 32


# ---- what the world is told


def test_events_tell_what_can_be_reused() -> None:
    desk = Desk(3, (16, 0), (16, 0))
    (a,) = chain("a")
    hold = desk.reserve("r", "a")
    desk.ledger.seal(DECODE, hold.key, 0, 0, [a], desk.now)
    desk.ledger.seal(DECODE, hold.key, 0, 0, [a], desk.now)
    assert desk.ledger.take_events() == [("stored", 0, a)]
    desk.ledger.seal(DECODE, hold.key, 1, 0, [a], desk.now)
    desk.ledger.release(DECODE, hold.key, desk.now)
    assert desk.ledger.take_events() == [("stored", 1, a)]
    desk.reserve("next", tokens=16)
    assert desk.ledger.take_events() == [("removed", 1, a)]
    assert desk.ledger.take_events() == []


def test_prefix_hits_are_counted_when_a_reservation_succeeds() -> None:
    desk = Desk(4)
    desk.cache("warm", "ab")
    desk.reserve("r", "abx", cached=40)
    with pytest.raises(BusyError):
        desk.reserve("refused", "abxy")
    assert (desk.ledger.queried_tokens, desk.ledger.cached_tokens) == (2 * 16 + 3 * 16, 32)
