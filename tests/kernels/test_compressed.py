"""bf16 weights compressed to 12 bits have the bits of the original matrix, and so do results computed with them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.interface import ForwardInputs
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.kernels import COMPRESSING
from paceline.kernels.native.library import COMPRESSED, instruction_sets
from paceline.kernels.packed_weight import PackedWeight

BF16 = torch.bfloat16
SETS = [name for name in instruction_sets() if name in COMPRESSING]
pytestmark = pytest.mark.skipif(not SETS, reason="no instruction set here takes compressed weights")


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels(2, SETS[0])


@pytest.fixture(scope="module")
def whole() -> NativeKernels:
    """The same kernels without compression."""
    return NativeKernels(2, SETS[0], compress=False)


def compressed(kernels: NativeKernels, weight: Tensor) -> PackedWeight:
    packed = kernels.pack(weight)
    assert packed.format == COMPRESSED
    return packed


def make_weight(size_out: int, size_in: int, exceptions: list[int], others: tuple[int, ...] = (1, 3, 200)) -> Tensor:
    """Make a weight with sixteen exponents, and with other exponents at the places `exceptions`."""
    generator = torch.Generator().manual_seed(size_out)
    codes = torch.randint(0, 16, (size_out * size_in,), generator=generator)
    rest = torch.randint(0, 256, (size_out * size_in,), generator=generator)
    exponents = torch.tensor([0, *range(90, 120, 2)])[codes]
    exponents[exceptions] = torch.tensor(others)[torch.arange(len(exceptions)) % len(others)]
    # Zeros have both signs. Subnormal numbers are left out, because the processor treats them as 0.
    bits = (rest >> 7) << 15 | exponents << 7 | torch.where(exponents > 0, rest & 127, 0)
    return bits.to(torch.int32).to(torch.int16).view(BF16).view(size_out, size_in)


# The exceptions of the last ones: two in one tile, the first and the last weight, and neighbours in another group.
SHAPES: list[tuple[int, int, list[int]]] = [
    (1, 32, []),
    (16, 45, []),
    (33, 96, [3167]),
    (49, 160, [0]),
    (64, 96, [0, 1, 96 * 17 + 1, 96 * 64 - 1]),
    (100, 576, [0, 40, 576 * 16, 576 * 16 + 31, 576 * 31 + 32, 576 * 33, 576 * 99 + 575]),
]


@pytest.mark.parametrize(("size_out", "size_in", "exceptions"), SHAPES)
def test_a_product_is_that_of_the_whole_matrix(
    kernels: NativeKernels, whole: NativeKernels, size_out: int, size_in: int, exceptions: list[int]
) -> None:
    # Repeat the rows, so that compression pays in spite of the exceptions.
    copies = -(-1024 * max(len(exceptions), 1) // (size_out * size_in))
    weight = make_weight(size_out, size_in, exceptions)
    weight = torch.cat((weight, *[make_weight(size_out, size_in, [])] * (copies - 1)))
    packed, expected_of = compressed(kernels, weight), whole.pack(weight)
    x, bias = torch.randn(70, size_in).to(BF16), torch.randn(len(weight)).to(BF16)
    expected = whole.linear(x, expected_of, bias)
    for rows in (*range(1, 10), 16, 17, 31, 32, 33, 70):
        assert torch.equal(kernels.linear(x[:rows], packed, bias), expected[:rows])
    logits, scores = kernels.logits(x, packed), whole.logits(x, expected_of)
    assert torch.equal(logits.values, scores.values)
    assert logits.best is not None
    assert scores.best is not None
    assert torch.equal(logits.best, scores.best)
    rows_apart = torch.randn(9, size_in + 7).to(BF16)[:, 3 : 3 + size_in]
    assert torch.equal(kernels.linear(rows_apart, packed), whole.linear(rows_apart, expected_of))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 100), st.data())
def test_nothing_is_lost(size_out: int, size_in: int, data: st.DataObject) -> None:
    kernels, most = NativeKernels(1, SETS[0]), size_out * size_in // 1024
    exceptions = data.draw(st.lists(st.integers(0, size_out * size_in - 1), max_size=most, unique=True))
    weight = make_weight(size_out, size_in, exceptions, (255, 1, 254))  # exponent 255 means infinite or NaN
    packed, ids = compressed(kernels, weight), torch.arange(size_out)
    assert kernels.fits(packed)
    # A NaN comes out as a quiet NaN.
    quiet = torch.where(weight.isnan(), weight.view(torch.int16) | 64, weight.view(torch.int16))
    assert torch.equal(kernels.embed(ids, packed).view(torch.int16), quiet)


def test_what_pads_a_matrix_needs_no_code(kernels: NativeKernels, whole: NativeKernels) -> None:
    # Zeros pad the last tiles, and no exponent of a weight is 0.
    exponents = torch.arange(17 * 45) % 16 + 100
    weight = (exponents << 7 | 85).to(torch.int16).view(BF16).view(17, 45)
    x, ids = torch.randn(5, 45).to(BF16), torch.arange(17)
    packed = compressed(kernels, weight)
    assert torch.equal(kernels.embed(ids, packed), weight)
    assert torch.equal(kernels.linear(x, packed), whole.linear(x, whole.pack(weight)))


def test_it_takes_three_quarters(kernels: NativeKernels, whole: NativeKernels) -> None:
    weight = torch.randn(1536, 576).to(BF16)
    ratio = compressed(kernels, weight).data.nbytes / whole.pack(weight).data.nbytes
    assert 0.75 < ratio < 0.76


def test_what_does_not_fit_is_told_and_with_the_rest_one_can_compute(kernels: NativeKernels) -> None:
    weight = compressed(kernels, make_weight(100, 576, [0, 40, 576 * 33, 576 * 99 + 575]))
    assert kernels.fits(weight)
    starts, x = 7 * 18 * 4 * 192 + 32, torch.randn(40, 576).to(BF16)  # after the parts and the table of exponents
    exceptions = starts + 4 * 4
    assert weight.data.nbytes == exceptions + 5 * 8
    fitting = set()
    for place in range(starts, weight.data.nbytes):
        data = weight.data.clone()
        data[place] ^= 129
        damaged = dataclasses.replace(weight, data=data)
        if kernels.fits(damaged):
            fitting.add(place)
            for rows in (1, 40):
                kernels.linear(x[:rows], damaged)
            kernels.embed(torch.arange(100), damaged)
    # These bytes are the weight and its place in the tile, in which damage cannot be noticed.
    assert fitting == {exceptions + 8 * i + byte for i in range(4) for byte in (4, 6, 7)} | {
        exceptions + 32 + byte for byte in (4, 5, 6, 7)
    }
    for data in (weight.data[:-1], weight.data[:-8], weight.data[:-48], weight.data[:100], weight.data[:0]):
        assert not kernels.fits(dataclasses.replace(weight, data=data))
    assert not kernels.fits(dataclasses.replace(weight, size_out=113))
    assert not kernels.fits(dataclasses.replace(weight, format=3))


def test_a_matrix_of_many_exponents_stays_whole(kernels: NativeKernels, whole: NativeKernels) -> None:
    weight = (torch.randn(64, 64) * 2.0 ** torch.randint(-40, 40, (64, 64))).to(BF16)
    x = torch.randn(3, 64).to(BF16)
    packed = kernels.pack(weight)
    assert packed.format is None
    assert torch.equal(kernels.linear(x, packed), whole.linear(x, whole.pack(weight)))


def test_layers_of_both_forms_are_replayed(kernels: NativeKernels, paged_case: Any) -> None:
    embedding = kernels.pack(torch.randn(40, 96).to(BF16))
    matrices = [torch.randn(60, 96) for _ in range(4)]
    matrices[1] *= 2.0 ** torch.randint(-40, 0, (60, 96))
    weights = [kernels.pack(matrix.to(BF16)) for matrix in matrices]
    assert [weight.format for weight in weights] == [COMPRESSED, None, COMPRESSED, COMPRESSED]

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        first, *others = [kernels.linear(x, own) for own in weights]
        for other in others:
            first = kernels.silu_and_mul(first, other)
        return first

    case, replay = paged_case(kernels, [(2, 30)]), kernels.compile(forward)
    for tokens in (1, 7, 40):
        ids = torch.arange(tokens)
        inputs = ForwardInputs(ids, ids, [case.cache], case.batch)
        assert torch.equal(replay(inputs), forward(inputs))


def test_files_of_both_forms_have_names_of_their_own(kernels: NativeKernels) -> None:
    assert len({kernels.packing, NativeKernels(1, "portable").packing}) == 2
