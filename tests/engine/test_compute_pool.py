"""Blocks between a device's pool and the arena, on toy memories that remember what was computed.

No content is mixed up, no block is published before it is complete, and all requests get their tokens from any pool.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.context import Context
from paceline.core.kv_layout import KVLayout
from paceline.core.types import Key, SamplingParams
from paceline.engine.compute_pool import ArenaPool
from paceline.engine.device_pool import DevicePool
from paceline.engine.limits import Limits
from paceline.engine.pool_directory import PoolDirectory
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Filled
from tests.engine.toy_host import Host, Wish
from tests.engine.toy_requests import FULL, MIXED, STATES, next_token


@pytest.mark.slow
@given(
    layout=st.sampled_from([FULL, MIXED, STATES]),
    wishes=st.lists(
        st.builds(
            Wish,
            st.builds(lambda kind, length: [kind] * length, st.integers(0, 2), st.integers(1, 90)),
            st.integers(1, 120),
            st.booleans(),
            st.sampled_from([False, False, True]),
            st.integers(0, 90),
        ),
        min_size=1,
        max_size=7,
    ),
    spare=st.integers(0, 20),
    arena=st.integers(0, 60),
    budget=st.integers(1, 64),
    rows=st.integers(1, 8),
    drafts=st.integers(0, 3),
    load_seconds=st.sampled_from([1e-3, 1e3]),
    seed=st.integers(0, 1 << 20),
)
def test_nothing_is_mixed_up_on_a_small_pool(
    layout: KVLayout,
    wishes: list[Wish],
    spare: int,
    arena: int,
    budget: int,
    rows: int,
    drafts: int,
    load_seconds: float,
    seed: int,
) -> None:
    least = layout.slots_for(90 + 120 + 64)
    limits = Limits(budget, 4096, min(rows, budget), drafts)
    host = Host(layout, least + spare, least + spare + arena, limits, random.Random(seed), load_seconds)
    host.run(wishes)
    for index, wish in enumerate(wishes):
        context = list(wish.prompt)
        for _ in range(1 if wish.leaves else wish.max_tokens):
            context.append(next_token(context))
        assert host.outputs[str(index)] == context[len(wish.prompt) :]
    assert sorted(host.arena.free) == list(range(least + spare + arena))
    counts = host.device_pool.counts()
    assert counts is not None
    assert counts.free + counts.cached == counts.total


def filled_request(name: str, computed: int, **sampling: int) -> Request:
    params = SamplingParams(max_tokens=8, **sampling)  # type: ignore[arg-type]
    tables = [[*range(group.blocks_for(computed + 1))] for group in FULL.groups]
    tokens = [hash(name) % 1000] * (computed + 1)
    return Request(Key(name, 1, 1), Context(tokens), computed + 1, params, FULL, tables, computed)


@pytest.mark.parametrize(
    ("load_seconds", "tokens_per_second", "sampling", "computes"),
    [
        (10.0, 1000.0, {}, True),
        (0.001, 1000.0, {}, False),
        (10.0, 0.0, {}, False),  # the compute time is not known
        (10.0, 1000.0, {"prompt_logprobs": 1}, False),  # its prompt logprobs would be sent twice
    ],
)
def test_what_is_loaded_more_slowly_than_computed_is_computed(
    load_seconds: float, tokens_per_second: float, sampling: dict[str, int], computes: bool
) -> None:
    pool = DevicePool(FULL, 64)
    assert pool.admit(filled_request("first", 80), tokens_per_second)
    (copies,) = pool.take_copies()
    pool.finish_copies(copies, load_seconds)
    request = filled_request("second", 40, **sampling)
    assert pool.admit(request, tokens_per_second)
    assert (request.computed_len == 0) == computes
    assert bool(pool.take_copies()) == pool.is_copying(request) == (not computes)


def test_blocks_that_are_in_the_pool_are_not_loaded_again() -> None:
    pool = DevicePool(FULL, 64)
    request = filled_request("same", 40)
    pool.admit(request, 0.0)
    (copies,) = pool.take_copies()
    assert len(copies.loads) == 3
    pool.finish_copies(copies, 0.001)
    pool.release(request)
    again = filled_request("same", 40)
    pool.admit(again, 0.0)
    (copies,) = pool.take_copies()
    assert len(copies.loads) == 1  # the last block is not full and so has no name
    assert len(set(pool.tables(again)[0])) == 3


def test_blocks_that_were_forgotten_are_loaded_again_and_shown_to_nobody() -> None:
    directory = PoolDirectory(memoryview(bytearray(PoolDirectory.bytes_for(64))), 64, 64, lambda: None)
    scheduler = Scheduler(Limits(64, 4096, 2), pool=DevicePool(FULL, 64, directory))
    for name in ("running", "gone"):
        scheduler.add(filled_request(name, 40))
        (copies,) = scheduler.take_copies()
        scheduler.finish_copies(copies, 0.001, 0.0)
    scheduler.remove(Key("gone", 1, 1))
    assert directory.find(copies.loads).indices.tolist() == [0, 1]
    assert scheduler.forget() == 2
    assert directory.find(copies.loads).indices.tolist() == []
    scheduler.add(filled_request("gone", 40))
    (copies,) = scheduler.take_copies()
    assert len(copies.loads) == 3


def test_who_comes_while_steps_are_in_flight_is_loaded_meanwhile() -> None:
    scheduler = Scheduler(Limits(16, 4096, 2), pool=DevicePool(FULL, 64))
    scheduler.add(filled_request("first", 40))
    (first,) = scheduler.take_copies()
    scheduler.finish_copies(first, 0.001, 0.0)
    assert scheduler.plan() is not None
    scheduler.add(filled_request("second", 40))
    (second,) = scheduler.take_copies()
    assert len(second.loads) == 3
    scheduler.finish_copies(second, 0.001, 0.0)
    step = scheduler.plan()
    assert step is not None
    assert [chunk.key.request_id for chunk in step.chunks] == ["first", "second"]


def test_others_see_full_blocks_until_their_slots_are_taken_and_no_block_that_is_written_to() -> None:
    directory = PoolDirectory(memoryview(bytearray(PoolDirectory.bytes_for(64))), 64, 4, lambda: None)
    pool = DevicePool(FULL, 4, directory)
    request = filled_request("first", 40)
    pool.admit(request, 0.0)
    (copies,) = pool.take_copies()
    assert directory.find(copies.loads).indices.tolist() == []
    pool.finish_copies(copies, 0.001)
    assert directory.find(copies.loads).indices.tolist() == [0, 1]
    pool.release(request)
    assert directory.find(copies.loads).indices.tolist() == [0, 1]
    pool.admit(filled_request("second", 40), 0.0)
    assert directory.find(copies.loads).indices.tolist() == [0]


def test_in_the_arena_nothing_is_copied() -> None:
    pool, request = ArenaPool(), filled_request("r", 40)
    assert pool.admit(request, 0.0)
    assert pool.tables(request) is request.tables
    filled = Filled(request.key, 40, b"context")
    assert pool.hold_until_stored(request, [filled], whole=True) == [filled]
    assert pool.take_copies() == []
