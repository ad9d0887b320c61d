"""Copies of blocks by Triton keep every bit and change nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the package triton is not installed")

from paceline.kernels.triton_kernels.blocks import pack_blocks, unpack_blocks
from tests.kernels.test_block_copies import DEVICE, blocks, check_copies, pairs, same


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
    with pytest.raises(ValueError, match=r"target blocks have 8 torch.float32, source blocks 7 torch.float32"):
        unpack_blocks(torch.zeros(1, 7, device=DEVICE), pool, torch.zeros(1, dtype=torch.int64, device=DEVICE))


@settings(max_examples=30)
@given(pairs=pairs, stores=st.booleans())
def test_small_blocks_are_moved_by_a_kernel(pairs: list[tuple[int, int]], stores: bool) -> None:
    check_copies(pairs, size=63, kernel_bytes=1 << 20, stores=stores)
