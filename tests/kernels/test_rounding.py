"""Matrices that are rounded to fewer bits: each weight becomes the nearest number of its format."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.online_quantization import ONLINE_FORMATS
from paceline.kernels.rounding import round_fp8, round_int4, round_matrix, round_mxfp4, round_mxfp8

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The magnitudes of E2M1, as the specification lists them. The index of each is its code."""
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The magnitudes of E4M3. The index of each is its code."""


def random_matrix(rows: int = 24, columns: int = 200, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a matrix with rows and blocks of very different sizes, and some of zeros."""
    generator = torch.Generator().manual_seed(7)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= torch.exp2(torch.randint(-12, 6, (rows, 1), generator=generator))
    matrix[:, 32:64] *= torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator))
    matrix[3] = 0
    matrix[5, 64:96] = 0
    return matrix.to(dtype)


def nearest(values: Tensor, magnitudes: Tensor) -> Tensor:
    """Return the nearest number to each value, fp64; of two, the one with the even code."""
    values = values.double()
    distances = (values.abs().unsqueeze(-1) - magnitudes.double()).abs()
    odd = torch.arange(len(magnitudes)) % 2
    best = distances.min(-1, keepdim=True).values
    codes = torch.where(distances == best, odd, 2).argmin(-1)
    return magnitudes.double()[codes] * values.sign()


def in_blocks(matrix: Tensor, scales_of: Callable[[Tensor], Tensor], magnitudes: Tensor) -> Tensor:
    """Return a matrix that is rounded in blocks of 32 values with scales that a function finds, fp64."""
    rounded = torch.zeros(matrix.shape, dtype=torch.float64)
    for first in range(0, matrix.shape[1], 32):
        block = matrix[:, first : first + 32].double()
        largest = block.abs().amax(1, keepdim=True)
        scales = torch.where(largest > 0, scales_of(largest), 1.0)
        rounded[:, first : first + 32] = nearest(block / scales, magnitudes) * scales
    return rounded


def power_scales(exponent: int) -> Callable[[Tensor], Tensor]:
    """Return a function that finds the scales of microscaling formats for largest magnitudes."""

    def scales(largest: Tensor) -> Tensor:
        power = torch.exp2(largest.log2().floor())
        return torch.where(largest >= 1.75 * power, 2 * power, power) / 2**exponent

    return scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp4_has_the_nearest_numbers(dtype: torch.dtype) -> None:
    matrix = random_matrix(dtype=dtype)
    assert torch.equal(round_mxfp4(matrix).dequantize().double(), in_blocks(matrix, power_scales(2), E2M1))


def test_mxfp8_has_the_nearest_numbers() -> None:
    matrix = random_matrix()
    assert torch.equal(round_mxfp8(matrix).dequantize().double(), in_blocks(matrix, power_scales(8), E4M3))


def test_fp8_has_the_nearest_numbers_with_a_scale_for_each_output() -> None:
    matrix = random_matrix(dtype=torch.float32)
    scales = matrix.abs().amax(1, keepdim=True) / 448
    scales[3] = 1
    rounded = round_fp8(matrix).dequantize()
    assert torch.equal(rounded, (nearest(matrix / scales, E4M3).float() * scales))
    assert rounded.abs().amax(1).allclose(matrix.abs().amax(1))


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0]])
    expected = torch.tensor([[6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0]])
    assert torch.equal(round_mxfp4(ties).dequantize(), expected.float())


@pytest.mark.parametrize(
    ("largest", "scale"), [(4.0, 1), (6.0, 1), (6.9, 1), (7.0, 2), (8.0, 2), (2.0**-140, 2.0**-127), (3.0, 0.5)]
)
def test_a_block_is_cut_by_less_than_it_is_rounded(largest: float, scale: float) -> None:
    rounded = round_mxfp4(torch.full((1, 32), largest))
    assert rounded.whole_scales().item() == scale
    assert round_mxfp8(torch.full((1, 32), 448.0)).dequantize().unique().item() == 448


def test_int4_searches_the_scale_of_each_block() -> None:
    matrix = torch.randn(64, 320, generator=torch.Generator().manual_seed(3))
    rounded = round_int4(matrix)
    assert rounded.bits == 4
    assert rounded.offsets is None
    assert (rounded.values.min(), rounded.values.max()) == (-8, 7)
    exact = rounded.values.view(64, 10, 32) * rounded.scales.float()[:, :, None]
    blocks = matrix.view(64, 10, 32)
    plain = blocks.gather(2, blocks.abs().argmax(2, keepdim=True)) / -8
    without_search = (blocks / plain).round().clamp(-8, 7) * plain
    assert (exact - blocks).square().sum() < 0.92 * (without_search - blocks).square().sum()
    nearest_codes = (blocks / rounded.scales.float()[:, :, None]).round().clamp(-8, 7)
    assert torch.equal(nearest_codes, rounded.values.view(64, 10, 32).float())


ERRORS = {"fp8": 0.028, "mxfp8": 0.028, "mxfp4": 0.13, "int8": 0.009, "int4": 0.10}
"""Most relative errors of normal weights."""


@pytest.mark.parametrize("form", ONLINE_FORMATS)
@pytest.mark.parametrize("columns", [64, 200])
def test_the_error_is_that_of_the_format(form: str, columns: int) -> None:
    matrix = torch.randn(64, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = round_matrix(matrix, form).dequantize()  # type: ignore[arg-type]
    assert whole.dtype == matrix.dtype
    assert whole.shape == matrix.shape
    error = ((whole - matrix).float().norm() / matrix.float().norm()).item()
    assert ERRORS[form] / 2 < error < ERRORS[form]


@pytest.mark.parametrize("form", ONLINE_FORMATS)
def test_rounding_in_parts_changes_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded() -> Tensor:
        return round_matrix(random_matrix(), form).dequantize()  # type: ignore[arg-type]

    whole = rounded()
    monkeypatch.setattr("paceline.kernels.quantized._AT_A_TIME", 7 * 200)
    assert torch.equal(rounded(), whole)


@pytest.mark.parametrize("form", ONLINE_FORMATS)
@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16).max, 2.0**-133])
def test_extreme_weights_stay_finite(form: str, value: float) -> None:
    found = round_matrix(torch.full((2, 64), value, dtype=torch.bfloat16), form)  # type: ignore[arg-type]
    assert found.dequantize().isfinite().all()


@pytest.mark.parametrize("form", ONLINE_FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused(form: str, value: float) -> None:
    matrix = random_matrix()
    matrix[20, 199] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        round_matrix(matrix, form)  # type: ignore[arg-type]
