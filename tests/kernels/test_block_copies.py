"""Copies between a device's pool and the arena keep every bit of a block and change nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.block_copies import BlockCopies, runs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 9


def blocks(elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return [SLOTS, elements] with random bits, including NaN, and with padding after each block."""
    generator = torch.Generator().manual_seed(seed)
    size = (SLOTS, (elements + 7) * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)[:, :elements]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


pairs = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=SLOTS, unique_by=lambda p: p[0]
)


@settings(max_examples=30)
@given(pairs=pairs, size=st.sampled_from([63, 96]), kernel_bytes=st.sampled_from([None, 0]), stores=st.booleans())
def test_copies_give_each_slot_its_block(
    pairs: list[tuple[int, int]], size: int, kernel_bytes: int | None, stores: bool
) -> None:
    check_copies(pairs, size, kernel_bytes, stores)


def check_copies(pairs: list[tuple[int, int]], size: int, kernel_bytes: int | None, stores: bool) -> None:
    pool, arena = blocks(size, torch.bfloat16, 1).to(DEVICE), blocks(size, torch.bfloat16, 2)
    if size % 32 == 0:  # as in real blocks, which the native library copies
        pool, arena = pool.contiguous(), arena.contiguous()
    arena = arena.pin_memory() if DEVICE.type == "cuda" else arena
    before = pool.cpu().clone(), arena.clone()
    copies = BlockCopies(pool, arena, kernel_bytes)
    to, source = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    copy = copies.store(source, to) if stores else copies.load(source, to)
    copy.precede()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert copy.done()
    expected = [own.clone() for own in before]
    for target_slot, source_slot in pairs:
        expected[stores][target_slot] = before[not stores][source_slot]
    assert same(pool, expected[0])
    assert same(arena, expected[1])


@given(pairs)
def test_runs_are_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    to, source = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = list(runs(to, source))
    assert [(a + i, b + i) for a, b, count in found for i in range(count)] == pairs
    for (a, b, count), (next_a, next_b, _) in pairwise(found):
        assert (a + count, b + count) != (next_a, next_b)


@pytest.mark.parametrize(("pool_slots", "arena_slots"), [([-1], [0]), ([0], [SLOTS]), ([SLOTS], [0]), ([0], [-1])])
def test_a_slot_that_does_not_exist_is_refused(pool_slots: list[int], arena_slots: list[int]) -> None:
    pool, arena = torch.zeros(SLOTS, 4, device=DEVICE), torch.zeros(SLOTS, 4)
    copies = BlockCopies(pool, arena.pin_memory() if DEVICE.type == "cuda" else arena)
    with pytest.raises(IndexError, match="there are slots 0 to 8"):
        copies.store(pool_slots, arena_slots)
    with pytest.raises(IndexError, match="there are slots 0 to 8"):
        copies.load(arena_slots, pool_slots)
    with pytest.raises(ValueError, match="2 blocks cannot go to 1 slots"):
        copies.store([0, 1], [0])


def test_pool_and_arena_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"the pool has blocks of 4 torch.float32, the arena 5 torch.float32"):
        BlockCopies(torch.zeros(2, 4), torch.zeros(2, 5))
