"""Products in which weights and activations are signed bytes (W8A8) have the same bits in every instruction set."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.core.experts import Routing
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import LayerState
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.quantized import QuantizedMatrix, multiply_bytes, round_to_bytes
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.triton_kernels.kernels import TritonKernels

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module", params=instruction_sets())
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


def random_bytes(size_out: int, size_in: int, dtype: torch.dtype, input_scale: float = 0.0) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(size_in)
    values = torch.randint(-128, 128, (size_out, size_in), generator=generator, dtype=torch.int8)
    values[0] = -128
    scales = torch.rand(size_out, 1, generator=generator) * 0.01
    return QuantizedMatrix(values, scales, None, 8, dtype, torch.float32, input_scale=input_scale)


def expected(matrix: QuantizedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert matrix.input_scale is not None
    product = multiply_bytes(x, matrix.values, matrix.scales, matrix.input_scale)
    return (product if bias is None else product + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("input_scale", [0.0, 0.021])
@pytest.mark.parametrize(("size_out", "size_in"), [(1, 3), (33, 96), (90, 330), (40, 1500)])
def test_a_row_has_the_bits_of_the_reference_in_any_batch(
    native: NativeKernels, size_out: int, size_in: int, input_scale: float, dtype: torch.dtype
) -> None:
    matrix = random_bytes(size_out, size_in, dtype, input_scale)
    packed = native.pack(matrix)
    assert native.fits(packed)
    x = (torch.randn(70, size_in) * torch.randn(70, 1).exp()).to(dtype)
    x[0] = 0
    x[1, 0] = x[1].abs().max() * 3
    x[2] = -x[2].abs().max()  # with the least weights, the largest sums
    bias = torch.randn(size_out).to(dtype)
    for rows in (1, 3, 16, 17, 33, 70):
        assert torch.equal(native.linear(x[:rows], packed, bias), expected(matrix, x[:rows], bias))
        logits = native.logits(x[:rows], packed)
        assert torch.equal(logits.values, expected(matrix, x[:rows]).float())
    reference = ReferenceKernels()
    assert torch.equal(reference.linear(x, reference.pack(matrix), bias), expected(matrix, x, bias))
    ids = torch.arange(size_out).flip(0)
    rows_of_matrix = (matrix.values.float() * matrix.scales)[ids].to(dtype)
    assert torch.equal(native.embed(ids, packed), rows_of_matrix)
    assert torch.equal(reference.embed(ids, reference.pack(matrix)), rows_of_matrix)


def test_activations_are_rounded_to_the_nearest() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.49], [0.0, 0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 5.0, 200.0]])
    values, scales = round_to_bytes(x)
    assert values.tolist() == [[127, 0, 2, -2, 126], [0, 0, 0, 0, 0], [-127, 0, 2, 2, 100]]
    assert scales.flatten().tolist() == [1.0, 0.0, 2.0]
    values, scales = round_to_bytes(torch.tensor([[1.0, -1000.0, 1000.0, 0.25]]), 0.5)
    assert values.tolist() == [[2, -128, 127, 0]]


@pytest.mark.parametrize("input_scale", [0.0, 0.5])
def test_a_value_that_is_not_finite_reaches_the_result(native: NativeKernels, input_scale: float) -> None:
    packed = native.pack(random_bytes(20, 96, torch.bfloat16, input_scale))
    x = torch.randn(5, 96).bfloat16()
    x[0, 40], x[1, 95], x[2] = float("nan"), float("inf"), 1e-39
    results = native.linear(x, packed)
    assert results.isfinite().all(dim=1).tolist() == [False, False, True, True, True]
    assert results[2].count_nonzero() == 0


def gated(kernels: Kernels, x: torch.Tensor, matrices: list[QuantizedMatrix]) -> torch.Tensor:
    """Compute a recorded pass with a gated layer, and joined layers."""
    rows, (gate, up, *others) = kernels.pack(x), [kernels.pack(matrix) for matrix in matrices]
    ids = torch.arange(len(x))

    def forward(inputs: ForwardInputs) -> torch.Tensor:
        own = kernels.embed(inputs.token_ids, rows)
        sums = kernels.silu_and_mul(kernels.linear(own, gate), kernels.linear(own, up))
        for other in others:
            sums = kernels.add(sums, kernels.linear(own, other))
        return sums

    batch = AttentionBatch((0, len(x)), (len(x),), ())
    return kernels.compile(forward)(ForwardInputs(ids, ids, [LayerState((torch.empty(0),))], batch))


def test_layers_with_other_scales_of_x_are_not_computed_together(native: NativeKernels) -> None:
    x = torch.randn(9, 96)
    for scales in ((0.0, 0.0, 0.0, 0.0), (0.1, 0.02, 0.03, 0.2), (0.0, 0.1, 0.0, 0.1)):
        matrices = [random_bytes(48, 96, torch.float32, scale) for scale in scales]
        whole = QuantizedMatrix(matrices[0].values, torch.ones(48, 3).half(), None, 8, torch.float32)
        want = gated(ReferenceKernels(), x, [*matrices, whole])
        # The layer that is no product of bytes has another order of addition.
        torch.testing.assert_close(gated(native, x, [*matrices, whole]), want, atol=1e-3, rtol=1e-4)


def test_experts(native: NativeKernels) -> None:
    kernels: list[Kernels] = [native, ReferenceKernels()]
    x, routing = torch.randn(40, 64), Routing(2)
    shapes = ((32, 64), (32, 64), (64, 32))
    matrices = [[random_bytes(*shape, torch.float32) for _ in range(4)] for shape in shapes]
    for part in matrices:
        for index, matrix in enumerate(part):
            matrix.scales.mul_(1 + index)
    results = []
    for own in kernels:
        gate, up, down = ([own.pack(matrix) for matrix in part] for part in matrices)
        logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        ids, weights = own.choose_experts(logits, routing)
        experts = own.index_experts(ExpertWeights(gate, up, down, "silu"))
        results.append(own.experts(x, ids, weights, experts))
    torch.testing.assert_close(*results)


def test_triton_says_that_it_cannot() -> None:
    kernels = TritonKernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with pytest.raises(ConfigError, match="--quantization none"):
        kernels.pack(random_bytes(16, 32, torch.bfloat16))


def test_experts_with_fixed_scales_are_refused() -> None:
    kernels = NativeKernels(1)
    packed = [kernels.pack(random_bytes(32, 32, torch.float32, 0.1))]
    with pytest.raises(ConfigError, match="fixed scales; choose --quantization none"):
        kernels.index_experts(ExpertWeights(packed, packed, packed, "silu"))
