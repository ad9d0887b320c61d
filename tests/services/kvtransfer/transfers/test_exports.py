"""What the source names to a reader on another host, and how long it keeps it. Without a service and a reader."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.transfers import exports
from paceline.services.kvtransfer.transfers.exports import Exports
from paceline.services.kvtransfer.transports.transport import ArenaMemory
from tests.services.kvtransfer.kv_toolkit import LEASE, Desk, chain

SLOTS = 20


class ReaderLeftError(Exception):
    """The reader has ended its call."""


def exports_of(desk: Desk) -> Exports:
    size = desk.layout.slot_bytes
    memory = ArenaMemory(memoryview(bytearray(SLOTS * size)), size, SLOTS)
    return Exports(desk.layout, desk.ledger, memory, lambda: desk.now, pb.Offer(host_id="source"))


@pytest.mark.parametrize(
    ("cached_tokens", "places"),
    [
        (0, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        (32, [(0, 2), (0, 3), (1, 1)]),
        (64, []),
    ],
)
async def test_an_export_begins_where_the_reader_s_blocks_end(
    cached_tokens: int, places: list[tuple[int, int]]
) -> None:
    named: list[tuple[int, int]] = []

    async def write(event: pb.ExportEvent) -> None:
        named.extend((block.group, block.index) for block in event.exported.blocks)
        if event.exported.HasField("filled_tokens"):
            raise ReaderLeftError

    desk = Desk(SLOTS, (16, 0), (32, 0))
    desk.cache("before", "abcd")
    with pytest.raises(ReaderLeftError):
        await exports_of(desk).run_prefix(Key("r", 1, 1), chain("abcd"), cached_tokens, write)
    assert named == places


async def test_the_export_of_a_prefix_begins_inside_no_block() -> None:
    async def write(event: pb.ExportEvent) -> None:
        raise AssertionError(event)

    desk = Desk(SLOTS, (16, 0), (32, 0))
    desk.cache("before", "abcd")
    with pytest.raises(InvalidRequestError, match="must be a multiple of 32"):
        await exports_of(desk).run_prefix(Key("r", 1, 1), chain("abcd"), 16, write)


async def test_a_prefix_is_leased_for_as_long_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "ALIVE_SECONDS", 0.0)
    held: list[int] = []

    async def write(event: pb.ExportEvent) -> None:
        desk.now += LEASE / 4
        desk.ledger.expire(desk.now)
        held.append(desk.counts()[1])
        if len(held) == 12:
            raise ReaderLeftError

    desk = Desk(SLOTS)
    desk.cache("before", "abcd")
    with pytest.raises(ReaderLeftError):
        await exports_of(desk).run_prefix(Key("r", 1, 1), chain("abcd"), 0, write)
    assert held == [4] * 12
    assert desk.counts() == (SLOTS - 4, 0, 0, 4)
