"""Blocks arrive where they should, bit by bit, and nothing beside them is touched."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from paceline.kernels.block_copies import BlockCopies, runs
from paceline.kernels.triton_kernels.blocks import pack_blocks, unpack_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 9


def blocks(elements: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[SLOTS, elements] of any bits, also those of no number, with padding behind each block."""
    generator = torch.Generator().manual_seed(seed)
    size = (SLOTS, (elements + 7) * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)[:, :elements]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("elements", [1, 60, 63, 4096, 5000])
@pytest.mark.parametrize("slots", [[4], [8, 0, 3, 3], []], ids=str)
def test_blocks_are_packed_side_by_side_and_back(elements: int, dtype: torch.dtype, slots: list[int]) -> None:
    pool, other = blocks(elements, dtype, 1), blocks(elements, dtype, 2)
    held, index = pool.to(DEVICE), torch.tensor(slots, dtype=torch.int64).to(DEVICE)
    packed = pack_blocks(held, index)
    assert packed.is_contiguous()
    assert same(packed, pool[slots])
    assert same(held, pool)
    distinct = list(dict.fromkeys(slots))
    target = other.clone().to(DEVICE)
    unpack_blocks(packed[: len(distinct)], target, torch.tensor(distinct, dtype=torch.int64).to(DEVICE))
    expected = other.clone()
    for place, slot in enumerate(distinct):
        expected[slot] = pool[slots[place]]
    assert same(target, expected)


def test_blocks_of_another_kind_are_refused() -> None:
    pool = torch.zeros(3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"blocks of 8 torch.float32 are no blocks of 7 torch.float32"):
        unpack_blocks(torch.zeros(1, 7, device=DEVICE), pool, torch.zeros(1, dtype=torch.int64, device=DEVICE))


pairs = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)), max_size=SLOTS, unique_by=lambda p: p[0]
)


@settings(max_examples=30)
@given(
    pairs=pairs, size=st.sampled_from([63, 96]), kernel_bytes=st.sampled_from([None, 0, 1 << 20]), stores=st.booleans()
)
def test_copies_give_each_slot_its_block(
    pairs: list[tuple[int, int]], size: int, kernel_bytes: int | None, stores: bool
) -> None:
    pool, arena = blocks(size, torch.bfloat16, 1).to(DEVICE), blocks(size, torch.bfloat16, 2)
    if size % 32 == 0:  # as real ones are, which the native library copies
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
