"""The life of a lease, and who may act on it."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequestError, StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import State, UnknownLeaseError
from tests.services.kvtransfer.kv_toolkit import DECODE, OTHER, PREFILL, Desk, chain

# ---- a lease's life


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
    lease = desk.reserve("r", "ab", 40)
    desk.seal(lease, "ab")
    desk.ledger.extend(DECODE, lease.key, 64, desk.now)
    assert desk.counts() == (4, 4, 0, 0)
    desk.ledger.release(DECODE, lease.key, desk.now)
    assert desk.counts() == (6, 0, 0, 2)


def test_handoff_of_no_blocks_succeeds() -> None:
    desk = Desk(2)
    lease = desk.filling("r", tokens=0)
    desk.ledger.fill(PREFILL, lease.key, 0, desk.now)
    adopted = desk.ledger.adopt(DECODE, lease.key, desk.now)
    desk.ledger.release(DECODE, adopted.key, desk.now)
    assert desk.counts() == (2, 0, 0, 0)
    assert not desk.leases()


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
    lease = desk.filling("r", "abc", 64)
    assert lease.filled_tokens == 32
    with pytest.raises(InvalidRequestError, match=r"within \[32, 64\]"):
        desk.ledger.fill(PREFILL, lease.key, filled, desk.now)
    assert lease.state is State.FILLING


def test_a_filled_lease_is_not_written_before_it_is_adopted() -> None:
    desk = Desk(8)
    lease = desk.filling("r", tokens=16)
    desk.ledger.fill(PREFILL, lease.key, 16, desk.now)
    for session in (DECODE, PREFILL):
        with pytest.raises(InvalidRequestError, match="adopt it first"):
            desk.ledger.extend(session, lease.key, 32, desk.now)


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
        assert not isinstance(caught.value, UnknownLeaseError)
    assert desk.counts() == (7, 0, 1, 0)


def test_the_newest_generation_does_not_help_a_stranger() -> None:
    desk = Desk(8)
    lease = desk.filling("r", tokens=16)
    for act in (
        lambda: desk.ledger.seal(OTHER, lease.key, 0, 0, chain("a"), desk.now),
        lambda: desk.ledger.fill(OTHER, lease.key, 16, desk.now),
        lambda: desk.ledger.renew(OTHER, lease.key, desk.now),
        lambda: desk.ledger.release(OTHER, lease.key, desk.now),
    ):
        with pytest.raises(StaleError, match="another worker"):
            act()
    assert lease.state is State.FILLING


def test_a_generation_that_was_never_made_is_unknown() -> None:
    desk = Desk(8)
    desk.reserve("r", tokens=16)
    with pytest.raises(UnknownLeaseError):
        desk.ledger.open(PREFILL, Key("r", 1, 2), desk.now)


def test_a_new_lease_needs_a_generation_above_all_before() -> None:
    desk = Desk(8)
    lease = desk.filling("r", tokens=16)
    desk.ledger.release(PREFILL, lease.key, desk.now)
    for generation in (1, 2):
        with pytest.raises(StaleError, match="generation 2 has been seen"):
            desk.reserve("r", tokens=16, generation=generation)
    assert desk.reserve("r", tokens=16, generation=3).state is State.RESERVED


def test_one_lease_for_each_attempt() -> None:
    desk = Desk(8)
    desk.reserve("r", tokens=16)
    with pytest.raises(StaleError):
        desk.reserve("r", tokens=16)
    with pytest.raises(InvalidRequestError, match="release it before"):
        desk.reserve("r", tokens=16, generation=2)
    desk.reserve("r", tokens=16, attempt=2)
    assert desk.counts() == (6, 2, 0, 0)


def test_a_late_release_does_not_end_a_newer_lease() -> None:
    desk = Desk(8)
    first = desk.reserve("r", tokens=16)
    desk.ledger.release(DECODE, first.key, desk.now)
    second = desk.reserve("r", tokens=16, generation=5)
    desk.ledger.release(DECODE, first.key, desk.now)
    assert desk.leases() == [second]
