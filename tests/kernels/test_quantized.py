"""Quantized weights give the same bits as the dequantized matrix, or, in integers, products of weights not rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.kernels import rounds_blocks
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.kernels import INTEGER_PRODUCTS
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.quantized import QuantizedMatrix, quantize_int8
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.triton_kernels.kernels import TritonKernels

DTYPES = (torch.bfloat16, torch.float32)
# For GGUF's types and other formats: bits, has offsets, has fp32 scales, has two scales per block, rounding of weights.
LAYOUTS = {
    "Q4_0": (4, False, False, False, torch.bfloat16),
    "Q4_1": (4, True, False, False, torch.bfloat16),
    "Q4, wide": (4, True, True, False, torch.bfloat16),
    "Q5_0": (5, False, False, False, torch.bfloat16),
    "Q5_1": (5, True, False, False, torch.bfloat16),
    "6 bits": (6, False, True, True, torch.bfloat16),
    "Q8_0": (8, False, False, False, torch.bfloat16),
    "AWQ": (4, True, True, False, torch.float16),
    "GPTQ": (4, False, False, False, torch.float16),
    "GPTQ, 8 bits": (8, True, True, False, torch.float16),
    "W4A16 of fp32": (4, False, True, False, torch.float32),
    "W8A16 of fp32": (8, False, True, False, torch.float32),
}

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Values and scales of other formats: the table or "floats", the kind of scales, values of a group, rounding of weights.
FLOAT_LAYOUTS: dict[str, tuple[torch.Tensor | str, str, int, torch.dtype]] = {
    "MXFP4": (E2M1, "powers", 32, torch.float32),
    "NVFP4 of ModelOpt": (E2M1, "factor", 16, torch.float32),
    "NVFP4": (E2M1, "divisor", 16, torch.bfloat16),
    "IQ4_NL": (torch.arange(-127.0, 128, 16).round(), "fp16", 32, torch.bfloat16),
    "NF4": (torch.linspace(-1, 1, 16) ** 3, "fp32", 64, torch.bfloat16),
    "FP4 of fp16": (torch.linspace(-1, 1, 16) / 3, "fp32", 128, torch.float16),
    "FP8 in blocks": ("floats", "fp32", 128, torch.float32),
    "FP8 of fp16": ("floats", "fp16", 128, torch.float16),
    "MXFP8": ("floats", "powers", 32, torch.bfloat16),
    "FP8 in groups of 16": ("floats", "fp32", 16, torch.float32),
}
# Types with small scales in blocks of 256: bits, has offsets, number of scales in a block.
K_LAYOUTS = {"Q4_K": (4, True, 8), "Q5_K": (5, True, 8), "Q6_K": (6, False, 16)}
UNPACKED = ("NF4", "FP4 of fp16", *(name for name, layout in FLOAT_LAYOUTS.items() if layout[0] == "floats"))
ALL_LAYOUTS = [*LAYOUTS, *FLOAT_LAYOUTS, *K_LAYOUTS]


@pytest.fixture(scope="module", params=instruction_sets())
def native(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(2, request.param)


def random_matrix(layout: str, size_out: int, size_in: int, dtype: torch.dtype) -> QuantizedMatrix:
    if layout in FLOAT_LAYOUTS:
        return random_floats(layout, size_out, size_in, dtype)
    if layout in K_LAYOUTS:
        return random_k_blocks(layout, size_out, size_in, dtype)
    bits, has_offsets, wide, two_scales, rounding = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(size_in)
    half = 1 << bits - 1
    low, high = (0, 2 * half) if has_offsets and bits < 8 else (-half, half)
    values = torch.randint(low, high, (size_out, size_in), generator=generator, dtype=torch.int8)
    shape = (size_out, -(-size_in // 32) * (2 if two_scales else 1))
    # Some scales are subnormal.
    scales = (torch.randn(shape, generator=generator) * 0.01).half()
    scales[::7] /= 1000
    offsets = torch.randn(shape, generator=generator).half() if has_offsets else None
    if wide:
        scales = scales.float() * 63
        offsets = None if offsets is None else offsets.float() * 61
    return QuantizedMatrix(values, scales, offsets, bits, dtype, rounding)


def random_floats(layout: str, size_out: int, size_in: int, dtype: torch.dtype) -> QuantizedMatrix:
    table, kind, group, rounding = FLOAT_LAYOUTS[layout]
    generator = torch.Generator().manual_seed(size_in)
    codes = torch.randint(0, 256, (size_out, size_in), generator=generator)
    groups = 2 * -(-size_in // 32) if group == 16 else -(-size_in // group)
    random = torch.randn(size_out, groups, generator=generator)
    scales, factors = random, None
    if kind == "powers":
        scales = torch.randint(100, 140, random.shape, generator=generator).byte()
        if dtype == torch.float32:  # processors may round subnormal numbers to a bf16 of zero
            scales[0, 0] = 0  # 2 ** -127
    elif kind in ("factor", "divisor"):
        # Small ones are subnormal in this dtype.
        scales = (random.abs() * random.exp()).to(torch.float8_e4m3fn)
        factors = torch.tensor([0.0123, 1.0] if kind == "factor" else [1.0, 45.67])
    elif kind == "fp16":
        scales = random.half()
    if isinstance(table, str):
        codes[codes % 128 == 127] = 1  # NaN
        values = codes.byte().view(torch.float8_e4m3fn)
        return QuantizedMatrix(values, scales, None, 8, dtype, rounding, factors=factors)
    return QuantizedMatrix((codes % 16).to(torch.int8), scales, None, 4, dtype, rounding, table, factors)


def random_k_blocks(layout: str, size_out: int, size_in: int, dtype: torch.dtype) -> QuantizedMatrix:
    """Return a random matrix, with rows of whole blocks."""
    bits, has_offsets, count = K_LAYOUTS[layout]
    generator = torch.Generator().manual_seed(size_in)
    blocks = -(-size_in // 256)
    low, high = (0, 1 << bits) if has_offsets else (-1 << bits - 1, 1 << bits - 1)
    values = torch.randint(low, high, (size_out, 256 * blocks), generator=generator, dtype=torch.int8)
    outer, outer_offsets = (torch.randn(2, size_out, blocks, generator=generator) * 0.01).half()
    least, most = (0, 64) if has_offsets else (-128, 128)
    scales, offsets = torch.randint(least, most, (2, size_out, count * blocks), generator=generator, dtype=torch.int8)
    matrix = QuantizedMatrix(values, scales, None, bits, dtype, outer=outer)
    return replace(matrix, offsets=offsets, outer_offsets=outer_offsets) if has_offsets else matrix


def unrounded(matrix: QuantizedMatrix) -> torch.Tensor:
    """Return the weights, fp64 [out, in], without the rounding to bf16 of `dequantize`."""
    size_in = matrix.shape[1]

    def of_values(numbers: torch.Tensor) -> torch.Tensor:
        """Repeat numbers of blocks, or of halves of blocks, for each value."""
        return numbers.double().repeat_interleave(matrix.group, dim=1)[:, :size_in]

    values = matrix.values.double() if matrix.table is None else matrix.table.double()[matrix.values.int()]
    weights = values * of_values(matrix.whole_scales())
    offsets = matrix.whole_offsets()
    return weights if offsets is None else weights + of_values(offsets)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("size_out", "size_in"), [(1, 32), (33, 96), (60, 320)])
def test_a_quantized_product_is_that_of_the_matrix(
    native: NativeKernels, layout: str, size_out: int, size_in: int, dtype: torch.dtype
) -> None:
    matrix = random_matrix(layout, size_out, size_in, dtype)
    size_in = matrix.shape[1]
    quantized, whole = native.pack(matrix), native.pack(matrix.dequantize())
    x, bias = torch.randn(70, size_in).to(dtype), torch.randn(size_out).to(dtype)
    other = whole if rounds_blocks(native, dtype) or layout in UNPACKED else quantized
    expected, unbiased = native.linear(x, other, bias), native.linear(x, other)
    for rows in (1, 3, 16, 17, 33, 70):
        assert torch.equal(native.linear(x[:rows], quantized, bias), expected[:rows])
        logits, scores = native.logits(x[:rows], quantized), unbiased[:rows]
        assert torch.equal(logits.values, scores.float())
        assert logits.best is not None
        assert logits.best.tolist() == scores.float().numpy().argmax(axis=1).tolist()
    ids = torch.arange(size_out).flip(0)
    assert torch.equal(native.embed(ids, quantized, 3.7), native.embed(ids, whole, 3.7))


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize(("rows", "size_out", "size_in"), [(1, 33, 96), (4, 16, 64), (39, 60, 320)])
def test_products_are_within_the_rounding_of_x_and_the_result(
    native: NativeKernels, layout: str, rows: int, size_out: int, size_in: int
) -> None:
    matrix = random_matrix(layout, size_out, size_in, torch.bfloat16)
    weight, size_in = unrounded(matrix), matrix.shape[1]
    # Blocks of very different sizes, one of them zeros.
    x = (torch.randn(rows, size_in) * torch.randn(rows, size_in).exp()).bfloat16()
    x[0, :32] = 0
    exact = x.double() @ weight.t()
    products = x.double().abs() @ weight.abs().t()
    if rounds_blocks(native, torch.bfloat16) or layout in UNPACKED:
        rounding = 2**-8 * products  # Weights are rounded to the eight bits of bf16.
    else:
        # Only values below 1/128 of the largest one of their block are rounded.
        largest = x.double().abs().unflatten(1, (-1, 32)).amax(2, keepdim=True).expand(-1, -1, 32).flatten(1)
        rounded = largest * (x.double().abs() < largest / 64)
        rounding = 2**-15 * (rounded @ weight.abs().t()) + 2**-20 * products
    bound = 1.01 * rounding + 2**-8 * exact.abs() + 1e-6
    got = native.linear(x, native.pack(matrix)).double()
    assert ((got - exact).abs() <= bound).all()


@pytest.mark.parametrize("layout", ["Q4_1", "Q8_0"])
def test_a_value_that_is_not_finite_reaches_the_result_and_a_tiny_one_does_no_harm(
    native: NativeKernels, layout: str
) -> None:
    packed = native.pack(random_matrix(layout, 20, 96, torch.bfloat16))
    x = torch.randn(5, 96).bfloat16()
    x[0, 40], x[1, 95] = float("nan"), float("inf")
    x[2], x[3, 32:64] = 1e-39, 1e-36
    results = native.linear(x, packed)
    assert results.isfinite().all(dim=1).tolist() == [False, False, True, True, True]
    assert results[2].abs().max() < 1e-30
    x[3, 32:64] = 0
    assert torch.equal(native.linear(x, packed)[3], results[3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_no_whole_blocks(native: NativeKernels, dtype: torch.dtype) -> None:
    matrix = quantize_int8(torch.randn(37, 45).to(dtype))
    quantized, whole = native.pack(matrix), native.pack(matrix.dequantize())
    x = torch.randn(40, 50).to(dtype)[:, 3:48]
    if rounds_blocks(native, dtype):
        expected = native.linear(x, whole)
    else:
        expected = (x.double() @ unrounded(matrix).t()).to(dtype)
    torch.testing.assert_close(native.linear(x, quantized), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(native.linear(x[:1], quantized), native.linear(x, quantized)[:1])
    ids = torch.tensor([36, 0, 16])
    assert torch.equal(native.embed(ids, quantized), native.embed(ids, whole))
    with pytest.raises(IndexError, match="token id lies outside"):
        native.embed(torch.tensor([37]), quantized)


def test_the_reference_computes_with_the_same_matrix(native: NativeKernels) -> None:
    matrix = random_matrix("Q4_1", 48, 64, torch.float32)
    x, reference = torch.randn(5, 64), ReferenceKernels()
    expected = reference.linear(x, reference.pack(matrix))
    torch.testing.assert_close(native.linear(x, native.pack(matrix)), expected)
    assert torch.equal(reference.pack(matrix).data, matrix.dequantize())


@pytest.mark.parametrize("layout", [name for name in ALL_LAYOUTS if name not in UNPACKED])
def test_integer_products_have_the_same_bits_in_all_instruction_sets(layout: str) -> None:
    """The processor decides whether one instruction multiplies and adds, or two do."""
    sets = [name for name in instruction_sets() if name in INTEGER_PRODUCTS]
    if len(sets) < 2:
        pytest.skip("fewer than two instruction sets here multiply in integers")
    matrix = random_matrix(layout, 49, 160, torch.bfloat16)
    x = torch.randn(40, matrix.shape[1]).bfloat16()
    kernels = [NativeKernels(1, name) for name in sets]
    results = [own.linear(x, own.pack(matrix)) for own in kernels]
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_int8_is_within_half_a_step() -> None:
    weight = torch.randn(50, 70)
    weight[3] = 0
    weight[4, :32] = 1e-12
    matrix = quantize_int8(weight)
    steps = matrix.scales.float().repeat_interleave(32, dim=1)[:, :70]
    exact = matrix.values * steps
    assert ((exact - weight).abs() <= steps * 0.5001 + weight.abs() / 1024 + 1e-11).all()
    assert matrix.dequantize()[3].count_nonzero() == 0
    # The result in bf16 is rounded once more.
    torch.testing.assert_close(matrix.dequantize(), exact, rtol=2**-8, atol=0.0)


def test_packed_weights_take_what_their_blocks_take(native: NativeKernels) -> None:
    for layout, bytes_of_32 in {
        "Q4_0": 18,
        "Q4_1": 20,
        "Q4_K": 24,
        "Q8_0": 34,
        "MXFP8": 33,
        "FP8 in blocks": 33,
    }.items():
        assert native.pack(random_matrix(layout, 64, 384, torch.bfloat16)).data.nbytes == 64 * 12 * bytes_of_32
    # A table takes 192 bytes more.
    for layout, bytes_of_32 in {"MXFP4": 17, "NVFP4": 18, "NF4": 18}.items():
        assert native.pack(random_matrix(layout, 64, 384, torch.bfloat16)).data.nbytes == 192 + 64 * 12 * bytes_of_32


def test_triton_says_that_it_cannot() -> None:
    kernels = TritonKernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with pytest.raises(ConfigError, match="--quantization none"):
        kernels.pack(random_matrix("Q4_0", 16, 32, torch.bfloat16))


def test_blocks_of_256_take_what_the_file_takes(native: NativeKernels) -> None:
    for layout, bytes_of_256 in {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}.items():
        assert native.pack(random_matrix(layout, 64, 512, torch.bfloat16)).data.nbytes == 64 * 2 * bytes_of_256
