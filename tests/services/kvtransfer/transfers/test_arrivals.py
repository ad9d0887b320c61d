"""Each block of a prompt from another host is taken once, and only if it was expected."""

from __future__ import annotations

import pytest

from paceline.core.errors import TransferError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.transfers.arrivals import Arrivals
from tests.services.kvtransfer.kv_toolkit import Desk


def blocks(*places: tuple[int, int]) -> list[pb.ExportedBlock]:
    return [pb.ExportedBlock(group=group, index=index) for group, index in places]


def test_a_block_comes_once() -> None:
    desk = Desk(20, (16, 0), (32, 0))
    lease = desk.reserve("r", tokens=64)
    arrivals = Arrivals(desk.layout.groups, lease)
    assert arrivals.places(blocks((0, 1), (0, 0))) == [lease.tables[0][1], lease.tables[0][0]]
    assert arrivals.places(blocks((1, 1))) == [lease.tables[1][1]]
    with pytest.raises(TransferError, match=r"^block 1 of group 0 was not expected$"):
        arrivals.places(blocks((0, 1)))
    with pytest.raises(TransferError, match=r"^block 2 of group 0 was not expected$"):
        arrivals.places(blocks((0, 2), (0, 2)))


@pytest.mark.parametrize(
    "place",
    [(0, 1), (1, 0), (0, 4), (2, 0)],
    ids=["cached", "cached in a larger block", "behind the lease", "no group"],
)
def test_a_block_without_a_place_is_not_taken(place: tuple[int, int]) -> None:
    desk = Desk(20, (16, 0), (32, 0))
    desk.cache("before", "ab")
    arrivals = Arrivals(desk.layout.groups, desk.reserve("r", "abcd"))
    with pytest.raises(TransferError, match="was not expected"):
        arrivals.places(blocks(place))
