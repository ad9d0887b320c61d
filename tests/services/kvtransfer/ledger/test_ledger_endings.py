"""How leases end: by release, by deadline, or with a lost worker. Blocks drain until no worker can write to them."""

from __future__ import annotations

import math

import pytest

from paceline.core.errors import BusyError, InvalidRequestError, StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import State, UnknownLeaseError
from paceline.services.kvtransfer.ledger.lease_book import GRACE_SECONDS
from tests.services.kvtransfer.kv_toolkit import DECODE, LEASE, OTHER, PREFILL, Desk, chain

# ---- release and draining


def test_releasing_twice_or_what_never_was_is_no_error() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", tokens=16)
    for key in (lease.key, lease.key, Key("never", 1, 1)):
        desk.ledger.release(DECODE, key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("ending", ["fill", "release", "session"])
def test_blocks_of_a_cancelled_lease_wait_for_their_writer(ending: str, generation: int) -> None:
    desk = Desk(4)
    lease = desk.filling("r", "ab", 64)
    desk.ledger.seal(PREFILL, lease.key, 0, 0, chain("a"), desk.now)
    desk.ledger.release(DECODE, Key("r", 1, generation), desk.now)

    # Nothing may be reused, and nobody may act: neither the writer, which learns that the lease is over, nor a new
    # request.
    assert desk.counts() == (0, 0, 4, 0)
    with pytest.raises(BusyError):
        desk.reserve("next", tokens=16)
    for act in (
        lambda: desk.ledger.seal(DECODE, lease.key, 0, 1, chain("ab")[1:], desk.now),
        lambda: desk.ledger.renew(PREFILL, lease.key, desk.now),
        lambda: desk.ledger.adopt(DECODE, lease.key, desk.now),
    ):
        with pytest.raises(UnknownLeaseError):
            act()
    desk.ledger.release(DECODE, lease.key, desk.now)  # the owner again, which cannot release for the writer
    assert desk.counts() == (0, 0, 4, 0)

    if ending == "fill":
        with pytest.raises(UnknownLeaseError):
            desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    elif ending == "release":
        desk.ledger.release(PREFILL, lease.key, desk.now)
    else:
        desk.ledger.expire(desk.now + 100 * LEASE)  # a deadline does not free blocks to which a live worker may write
        desk.ledger.lose_session(PREFILL, desk.now)
        assert desk.counts() == (0, 0, 4, 0)
        desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.counts() == (3, 0, 0, 1)


@pytest.mark.parametrize("ending", ["release", "deadline"])
def test_what_a_writer_seals_while_its_lease_drains_is_cached(ending: str) -> None:
    desk = Desk(4)
    lease = desk.filling("r", "ab", 64)
    desk.ledger.seal(PREFILL, lease.key, 0, 0, chain("a"), desk.now)
    if ending == "release":  # by a decode worker whose request ended with the first token
        desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    else:
        desk.now += LEASE
    sealed = desk.ledger.seal(PREFILL, lease.key, 0, 1, chain("ab")[1:], desk.now)
    assert (sealed.state, sealed.deadline) == (State.DRAINING, math.inf)
    assert desk.counts() == (0, 0, 4, 0)
    desk.ledger.release(PREFILL, lease.key, desk.now)
    assert desk.counts() == (2, 0, 0, 2)
    assert desk.ledger.check() == []


def test_release_of_what_is_filled_frees_at_once() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_a_writer_that_gives_up_ends_the_lease() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.release(PREFILL, lease.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)
    with pytest.raises(UnknownLeaseError):
        desk.ledger.renew(DECODE, Key("r", 1, 1), desk.now)


def test_a_writer_that_has_filled_has_nothing_left_to_release() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    with pytest.raises(StaleError):
        desk.ledger.release(PREFILL, lease.key, desk.now)
    assert desk.ledger.adopt(DECODE, lease.key, desk.now).state is State.ACTIVE


def test_an_owner_may_cancel_with_the_generation_it_knows_until_somebody_else_adopts() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    desk.ledger.adopt(OTHER, lease.key, desk.now)
    with pytest.raises(StaleError):
        desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    assert desk.counts() == (2, 2, 0, 0)
    desk.ledger.release(OTHER, Key("r", 1, 2), desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_a_new_lease_of_the_attempt_lives_beside_the_one_that_drains() -> None:
    desk = Desk(4)
    old = desk.filling("r", tokens=32)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    new = desk.reserve("r", tokens=32, generation=3)
    assert set(new.slots()).isdisjoint(old.slots())
    assert desk.counts() == (0, 2, 2, 0)
    desk.ledger.release(PREFILL, Key("r", 1, 2), desk.now)
    assert desk.counts() == (2, 2, 0, 0)


# ---- deadlines and lost workers


def test_expiry_finds_every_lease_that_is_due() -> None:
    desk = Desk(8)
    early = [desk.reserve(f"early{i}", tokens=16) for i in range(3)]
    desk.now += 1
    desk.ledger.renew(DECODE, early[0].key, desk.now)  # the oldest lease is not due, but the other two still are
    desk.ledger.expire(early[1].deadline)
    assert [key.request_id for key in desk.ledger.take_overdue()] == ["early1", "early2"]
    assert desk.ledger.take_overdue() == []
    assert desk.ledger.expired_leases == 2
    assert desk.counts() == (5, 1, 2, 0)


@pytest.mark.parametrize("ending", ["release", "session"])
@pytest.mark.parametrize("opened", [False, True])
def test_blocks_whose_lease_ended_wait_for_the_worker_that_may_not_know(opened: bool, ending: str) -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32) if opened else desk.reserve("r", tokens=32)
    writer = PREFILL if opened else DECODE
    desk.ledger.expire(desk.now + LEASE)
    assert desk.counts() == (2, 0, 2, 0)
    with pytest.raises(UnknownLeaseError):
        desk.ledger.renew(writer, lease.key, desk.now + LEASE)
    desk.ledger.release(OTHER, lease.key, desk.now + LEASE)  # another worker cannot release for the writer
    assert desk.counts() == (2, 0, 2, 0)
    if ending == "release":
        desk.ledger.release(writer, lease.key, desk.now + LEASE)
    else:
        desk.ledger.lose_session(writer, desk.now + LEASE)
        desk.ledger.expire(desk.now + LEASE + GRACE_SECONDS)
    assert desk.counts() == (4, 0, 0, 0)


def test_what_is_filled_and_not_adopted_in_time_is_free_at_once() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    desk.ledger.expire(desk.now + LEASE)
    assert desk.counts() == (4, 0, 0, 0)


def test_an_expired_lease_is_unknown_before_any_sweep() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", tokens=64)
    desk.now += LEASE
    with pytest.raises(UnknownLeaseError):
        desk.ledger.renew(DECODE, lease.key, desk.now)
    assert desk.counts() == (0, 0, 4, 0)


def test_a_release_that_finds_the_lease_over_before_any_sweep_frees_the_blocks() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", tokens=64)
    desk.now += LEASE
    desk.ledger.release(DECODE, lease.key, desk.now)
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
    ledger.expire(now + LEASE - 0.5)
    assert ledger.expired_leases == 0
    ledger.expire(now + LEASE)
    assert ledger.expired_leases == 1


def test_a_refused_act_does_not_restart_the_lease() -> None:
    desk = Desk(8)
    lease = desk.reserve("r", tokens=32)
    desk.now += LEASE - 1
    for act in (
        lambda: desk.ledger.renew(OTHER, lease.key, desk.now),
        lambda: desk.ledger.seal(DECODE, lease.key, 0, 2, chain("a"), desk.now),
        lambda: desk.ledger.extend(DECODE, lease.key, 16 * 9, desk.now),
    ):
        with pytest.raises((StaleError, InvalidRequestError)):
            act()
    desk.ledger.expire(desk.now + 1)
    assert desk.ledger.expired_leases == 1


def test_the_owner_renews_while_prefill_writes() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=16)
    desk.now += LEASE - 1
    desk.ledger.renew(DECODE, Key("r", 1, 1), desk.now)
    assert lease.deadline == desk.now + LEASE


