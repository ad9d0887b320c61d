"""A restarted service continues in its predecessor's arena, with the leases that workers claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.arena import Arena
from paceline.services.kvtransfer.reconciliation import RECONCILE_SECONDS
from tests.services.kvtransfer.kv_host import SLOT, SLOTS, Host, batch, key, layout, release, reserve
from tests.services.kvtransfer.kv_toolkit import chain

pytestmark = pytest.mark.slow


def left_arena(folder: Path) -> str:
    """Leave an arena as a killed service does: the file without its lock. Return its path."""
    arena = Arena(folder, SLOTS * SLOT, "host-1")
    left = arena.path.with_name(arena.path.name + ".kept")
    left.hardlink_to(arena.path)
    arena.close()
    left.rename(arena.path)
    return str(arena.path)


def arenas(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("*.arena")]


def claim(of: object, *slots: int, sealed: str = "", active: bool = True) -> pb.Claim:
    hashes = [*chain(sealed), *[b""] * len(slots)][: len(slots)]
    table = pb.BlockTable(slots=slots, hashes=hashes)
    return pb.Claim(key=of, token_count=16 * len(slots), tables=[table], active=active)  # type: ignore[arg-type]


class Return:
    """A restarted service, and workers that come back to it."""

    def __init__(self, host: Host, path: str) -> None:
        self.host = host
        self.path = path

    def ask(self, *claims: pb.Claim, worker_id: str = "w", path: str | None = None) -> grpc.aio.UnaryStreamCall:
        return self.host.stub.Attach(
            pb.AttachRequest(
                worker_id=worker_id, role="decode", layout=layout(), arena_path=path or self.path, claims=claims
            ),
            timeout=20,
        )

    async def over(self) -> None:
        """Let the time pass in which workers may come back."""
        await asyncio.sleep(0.2)
        self.host.now += RECONCILE_SECONDS


@pytest.fixture
async def again(tmp_path: Path) -> AsyncIterator[Return]:
    path = left_arena(tmp_path)
    host = Host(tmp_path)
    await host.start()
    yield Return(host, path)
    await host.close()
    assert arenas(tmp_path) == []


async def test_what_is_claimed_stays_and_the_rest_is_free(again: Return) -> None:
    calls = [
        again.ask(claim(key("a"), 0, 1, 2, sealed="xy"), worker_id="one"),
        again.ask(claim(key("b"), 0, 1, 3, sealed="xy"), claim(key("c"), 5, active=False), worker_id="other"),
        again.ask(worker_id="idle"),
    ]
    await again.over()
    events = [await call.read() for call in calls]
    assert {event.arena_path for event in events} == {again.path}
    reply = await again.host.ledger()
    assert {(lease.key.request_id, lease.state, lease.owner) for lease in reply.leases} == {
        ("a", "active", "one"),
        ("b", "active", "other"),
        ("c", "draining", "other"),
    }
    assert await again.host.counts() == (SLOTS - 5, 4, 1, 0)
    requests = [
        pb.BatchRequest(session=events[1].session, operations=[release(key("b")), release(key("c"))]),
        pb.BatchRequest(session=events[0].session, operations=[release(key("a"))]),
        # Sealed blocks can be reused.
        pb.BatchRequest(session=events[2].session, operations=[reserve(key("d"), "xyz")]),
    ]
    for request in requests:
        (*_, result) = (await batch(events[0].socket_path, request)).results
        assert result.code == pb.CODE_OK
    assert (result.lease.filled_tokens, list(result.lease.tables[0].slots[:2])) == (32, [0, 1])


async def test_nobody_gets_a_block_before_all_could_come_back(again: Return) -> None:
    newcomer = asyncio.create_task(again.host.attach("new"))
    late = again.ask(claim(key("a"), *range(SLOTS - 1)))
    await asyncio.sleep(0.2)
    assert not newcomer.done()
    await again.over()
    worker = await newcomer
    (result,) = await worker.batch(reserve(key("b"), tokens=32))
    assert result.code == pb.CODE_EXHAUSTED
    assert isinstance(await late.read(), pb.AttachEvent)


async def test_who_went_away_again_before_it_was_over_holds_nothing(again: Return) -> None:
    call = again.ask(claim(key("a"), 0, 1))
    staying = again.ask(worker_id="staying")
    await asyncio.sleep(0.2)
    call.cancel()
    await again.over()
    assert isinstance(await staying.read(), pb.AttachEvent)
    assert await again.host.counts() == (SLOTS, 0, 0, 0)


async def test_where_nobody_comes_back_it_begins_anew(again: Return) -> None:
    again.host.now += RECONCILE_SECONDS
    worker = await again.host.attach("new")
    assert worker.arena.arena_path != again.path
    assert again.path not in arenas(again.host.folder)


async def test_who_comes_back_too_late_is_refused(again: Return) -> None:
    again.host.now += RECONCILE_SECONDS
    await again.host.attach("new")
    call = again.ask(claim(key("a"), 0))
    assert await call.code() is grpc.StatusCode.ABORTED
    assert "too late" in await call.details()


@pytest.mark.parametrize(
    "claims",
    [
        ([claim(key("a"), 0, 1)], [claim(key("b"), 1, 2)]),
        ([claim(key("a"), 0, sealed="x")], [claim(key("b"), 0, sealed="y")]),
        ([claim(key("a"), 0)], [claim(key("a"), 1)]),
        ([claim(key("a"), 0)], [claim(key("a", generation=2), 1)]),
        ([claim(key("a"), SLOTS)], []),
        ([claim(key("a"), 0, 0)], []),
        ([pb.Claim(key=key("a"), token_count=48, tables=[pb.BlockTable(slots=[0], hashes=[b""])], active=True)], []),
        (
            [claim(key("a"), 0, sealed="x"), claim(key("b"), 0, sealed="x")],
            [claim(key("c"), 1, sealed="x"), claim(key("d"), 1, sealed="x")],
        ),
    ],
    ids=["one block", "two contents", "one key", "one attempt", "no block", "twice", "no table", "two of a name"],
)
async def test_where_claims_contradict_each_other_nobody_comes_back(
    again: Return, claims: tuple[list[pb.Claim], list[pb.Claim]]
) -> None:
    calls = [again.ask(*each, worker_id=str(number)) for number, each in enumerate(claims)]
    await again.over()
    for call in calls:
        assert await call.code() is grpc.StatusCode.ABORTED
    assert again.path not in arenas(again.host.folder)
    worker = await again.host.attach("new")
    assert worker.arena.arena_path != again.path


async def test_another_size_is_not_kept(tmp_path: Path) -> None:
    path = left_arena(tmp_path)
    host = Host(tmp_path, kv_memory=SLOT)
    await host.start()
    again = Return(host, path)
    call = again.ask(claim(key("a"), 0))
    await again.over()
    assert await call.code() is grpc.StatusCode.ABORTED
    await host.close()
    assert arenas(tmp_path) == []
