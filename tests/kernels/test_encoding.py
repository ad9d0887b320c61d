"""The operations of encoders, of each backend against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.kernels.interface import Kernels

DTYPES = [torch.float32, torch.bfloat16]
on_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(found: Tensor, expected: Tensor) -> None:
    """Compare with a result in fp32."""
    tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@on_dtypes
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 16), (9, 2, 72), (150, 3, 64), (513, 2, 20)])
def test_full_attention(kernels: Kernels, dtype: torch.dtype, rows: int, heads: int, head_dim: int) -> None:
    queries, keys, values = torch.randn(3, rows, heads, head_dim).to(dtype)
    queries = queries[rows // 3 :]
    found = kernels.full_attention(queries, keys, values, 0.3)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * 0.3
    close(found, torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()))
    assert found.dtype == dtype


@on_dtypes
def test_rowwise_operations(kernels: Kernels, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 40).to(dtype), torch.randn(40).to(dtype), torch.randn(40).to(dtype)
    wide = x.float()
    close(kernels.clamp(x, -0.5, 0.25), wide.clamp(-0.5, 0.25))
    close(kernels.silu(x), wide / (1 + torch.exp(-wide)))
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    close(kernels.gelu_tanh(x), 0.5 * wide * (1 + torch.tanh(inner)))
    normed = (wide - wide.mean(1, keepdim=True)) / (wide.var(1, correction=0, keepdim=True) + 0.1).sqrt()
    close(kernels.layer_norm(x, weight, bias, 0.1), normed * weight.float() + bias.float())
    close(kernels.layer_norm(x, weight, None, 0.1), normed * weight.float())


@on_dtypes
@pytest.mark.parametrize(("rows", "size_in", "size_out"), [(1, 20, 33), (40, 64, 48), (150, 96, 200)])
def test_a_linear_layer_with_bounds(
    kernels: Kernels, dtype: torch.dtype, rows: int, size_in: int, size_out: int
) -> None:
    # The weights are so large that both bounds are met, whatever the random numbers are.
    x, matrix = torch.randn(rows, size_in).to(dtype), (10 * torch.randn(size_out, size_in)).to(dtype)
    weight, bounds = kernels.pack(matrix), torch.tensor([-0.5, 1.25, -3.0, 2.0])
    found = kernels.clipped_linear(x, weight, bounds)
    expected = kernels.linear(x.clamp(-0.5, 1.25), weight).clamp(-3.0, 2.0)
    assert torch.equal(found, expected)
    assert (found.min(), found.max()) == (-3.0, 2.0)
    endless = torch.tensor([-math.inf, math.inf, -math.inf, math.inf])
    assert torch.equal(kernels.clipped_linear(x, weight, endless), kernels.linear(x, weight))
    x[0, 0] = math.nan
    assert kernels.clipped_linear(x, weight, bounds)[0].isnan().all()


@on_dtypes
@pytest.mark.parametrize("size", [1, 16, 40, 100])
def test_layer_norms_and_gelus_of_any_size(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    x, y, up = (3 * torch.randn(3, 7, size)).to(dtype)
    weight, bias = torch.randn(2, size).to(dtype)
    close(kernels.gelu(x), torch.nn.functional.gelu(x.float()))
    activated = kernels.gelu_and_mul(x, up)
    close(activated, torch.nn.functional.gelu(x.float()).to(dtype).float() * up.float())
    for own_bias in (bias, None):
        normed = kernels.add_layer_norm(x, y, weight, own_bias, 0.1)
        assert torch.equal(normed, kernels.layer_norm(kernels.add(x, y), weight, own_bias, 0.1))


def test_gelu_is_exact_for_large_and_small_numbers(kernels: Kernels) -> None:
    x = torch.cat((torch.linspace(-14, 14, 4001), torch.tensor([0.0, 1e-30, -1e-30, 1e4, -1e4]))).view(-1, 1)
    expected = torch.nn.functional.gelu(x.double()).float()
    torch.testing.assert_close(kernels.gelu(x), expected, atol=1e-6, rtol=1e-6)
    assert kernels.gelu(torch.full((1, 1), math.nan)).isnan().all()


@on_dtypes
@pytest.mark.parametrize("name", ["native", "reference"])
def test_layer_norms_and_gelus_of_a_row_depend_on_no_other_row(name: str, dtype: torch.dtype) -> None:
    kernels = select_kernels(torch.device("cpu"), name)
    x, y = torch.randn(2, 300, 72).to(dtype)
    weight, bias = torch.randn(2, 72).to(dtype)

    def results(rows: slice) -> list[Tensor]:
        own, other = x[rows], y[rows]
        norms = [kernels.add_layer_norm(own, other, weight, bias, 1e-12), kernels.layer_norm(own, weight, bias, 1e-12)]
        # Those of the reference are torch's, which may compute the elements at the end of a tensor in another way.
        return norms + ([kernels.gelu(own), kernels.gelu_and_mul(own, other)] if name == "native" else [])

    whole = results(slice(None))
    for place in (0, 1, 133, 299):
        alone = results(slice(place, place + 1))
        assert all(torch.equal(one[0], every[place]) for one, every in zip(alone, whole, strict=True))
