"""A worker claims exactly the blocks that it remembers of its leases."""

from __future__ import annotations

import pytest

from paceline.core.kv_layout import NO_SLOT, GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_to_pb
from paceline.services.worker.leases import Leases

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8, 0), GroupShape("window", (1,), 1, 8, 16)), 4, "test")
KEY = Key("r", 1, 1)
X, Y = b"x" * 16, b"y" * 16


def lease(key: Key, *tables: list[int], hashes: tuple[list[bytes], ...] = ()) -> pb.Lease:
    made = [pb.BlockTable(slots=table) for table in tables]
    for table, names in zip(made, hashes):
        table.hashes.extend(names)
    return pb.Lease(key=key_to_pb(key), tables=made)


def claims(leases: Leases) -> list[tuple[list[list[int]], list[list[bytes]]]]:
    found = leases.claims(LAYOUT)
    return [([list(t.slots) for t in claim.tables], [list(t.hashes) for t in claim.tables]) for claim in found]


@pytest.fixture
def lost() -> list[Key]:
    return []


@pytest.fixture
def leases(lost: list[Key]) -> Leases:
    made = Leases(lost.append)
    made.add(lease(KEY, [0, 1], [2, 3], hashes=([X, b""], [X, b""])))
    made.use(KEY)
    return made


def test_a_claim_has_the_names_that_came_with_the_blocks_and_those_sealed_since(leases: Leases) -> None:
    leases.seal(KEY, 0, 1, [Y])
    assert claims(leases) == [([[0, 1], [2, 3]], [[X, Y], [X, b""]])]


def test_a_block_that_was_released_and_comes_again_has_no_name(leases: Leases) -> None:
    leases.trim(KEY, 1, 1)
    leases.grow(KEY, [[0, 1, 4], [NO_SLOT, 3, 2]])
    assert claims(leases) == [([[0, 1, 4], [NO_SLOT, 3, 2]], [[X, b"", b""], [b"", b"", b""]])]


def test_a_block_that_was_released_during_an_extension_stays_released(leases: Leases) -> None:
    leases.trim(KEY, 1, 1)
    leases.grow(KEY, [[0, 1, 4], [2, 3, 5]])
    assert claims(leases)[0][0] == [[0, 1, 4], [NO_SLOT, 3, 5]]


def test_an_adopted_reservation_keeps_its_blocks_except_released_ones(leases: Leases) -> None:
    reserved, adopted = Key("s", 1, 1), Key("s", 1, 3)
    leases.add(lease(reserved, [5, 6], [7, 8], hashes=([X, b""], [X, b""])))
    adoption = pb.Adoption(key=key_to_pb(adopted), filled_tokens=24, trimmed_blocks=[0, 1])
    assert leases.adopt(reserved, adoption).tables == [[5, 6], [NO_SLOT, 8]]
    assert len(claims(leases)) == 1
    leases.use(adopted)
    leases.seal(adopted, 1, 0, [X, Y])
    assert claims(leases)[1] == ([[5, 6], [NO_SLOT, 8]], [[X, b""], [b"", Y]])
    assert leases.claims(LAYOUT)[1].filled_tokens == 24


def test_only_blocks_that_the_engine_has_are_claimed_until_they_are_released(leases: Leases) -> None:
    waiting, newer = Key("s", 1, 1), Key("s", 1, 3)
    leases.add(lease(waiting, [5], [6]))
    assert len(claims(leases)) == 1
    leases.add(lease(newer, [5], [6]))
    with pytest.raises(KeyError):  # the lease has a newer key
        leases.use(waiting)
    leases.use(newer)
    assert len(claims(leases)) == 2
    leases.release(KEY)
    leases.release(newer)
    assert claims(leases) == []
    assert leases.keys() == []


def test_a_preempted_request_has_its_old_blocks_beside_its_new_ones(leases: Leases) -> None:
    leases.add(lease(Key("r", 1, 2), [5], [6]))
    leases.use(Key("r", 1, 2))
    assert len(claims(leases)) == 2


def test_a_late_release_of_an_older_generation_leaves_the_newer_lease(leases: Leases) -> None:
    leases.add(lease(newer := Key("r", 1, 2), [5], [6]))
    leases.release(KEY)
    assert newer in leases
    assert leases.keys() == [newer]


def test_the_claim_of_a_lost_lease_is_inactive_and_covers_the_tokens_of_its_tables(
    leases: Leases, lost: list[Key]
) -> None:
    leases.lose(KEY)
    (claim,) = leases.claims(LAYOUT)
    assert (lost, claim.active) == ([KEY], False)
    assert [group.blocks_for(claim.token_count) for group in LAYOUT.groups] == [2, 2]


@pytest.mark.parametrize("keep_used", [True, False])
def test_only_leases_in_use_outlast_their_service(keep_used: bool, leases: Leases, lost: list[Key]) -> None:
    leases.add(lease(waiting := Key("s", 1, 1), [5], [6]))
    leases.lose_all(keep_used)
    assert lost == ([waiting] if keep_used else [KEY, waiting])
    assert (KEY in leases) == keep_used
