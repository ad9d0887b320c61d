"""What a worker remembers of its blocks is what it may claim, no more and no less."""

from __future__ import annotations

import pytest

from paceline.core.kv_layout import NO_SLOT, GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.worker.touched import TouchedBlocks

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8, 0), GroupShape("window", (1,), 1, 8, 16)), 4, "test")
KEY = Key("r", 1, 1)
X, Y = b"x" * 16, b"y" * 16


def hold(*tables: list[int], hashes: tuple[list[bytes], ...] = ()) -> pb.Hold:
    made = [pb.BlockTable(slots=table) for table in tables]
    for table, names in zip(made, hashes):
        table.hashes.extend(names)
    return pb.Hold(tables=made)


def claims(touched: TouchedBlocks) -> list[tuple[list[list[int]], list[list[bytes]]]]:
    found = touched.claims(LAYOUT, lambda key: True)
    return [([list(t.slots) for t in claim.tables], [list(t.hashes) for t in claim.tables]) for claim in found]


@pytest.fixture
def touched() -> TouchedBlocks:
    made = TouchedBlocks()
    made.obtain(KEY, hold([0, 1], [2, 3], hashes=([X, b""], [X, b""])))
    made.use(KEY)
    return made


def test_names_are_those_that_came_with_the_blocks_and_those_sealed_since(touched: TouchedBlocks) -> None:
    touched.seal(KEY, 0, 1, [Y])
    assert claims(touched) == [([[0, 1], [2, 3]], [[X, Y], [X, b""]])]


def test_a_block_that_was_given_back_and_comes_again_has_no_name(touched: TouchedBlocks) -> None:
    touched.trim(KEY, 1, 1)
    touched.grow(KEY, [[0, 1, 4], [NO_SLOT, 3, 2]])
    assert claims(touched) == [([[0, 1, 4], [NO_SLOT, 3, 2]], [[X, b"", b""], [b"", b"", b""]])]


def test_what_was_given_back_while_an_extension_was_under_way_stays_so(touched: TouchedBlocks) -> None:
    touched.trim(KEY, 1, 1)
    touched.grow(KEY, [[0, 1, 4], [2, 3, 5]])
    assert claims(touched)[0][0] == [[0, 1, 4], [NO_SLOT, 3, 5]]


def test_a_reservation_that_is_adopted_keeps_its_blocks_but_for_what_was_given_back(touched: TouchedBlocks) -> None:
    reserved, adopted = Key("s", 1, 1), Key("s", 1, 3)
    touched.obtain(reserved, hold([5, 6], [7, 8], hashes=([X, b""], [X, b""])))
    assert touched.adopt(reserved, adopted, 24, [0, 1]) == [[5, 6], [NO_SLOT, 8]]
    assert not touched.is_used(adopted)
    touched.use(adopted)
    touched.seal(adopted, 1, 0, [X, Y])
    assert claims(touched)[1] == ([[5, 6], [NO_SLOT, 8]], [[X, b""], [b"", Y]])
    assert touched.claims(LAYOUT, lambda key: True)[1].filled_tokens == 24


def test_only_what_the_engine_has_is_claimed_until_it_is_given_back(touched: TouchedBlocks) -> None:
    waiting, newer = Key("s", 1, 1), Key("s", 1, 3)
    touched.obtain(waiting, hold([5], [6]))
    assert len(claims(touched)) == 1
    touched.obtain(newer, hold([5], [6]))
    with pytest.raises(KeyError):  # it changed hands
        touched.use(waiting)
    touched.use(newer)
    assert len(claims(touched)) == 2
    touched.give_back(KEY)
    touched.give_back(newer)
    assert claims(touched) == []


def test_a_preempted_request_holds_its_old_blocks_beside_its_new_ones(touched: TouchedBlocks) -> None:
    touched.obtain(Key("r", 1, 2), hold([5], [6]))
    touched.use(Key("r", 1, 2))
    assert len(claims(touched)) == 2


def test_a_claim_covers_as_many_tokens_as_its_tables(touched: TouchedBlocks) -> None:
    (claim,) = touched.claims(LAYOUT, lambda key: False)
    assert not claim.active
    assert [group.blocks_for(claim.token_count) for group in LAYOUT.groups] == [2, 2]
