"""The plain loops with which kernels are compared."""

from __future__ import annotations

import pytest
import torch

from bench.compute.floors import FLAGS, Floors
from paceline.kernels.native.library import instruction_sets


def test_all_instruction_sets_have_flags() -> None:
    assert set(instruction_sets()) <= set(FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_rates_are_positive(threads: int) -> None:
    floors = Floors(instruction_sets()[0], threads)
    rates = floors.rates(1)
    assert min(rates.read, rates.fp32) > 0
    blocks = torch.zeros(4, 1024, dtype=torch.int32)
    addresses = blocks.data_ptr() + torch.arange(4) * blocks[0].nbytes
    assert floors.read_blocks(addresses, blocks[0].nbytes, 1) > 0