def test_a_lost_owners_blocks_come_back_after_a_grace() -> None:
    desk = Desk(4)
    lease = desk.reserve("r", "ab", 48)
    desk.ledger.seal(DECODE, lease.key, 0, 0, chain("a"), desk.now)
    desk.ledger.lose_session(DECODE, desk.now)
    with pytest.raises(UnknownLeaseError):
        desk.ledger.renew(DECODE, lease.key, desk.now)
    # The worker may not have noticed, so the blocks that it reads must not change either.
    assert desk.counts() == (1, 0, 3, 0)
    desk.ledger.expire(desk.now + GRACE_SECONDS / 2)
    assert desk.counts() == (1, 0, 3, 0)
    desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.counts() == (3, 0, 0, 1)
    assert desk.ledger.expired_leases == 1


def test_a_lost_owner_leaves_the_blocks_to_a_writer_that_lives() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.lose_session(DECODE, desk.now)
    desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.counts() == (2, 0, 2, 0)
    desk.ledger.lose_session(PREFILL, desk.now + GRACE_SECONDS)
    desk.ledger.expire(desk.now + 2 * GRACE_SECONDS)
    assert desk.counts() == (4, 0, 0, 0)
    assert lease.state is State.DRAINING


def test_a_prefill_worker_lost_after_it_filled_harms_nothing() -> None:
    desk = Desk(4)
    lease = desk.filling("r", tokens=32)
    desk.ledger.fill(PREFILL, lease.key, 32, desk.now)
    desk.ledger.lose_session(PREFILL, desk.now)
    desk.ledger.expire(desk.now + GRACE_SECONDS)
    assert desk.ledger.adopt(DECODE, lease.key, desk.now).state is State.ACTIVE


