"""How workers attach to a host, and which workers may share its blocks."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.kv_groups import divide_groups, state_groups
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.turns import PAGE_BYTES
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.credentials import Credentials
from paceline.services.common.layout import layout_from_pb
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.worker.kv_session import layout_to_pb
from tests.services.kvtransfer.kv_host import SLOT, SLOTS, Host, key, layout, release, reserve, seal
from tests.services.kvtransfer.kv_toolkit import LEASE


async def test_the_first_worker_shapes_the_arena(host: Host) -> None:
    assert (await host.ledger()).total == 0
    worker = await host.attach(shape=layout(slot_bytes=3 * 4096))
    arena = worker.arena
    assert (arena.host_id, arena.slots, arena.arena_bytes) == ("host-1", 2, 2 * 3 * 4096)
    assert arena.lease_ms == LEASE * 1000
    status = os.stat(arena.arena_path)
    assert (status.st_size, stat.S_IMODE(status.st_mode)) == (arena.arena_bytes + PAGE_BYTES, 0o600)
    assert (await host.ledger()).slot_bytes == 3 * 4096
    snapshot = host.service.snapshot()
    assert (snapshot.workers, snapshot.fingerprint) == (1, "model-a")
    assert host.service.healthy


@pytest.mark.parametrize(
    ("enough_tokens", "context_tokens", "slots"),
    [(0, 64, SLOTS), (48, 0, 3), (48, 33, 3), (48, 65, 5), (16 * SLOTS + 1, 0, SLOTS), (48, 16 * SLOTS + 1, SLOTS)],
)
async def test_an_arena_may_hold_no_more_than_enough(
    tmp_path: Path, enough_tokens: int, context_tokens: int, slots: int
) -> None:
    """The arena has room for `enough_tokens` or the longest context, whichever is more, if the memory suffices."""
    host = Host(tmp_path, enough_tokens=enough_tokens)
    await host.start()
    worker = await host.attach(context_tokens=context_tokens)
    assert worker.arena.slots == slots
    await host.close()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (layout(slot_bytes=2 * SLOT), "its slot_bytes is 8192, the arena's is 4096"),
        (layout(fingerprint="model-b"), "its fingerprint is model-b, the arena's is model-a"),
        (layout(groups=((32, 0),)), "block_tokens 32 and window 0, the arena's is 'g0' with block_tokens 16"),
        (layout(groups=((16, 64),)), "window 64, the arena's is 'g0' with block_tokens 16 and window 0"),
        (layout(groups=((16, 0), (16, 0))), "it has 2 groups of layers, the arena 1"),
        (layout(encodings=pb.KVGroup(name="encoding", block_tokens=16)), "only one of the two has encoders"),
    ],
)
async def test_a_different_layout_is_refused_while_a_worker_is_there(
    host: Host, other: pb.KVLayout, difference: str
) -> None:
    worker = await host.attach("first")
    stream = host.stub.Attach(pb.AttachRequest(worker_id="second", layout=other), timeout=10)
    assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "worker second cannot share" in await stream.details()
    assert difference in await stream.details()
    equal = await host.attach("third")
    assert equal.arena.arena_path == worker.arena.arena_path


async def test_an_arena_that_nobody_uses_takes_a_new_shape(host: Host) -> None:
    worker = await host.attach()
    await worker.do(reserve(key(), "ab"))
    await worker.leave()
    await host.until(lambda reply: reply.in_flight == 2)  # for the grace time, which a new arena file need not wait for
    again = await host.attach(shape=layout(slot_bytes=2 * SLOT, fingerprint="model-b"))
    assert again.arena.slots == SLOTS // 2
    assert again.arena.arena_path != worker.arena.arena_path
    assert [str(path) for path in host.folder.glob("*.arena")] == [again.arena.arena_path]


async def test_an_arena_of_the_same_shape_keeps_its_cache(host: Host) -> None:
    worker = await host.attach()
    await worker.batch(reserve(key(), "ab"), seal(key(), "ab"), release(key()))
    await worker.leave()
    again = await host.attach()
    assert (await again.do(reserve(key("next"), "abc"))).lease.filled_tokens == 32


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (pb.KVLayout(), "fingerprint must have 1 to 256 characters"),
        (layout(slot_bytes=0), "slot_bytes must be a multiple of 4096"),
        (layout(slot_bytes=1000), "slot_bytes must be a multiple of 4096"),
        (layout(base_tokens=8), "base_tokens must be 16"),
        (layout(groups=()), "groups must be 1 to 64, not 0"),
        (layout(groups=((16, 0),) * 65), "groups must be 1 to 64, not 65"),
        (layout(groups=((0, 0),)), "multiples of 16"),
        (layout(groups=((24, 0),)), "multiples of 16"),
        (layout(groups=((48, 0), (32, 0))), "divide the largest"),
    ],
)
async def test_what_is_no_layout(host: Host, shape: pb.KVLayout, message: str) -> None:
    stream = host.stub.Attach(pb.AttachRequest(worker_id="w", layout=shape), timeout=10)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in await stream.details()
    assert list(host.folder.glob("*.arena")) == []


async def test_a_worker_needs_a_name(host: Host) -> None:
    stream = host.stub.Attach(pb.AttachRequest(layout=layout()), timeout=10)
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_block_larger_than_the_arena_names_the_flag(host: Host) -> None:
    stream = host.stub.Attach(pb.AttachRequest(worker_id="w", layout=layout(slot_bytes=1 << 20)), timeout=10)
    assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "--kv-memory" in await stream.details()


async def test_too_little_memory_is_found_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        await KVTransferService(HostOptions("h", 1 << 60, tmp_path, LEASE, Credentials())).start()


def state(layers: int, others: tuple[GroupShape, ...] = ()) -> tuple[GroupShape, ...]:
    return state_groups("state", range(layers), ((48, 32, 128), (3, 1792)), others)


WIDE = (GroupShape("wide", (0, 1), 8, 256), GroupShape("narrow", (2,), 1, 24, 20))
ODD = {
    "head sizes": (*WIDE, GroupShape("one", (3,), 1, 1, 1)),
    "a layer that others read": (GroupShape("full", (0,), 1, 64, readers=((1, 0), (2, 0))),),
    "latent vectors": (GroupShape("latent", (0, 1, 2), 1, 576, planes=1), *WIDE),
    "divided groups": divide_groups(
        (GroupShape("sliding", tuple(range(40)), 8, 256, 1024), GroupShape("full", (40,), 1, 512))
    ),
    "states alone": state(48),
    "states beside little": (*state(80, WIDE[1:]), *WIDE[1:]),
    "states and a draft model": (*WIDE, *state(3, WIDE), *(shape.of_drafter(6) for shape in WIDE)),
}


@pytest.mark.parametrize("shapes", ODD.values(), ids=ODD)
async def test_no_combination_of_shapes_refuses_to_start(tmp_path: Path, shapes: tuple[GroupShape, ...]) -> None:
    made = make_layout(shapes, 2, "odd")
    host = Host(tmp_path, kv_memory=made.slots_for(2) * made.slot_bytes)
    await host.start()
    worker = await host.attach(shape=layout_to_pb(made))
    lease = (await worker.do(reserve(key(), tokens=2))).lease
    assert [len(table.slots) for table in lease.tables] == [1] * len(shapes)
    await worker.do(release(key()))
    await worker.leave()
    await host.close()


@settings(max_examples=50)
@given(
    st.lists(
        st.builds(
            GroupShape,
            name=st.just("g"),
            layers=st.integers(1, 60).map(lambda n: tuple(range(n))),
            kv_heads=st.integers(1, 32),
            head_dim=st.integers(1, 512),
            window=st.sampled_from([0, 1, 20, 4096]),
        ),
        max_size=6,
    ).map(tuple),
    st.lists(st.tuples(st.integers(1, 5_000_000)), max_size=2).map(tuple),
    st.integers(1, 200),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 10_000),
)
def test_any_layout_is_understood(
    others: tuple[GroupShape, ...], parts: tuple[tuple[int, ...], ...], layers: int, itemsize: int, encoding_size: int
) -> None:
    shapes = others + (state_groups("state", range(layers), parts, others) if parts else ())
    assume(shapes)
    made = make_layout(shapes, itemsize, "any", encoding_size=encoding_size)
    read = layout_from_pb(layout_to_pb(made))
    assert (read.alignment, read.slot_bytes) == (made.alignment, made.slot_bytes)
    assert (read.encodings is None) == (made.encodings is None) == (encoding_size == 0)
    if made.encodings and read.encodings:
        assert read.encodings.first_group == made.encodings.first_group
        assert read.encodings.slots_for(5000) == made.encodings.slots_for(5000)
    for group, other in zip(made.all_groups, read.all_groups, strict=True):
        assert [group.first_needed_block(n) for n in (0, 1, 512, 5000)] == [
            other.first_needed_block(n) for n in (0, 1, 512, 5000)
        ]
