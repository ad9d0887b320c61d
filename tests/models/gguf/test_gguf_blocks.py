"""Comparison of GGUF blocks with the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.models.gguf.blocks import BLOCK_TYPES, BlockMatrix

# Places of the upper bytes of fp16 numbers. If these were random, some numbers would be infinite.
UPPER_BYTES = {
    "Q4_0": [1],
    "Q4_1": [1, 3],
    "Q5_0": [1],
    "Q5_1": [1, 3],
    "Q8_0": [1],
    "IQ4_NL": [1],
    "IQ4_XS": [1],
    "Q2_K": [81, 83],
    "Q3_K": [109],
    "Q4_K": [1, 3],
    "Q5_K": [1, 3],
    "Q6_K": [209],
}


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_stand_for_what_gguf_makes_of_them(name: str) -> None:
    block = BLOCK_TYPES[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (block.elements, block.bytes)
    raw = np.random.default_rng(0).integers(0, 256, (7, 3, block.bytes), dtype=np.uint8)
    raw[..., UPPER_BYTES[name]] &= 0xBF
    rows = raw.reshape(7, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name]))
    matrix = BlockMatrix(name, torch.from_numpy(rows), torch.float32).decode()
    assert matrix.shape == (7, 3 * block.elements)
    assert torch.equal(matrix.dequantize(), expected.bfloat16().float())
    # The product of a value and its scale is exact, so that results do not depend on whether a kernel fuses it.
    per_scale = matrix.shape[1] // matrix.scales.shape[1]
    values = matrix.values.double() * matrix.whole_scales().double().repeat_interleave(per_scale, dim=1)
    assert torch.equal(values, values.float().double())


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_blocks_take_the_bytes_of_the_file(name: str, instruction_set: str) -> None:
    block, kernels = BLOCK_TYPES[name], NativeKernels(1, instruction_set)
    raw = torch.randint(0, 256, (16, 3 * block.bytes), dtype=torch.uint8)
    matrix = BlockMatrix(name, raw, torch.bfloat16).decode()
    packed = kernels.pack(matrix)
    # Scales of 6 bits without offsets take a byte each.
    wide = {"IQ4_XS": 2, "Q3_K": 4}.get(name, 0)
    head = 0 if matrix.table is None else 192
    assert packed.data.nbytes == raw.nbytes + 16 * 3 * wide + head
    assert kernels.fits(packed)
