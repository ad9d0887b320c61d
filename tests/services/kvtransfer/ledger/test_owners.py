"""The leases that a ledger shows account for every block."""

from __future__ import annotations

import pytest

from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.owners import count_owners, describe_leases
from tests.services.kvtransfer.kv_toolkit import DECODE, PREFILL, Desk

WORKERS = {DECODE: "decode-0", PREFILL: "prefill-0"}


def describe(desk: Desk, most: int = 0) -> pb.LedgerReply:
    return describe_leases(desk.leases(), WORKERS, most, desk.now)


def owned(reply: pb.LedgerReply) -> int:
    return sum(lease.blocks - lease.shared_blocks for lease in reply.leases) + reply.blocks_left_out


def desk_with_leases() -> Desk:
    """Return a ledger with leases of 10, 10, 4 and 4 blocks. The first two share 4 blocks, and the third shares 2 of
    them.
    """
    desk = Desk(60, (16, 0), (16, 32))
    desk.cache("before", "abcd")
    for request, context, tokens in (("1", "abcd", 80), ("2", "abcd", 80), ("3", "ab", 32)):
        desk.reserve(request, context, tokens)
        desk.now += 1
    desk.filling("4", tokens=32)
    desk.now += 1
    return desk


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 5])
def test_the_sum_of_what_is_shown_and_left_out_is_what_the_ledger_counts(most: int) -> None:
    desk = desk_with_leases()
    free, held, in_flight, cached = desk.counts()
    reply = describe(desk, most)
    assert len(reply.leases) == (min(most, 4) if most else 4)
    assert reply.leases_left_out == 4 - len(reply.leases)
    assert owned(reply) == held + in_flight == 60 - free - cached
    assert sum(lease.shared_blocks for lease in describe(desk).leases) > 0


def test_the_oldest_come_first_and_own_what_they_share() -> None:
    reply = describe(desk_with_leases())
    assert [(lease.key.request_id, lease.age_ms) for lease in reply.leases] == [
        ("1", 4000),
        ("2", 3000),
        ("3", 2000),
        ("4", 1000),
    ]
    assert reply.leases[0].shared_blocks == 0 < reply.leases[1].shared_blocks
    last = reply.leases[3]
    assert (last.state, last.owner, last.writer, last.blocks) == ("filling", "decode-0", "prefill-0", 4)


def test_blocks_are_shown_by_group_without_those_given_back() -> None:
    desk = Desk(40, (16, 0), (16, 32))
    lease = desk.reserve("r", tokens=96)
    desk.ledger.trim(DECODE, lease.key, 1, 4, desk.now)
    (shown,) = describe(desk).leases
    names = [group.shape.name for group in desk.layout.groups]
    assert dict(shown.blocks_by_group) == dict(zip(names, (6, 2)))
    assert (shown.blocks, shown.token_count) == (8, 96)


def test_who_is_gone_is_said_to_be() -> None:
    desk = Desk(8)
    desk.reserve("r", tokens=16)
    desk.ledger.lose_session(DECODE, desk.now)
    (shown,) = describe_leases(desk.leases(), {}, 0, desk.now).leases
    assert (shown.state, shown.owner, shown.writer) == ("draining", "gone", "gone")


def test_the_blocks_of_all_owners_are_those_that_are_held_or_in_flight() -> None:
    desk = desk_with_leases()
    _, held, in_flight, _ = desk.counts()
    owners = count_owners(desk.leases(), WORKERS).owners
    assert sum(owned.blocks for owned in owners) == held + in_flight
    by_state = {(owned.owner, owned.state): owned.blocks for owned in owners}
    assert by_state["decode-0", "filling"] == in_flight
    assert by_state["decode-0", "reserved"] == held
    assert [owned.blocks for owned in owners] == sorted(by_state.values(), reverse=True)
    gone = count_owners(desk.leases(), {}).owners
    assert {owned.owner for owned in gone} == {"gone"}
