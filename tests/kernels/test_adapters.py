"""Adapters of linear layers: every backend adds the same products, and a row depends on no other row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.adapters import AdapterTable, LowRank
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets

SIZES = [(48, 80), (100, 33), (16, 200)]
RANKS = (8, 3, 1, 17)
"""Ranks of the adapters in the slots. The last two adapters have factors, and the last one has a bias."""


def make_table(size_in: int, size_out: int, dtype: torch.dtype) -> AdapterTable:
    generator = torch.Generator("cpu").manual_seed(size_in)
    table = AdapterTable(2, len(RANKS) + 1, dtype, torch.get_default_device())
    for slot, rank in enumerate(RANKS):
        down, up = (torch.randn(rank, size, generator=generator, device="cpu") for size in (size_in, size_out))
        bias = torch.randn(size_out, generator=generator, device="cpu").to(dtype) if slot == 3 else None
        factors = torch.rand(size_out, generator=generator, device="cpu") + 0.5 if slot >= 2 else None
        # The second layer has no part of any adapter.
        table.place(slot, [LowRank(down.to(dtype), up.to(dtype), 0.3 * (slot + 1), bias, factors), None])
    return table


def inputs(size_in: int, size_out: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and y, and the slots of rows, in runs of one to nine."""
    generator = torch.Generator("cpu").manual_seed(rows)
    x, y = (torch.randn(rows, size, generator=generator, device="cpu").to(dtype) for size in (size_in, size_out))
    runs = torch.randint(-1, len(RANKS) + 1, (rows,), generator=generator, device="cpu")
    lengths = torch.randint(1, 10, (rows,), generator=generator, device="cpu")
    slots = runs.repeat_interleave(lengths)[:rows]
    device = torch.get_default_device()
    return x.to(device), y.to(device), slots.to(device)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size_in", "size_out"), SIZES)
def test_rows_get_the_products_of_their_adapters(
    kernels: Kernels, dtype: torch.dtype, adapter_dtype: torch.dtype, size_in: int, size_out: int
) -> None:
    table = make_table(size_in, size_out, adapter_dtype)
    x, y, rows = inputs(size_in, size_out, 21, dtype)
    wanted = y.double()
    for row, slot in enumerate(rows.tolist()):
        if 0 <= slot < len(RANKS):
            part = table.layers[0].parts[slot]
            assert part is not None
            added = x[row].double() @ part.down.double().T @ part.up.double()
            wanted[row] *= 1 if part.factors is None else part.factors.double()
            wanted[row] += part.scale * (added + (0 if part.bias is None else part.bias.double()))
    found, other = y.clone(), y.clone()
    kernels.adapt(found, x, table.layers[0], rows)
    kernels.adapt(other, x, table.layers[1], rows)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    untouched = (rows < 0) | (rows == len(RANKS))
    assert torch.equal(found[untouched], y[untouched])
    assert torch.equal(other, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_a_row_has_the_same_bits_alone_and_in_any_mix(instruction_set: str, dtype: torch.dtype) -> None:
    table = make_table(100, 72, dtype)
    x, y, rows = inputs(100, 72, 50, dtype)
    results = []
    for threads in (1, 3):
        kernels = NativeKernels(threads, instruction_set)
        results.append(y.clone())
        kernels.adapt(results[-1], x, table.layers[0], rows)
        for order in (torch.arange(50).flip(0), torch.randperm(50, generator=torch.Generator().manual_seed(1))):
            mixed = y[order]
            kernels.adapt(mixed, x[order], table.layers[0], rows[order])
            results.append(torch.empty_like(y).index_copy_(0, order, mixed))
        alone = y.clone()
        for row in range(50):
            kernels.adapt(alone[row : row + 1], x[row : row + 1], table.layers[0], rows[row : row + 1])
        results.append(alone)
    for result in results[1:]:
        assert torch.equal(result, results[0])