# ---- late and repeated messages; found by tests/proof


def test_a_reservation_that_comes_behind_its_release_makes_no_lease() -> None:
    """Events: deliver release r/1/1, arrive reserve r/1/1, a lease's time passes. The lease then drained for ever."""
    desk = Desk(4)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now)
    with pytest.raises(StaleError, match="too old for a new lease"):
        desk.reserve("r", tokens=16)
    assert desk.reserve("r", tokens=16, generation=2).key == Key("r", 1, 2)


def test_who_gave_a_lease_back_before_it_was_opened_does_not_become_its_writer() -> None:
    """Events: deliver release r/1/2 by prefill, arrive open r/1/1, release r/1/1 by decode. It drained for ever."""
    desk = Desk(4)
    lease = desk.reserve("r", tokens=16)
    desk.ledger.release(PREFILL, Key("r", 1, 2), desk.now)
    with pytest.raises(StaleError, match="given back before"):
        desk.ledger.open(PREFILL, lease.key, desk.now)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_who_gave_a_lease_back_before_it_was_adopted_does_not_become_its_owner() -> None:
    desk = Desk(4)
    lease = desk.ledger.fill(PREFILL, desk.filling("r", tokens=16).key, 16, desk.now)
    desk.ledger.release(DECODE, Key("r", 1, 3), desk.now)
    with pytest.raises(StaleError, match="given back before"):
        desk.ledger.adopt(DECODE, lease.key, desk.now)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.counts() == (4, 0, 0, 0)


def test_who_never_heard_that_it_had_adopted_ends_what_drains_with_its_reservation() -> None:
    """Events: adopt r/1/1 (answer lost), a lease's time passes, deliver release r/1/1. It drained for ever."""
    desk = Desk(4)
    lease = desk.ledger.fill(PREFILL, desk.filling("r", tokens=16).key, 16, desk.now)
    desk.ledger.adopt(DECODE, lease.key, desk.now)
    desk.ledger.expire(desk.now + LEASE)
    assert desk.counts() == (3, 0, 1, 0)
    desk.ledger.release(PREFILL, Key("r", 1, 2), desk.now + LEASE)
    assert desk.counts() == (3, 0, 1, 0)
    desk.ledger.release(DECODE, Key("r", 1, 1), desk.now + LEASE)
    assert desk.counts() == (4, 0, 0, 0)


def test_a_reservation_that_was_refused_for_want_of_blocks_is_refused_when_it_comes_again() -> None:
    """Events: reserve 1.1/2/1 (busy), others release, it arrives again, a lease's time passes. It drained for ever."""
    desk = Desk(1)
    other = desk.reserve("other", tokens=16)
    with pytest.raises(BusyError):
        desk.reserve("r", tokens=16)
    desk.ledger.release(DECODE, other.key, desk.now)
    with pytest.raises(StaleError, match="too old for a new lease"):
        desk.reserve("r", tokens=16)
    assert desk.reserve("r", tokens=16, generation=2).key == Key("r", 1, 2)
