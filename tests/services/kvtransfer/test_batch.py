"""Operations over the wire and bytes in the arena."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto.common_pb2 import Key
from paceline.services.common.shared_memory import map_arena
from tests.services.kvtransfer.kv_host import SLOT, SLOTS, Host, key, release, reserve, seal
from tests.services.kvtransfer.kv_toolkit import LEASE, chain


async def test_a_handoff_moves_no_byte(host: Host) -> None:
    decode, prefill = await host.attach("decode"), await host.attach("prefill")
    memories = [map_arena(Path(worker.arena.arena_path), worker.arena.arena_bytes) for worker in (prefill, decode)]

    reserved = (await decode.do(reserve(key(), "abc", 60))).lease
    assert await host.counts() == (4, 4, 0, 0)
    opened = (await prefill.do(pb.Operation(open=pb.Open(key=reserved.key)))).lease
    assert await host.counts() == (4, 0, 4, 0)
    for slot in opened.tables[0].slots:
        memories[0][slot * SLOT : (slot + 1) * SLOT] = bytes([slot + 1]) * SLOT
    await prefill.do(seal(opened.key, "abc"))
    await prefill.do(pb.Operation(fill=pb.Fill(key=opened.key, filled_tokens=50)))
    adopted = await decode.adopt(reserved.key)

    assert (adopted.key.generation, adopted.filled_tokens) == (3, 50)
    assert (list(adopted.trimmed_blocks), list(adopted.sealed_blocks)) == ([0], [3])
    for slot in reserved.tables[0].slots:
        assert memories[1][slot * SLOT : (slot + 1) * SLOT] == bytes([slot + 1]) * SLOT
    await decode.do(release(adopted.key))
    assert await host.counts() == (5, 0, 0, 3)

    again = (await decode.do(reserve(key("again"), "abcd"))).lease
    assert again.filled_tokens == 48
    assert again.tables[0].slots[:3] == reserved.tables[0].slots[:3]


async def test_a_failed_operation_does_not_stop_those_behind_it(host: Host) -> None:
    worker = await host.attach()
    results = await worker.batch(
        reserve(key("a"), tokens=16 * SLOTS),
        reserve(key("b"), tokens=16),
        reserve(key("c"), tokens=16 * SLOTS + 1),
        pb.Operation(extend=pb.Extend(key=key("b"), token_count=16)),
        pb.Operation(open=pb.Open(key=key("a"))),
        pb.Operation(extend=pb.Extend(key=key("a"), token_count=16)),
        release(key("a", generation=2)),
        reserve(key("b", generation=2), tokens=16),
    )
    assert [result.code for result in results] == [
        pb.CODE_OK,
        pb.CODE_EXHAUSTED,
        pb.CODE_INVALID,
        pb.CODE_UNKNOWN,
        pb.CODE_OK,
        pb.CODE_STALE,
        pb.CODE_OK,
        pb.CODE_OK,
    ]
    assert all(bool(result.message) == (result.code != pb.CODE_OK) for result in results)
    assert await host.counts() == (7, 1, 0, 0)


HELD = key("held")


@pytest.mark.parametrize(
    "operation",
    [
        pb.Operation(),
        pb.Operation(reserve=pb.Reserve()),
        pb.Operation(reserve=pb.Reserve(key=key(""), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key("x" * 257), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(generation=(1 << 32) - 1), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), hashes=[b"short"], token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), hashes=chain("ab"), token_count=16)),
        pb.Operation(reserve=pb.Reserve(key=key(), token_count=(1 << 32) - 1)),
        pb.Operation(open=pb.Open()),
        pb.Operation(fill=pb.Fill(key=HELD)),
        pb.Operation(extend=pb.Extend(key=HELD, token_count=(1 << 32) - 1)),
        pb.Operation(seal=pb.Seal(key=HELD, group=7)),
        pb.Operation(seal=pb.Seal(key=HELD, first_block=(1 << 32) - 1, hashes=chain("a"))),
        pb.Operation(seal=pb.Seal(key=HELD, hashes=[b""])),
        pb.Operation(seal=pb.Seal(key=HELD, hashes=[b"x" * 17])),
        pb.Operation(trim=pb.Trim(key=HELD)),
        pb.Operation(trim=pb.Trim(key=HELD, group=(1 << 32) - 1)),
        pb.Operation(release=pb.Release()),
        pb.Operation(renew=pb.Renew(keys=[Key()])),
    ],
    ids=lambda operation: str(operation)[:60].replace("\n", " "),
)
async def test_malformed_operations_change_nothing(host: Host, operation: pb.Operation) -> None:
    worker = await host.attach()
    await worker.do(reserve(HELD, tokens=32))
    before = await host.ledger()
    (result,) = await worker.batch(operation)
    assert result.code == pb.CODE_INVALID
    assert result.message
    assert await host.ledger() == before


async def test_a_batch_has_a_limit(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    worker = await host.attach()
    with pytest.raises(UnavailableError, match="has ended"):
        await worker.batch(*[release(key())] * 4097)
    assert "may have 4096 operations, not 4097" in caplog.text


async def test_renewal_names_the_leases_that_are_lost(host: Host) -> None:
    worker = await host.attach()
    await worker.batch(reserve(key("a"), tokens=16), reserve(key("b"), tokens=16))
    host.now += LEASE - 1
    (result,) = await worker.batch(pb.Operation(renew=pb.Renew(keys=[key("gone"), key("a"), key("late"), key("b")])))
    assert result.code == pb.CODE_UNKNOWN
    assert "gone/1/1" in result.message
    assert list(result.lost) == [key("gone"), key("late")]
    host.now += LEASE - 1
    assert not (await worker.do(pb.Operation(renew=pb.Renew(keys=[key("a"), key("b")])))).lost
