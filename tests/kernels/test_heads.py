"""Operations of attention over latent vectors: products for each head, and a cache whose keys are values too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import view_pool
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16]
Teams = list[NativeKernels]


@pytest.fixture(scope="session", params=instruction_sets())
def teams(request: pytest.FixtureRequest) -> Teams:
    return [NativeKernels(threads, request.param) for threads in (1, 3)]


def randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "size_in", "size_out"), [(0, 2, 8, 8), (1, 16, 128, 512), (5, 3, 20, 36), (40, 2, 65, 70)]
)
def test_products_of_heads(
    kernels: Kernels, tokens: int, heads: int, size_in: int, size_out: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = randn(generator, dtype, heads, size_out, size_in) * size_in**-0.5
    wide = randn(generator, dtype, tokens, heads, size_in + 7)
    expected = torch.einsum("thi,hoi->tho", wide[..., :size_in].double(), weight.double())
    packed = kernels.pack(weight)
    assert (packed.heads, packed.size_out, packed.size_in) == (heads, size_out, size_in)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for x in (wide[..., :size_in], wide[..., :size_in].contiguous()):
        found = kernels.linear_heads(x, packed)
        assert found.shape == (tokens, heads, size_out)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vectors_of_heads_are_joined(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = randn(generator, dtype, 50, 3, 20), randn(generator, dtype, 50, 3, 7)
    assert torch.equal(kernels.concat(x, y), torch.cat((x, y), dim=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_others(teams: Teams, dtype: torch.dtype, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows, heads = data.draw(st.sampled_from([1, 2, 8, 17, 33, 70])), data.draw(st.integers(1, 5))
    size_in, size_out = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 140))
    weight, x = randn(generator, dtype, heads, size_out, size_in), randn(generator, dtype, rows, heads, size_in)
    results = []
    for kernels in teams:
        packed = kernels.pack(weight)
        assert kernels.fits(packed)
        results += [
            kernels.linear_heads(x, packed),
            torch.cat([kernels.linear_heads(row, packed) for row in x.split(1)]),
            torch.cat([kernels.linear_heads(part, packed) for part in x.split(7)]),
            # The product of a head is that of a linear layer.
            torch.stack([kernels.linear(x[:, h], kernels.pack(weight[h])) for h in range(heads)], 1),
        ]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize(("heads", "size_in"), [(2, 16), (3, 17)])
def test_operands_of_another_shape_are_refused(heads: int, size_in: int) -> None:
    packed = NativeKernels(1).pack(torch.zeros(3, 5, 16))
    with pytest.raises(ValueError, match="the weight takes"):
        NativeKernels(1).linear_heads(torch.zeros(4, heads, size_in), packed)


class Latent:
    """A context of latent vectors in a pool that is NaN everywhere else, and queries for each of its tokens."""

    def __init__(self, kernels: Kernels, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        block_tokens, slots = 16, 40
        self._vectors = randn(generator, dtype, tokens, 1, head_dim)
        self._queries = randn(generator, dtype, tokens, heads, head_dim)
        elements = 2 * block_tokens * head_dim  # of two layers
        pool = torch.full((slots * elements,), float("nan"), dtype=dtype)
        self._cache = view_pool(pool, elements, 2, 1, block_tokens, head_dim, planes=1)[1]
        table = torch.randperm(slots, generator=generator, device="cpu").int().to(pool.device)
        positions = torch.arange(tokens)
        places = table[positions // block_tokens].long(), positions % block_tokens
        self._group = GroupTables(block_tokens, 0, table[: -(-tokens // block_tokens)].unsqueeze(0), *places)
        kernels.store_kv(self._vectors, self._vectors, self._cache, self._group)
        assert pool.view(slots, 2, -1)[:, 0].isnan().all()
        self._kernels = kernels

    def attend(self, first: int, end: int) -> Tensor:
        """Return attention of tokens [first, end)."""
        batch = AttentionBatch((0, end - first), (end,), (self._group,))
        return self._kernels.attention(self._queries[first:end], self._cache, batch, self._group, 0.1, 0.0)

    def expected(self, first: int, end: int) -> Tensor:
        """Return the same by the formula."""
        vectors, parts = self._vectors[:, 0].double(), []
        for token in range(first, end):
            weights = (self._queries[token].double() @ vectors[: token + 1].T * 0.1).softmax(-1)
            parts.append(weights @ vectors[: token + 1])
        return torch.stack(parts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "head_dim", "spans"), [(16, 576, [(129, 130), (124, 130)]), (128, 576, [(140, 143)])]
)
def test_attention_of_deepseek_s_sizes(
    kernels: Kernels, heads: int, head_dim: int, spans: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    if kernels.name.startswith("triton") and heads > 16 and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter is slow, and more heads are further tiles of the same kind")
    case = Latent(kernels, spans[0][1], heads, head_dim, dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for span in spans:
        torch.testing.assert_close(case.attend(*span).double(), case.expected(*span), atol=tolerance, rtol=tolerance)


@pytest.mark.slow
def test_attention_to_latent_vectors(kernels: Kernels) -> None:
    case = Latent(kernels, 300, 6, 48, torch.float32)
    for span in ((299, 300), (283, 300), (0, 17)):
        torch.testing.assert_close(case.attend(*span).double(), case.expected(*span), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_to_latent_vectors_has_the_same_bits_in_any_chunk(teams: Teams, dtype: torch.dtype) -> None:
    results = []
    for kernels in teams:
        case = Latent(kernels, 300, 24, 96, dtype)
        results += [
            case.attend(200, 300),
            torch.cat([case.attend(first, first + 1) for first in range(200, 300)]),
            torch.cat([case.attend(200, 233), case.attend(233, 300)]),
        ]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_the_reference_keeps_matrices_of_heads_dense() -> None:
    weight: Any = torch.randn(3, 8, 5).mT
    assert ReferenceKernels().pack(weight).data.is_contiguous()
