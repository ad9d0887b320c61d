"""Fused operations give the same bits as the separate operations, on every backend, and change nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import LayerCache, view_pool
from paceline.kernels.interface import HeadNorms, Kernels, NormKind

DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers. The memory between and after the rows is NaN and must not be read."""
    wide = torch.full((*shape[:-1], shape[-1] + 5), NAN, dtype=dtype)
    wide[..., : shape[-1]] = torch.randn(shape).to(dtype)
    return wide[..., : shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("shape", [(5, 63), (2, 1100), (0, 64)])
def test_add_rms_norm_is_add_and_then_rms_norm(
    kernels: Kernels, shape: tuple[int, int], kind: NormKind, dtype: torch.dtype
) -> None:
    x, y, weight = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype), torch.randn(shape[1]).to(dtype)
    before = x.clone()
    total, normed = kernels.add_rms_norm(x, y, weight, 1e-5, kind)
    assert torch.equal(total, kernels.add(x, y))
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5, kind))
    assert torch.equal(x, before)
    assert not normed.isnan().any()


def make_cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, LayerCache]:
    """Make a pool of three slots with blocks of five tokens for two layers, with padding. Return the memory and the
    second layer's cache. The memory begins with one more slot, which does not belong to the cache."""
    elements = 2 * 2 * kv_heads * 5 * head_dim + 7
    pool = torch.full((4 * elements,), NAN, dtype=dtype)
    return pool, view_pool(pool[elements:], elements, 2, kv_heads, 5, head_dim)[1]


def one_by_one(
    kernels: Kernels, queries: Tensor, keys: Tensor, values: Tensor, angles: Any, *rest: Any, norms: HeadNorms | None
) -> Tensor:
    if norms is not None:
        queries = kernels.rms_norm(queries, norms.queries, norms.eps, norms.kind)
        keys = kernels.rms_norm(keys, norms.keys, norms.eps, norms.kind)
    kernels.store_kv(kernels.rotate(keys, *angles), values, *rest)
    return kernels.rotate(queries, *angles)


SHAPES = [(6, 3, 20), (3, 1, 60), (4, 4, 64), (7, 1, 512)]
"""Heads, KV heads and the size of a head."""


# Every shape with both types, and with norms of every kind in turn.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms"),
    [(*shape, norms) for shape, norms in zip(SHAPES, [None, *NormKind])],
)
def test_rotate_and_store_is_its_operations_one_by_one(
    kernels: Kernels, heads: int, kv_heads: int, head_dim: int, norms: NormKind | None, dtype: torch.dtype
) -> None:
    tokens = 4
    queries, keys, values = (poisoned(tokens, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    angles = kernels.rotation(torch.tensor([0, 1, 70, 9000]), torch.rand(head_dim // 2))
    places = torch.tensor([2, 0, 2, 1]), torch.tensor([4, 0, 1, 3])
    group = GroupTables(5, 0, torch.zeros(1, 1, dtype=torch.int32), *places)
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)]
    own = None if norms is None else HeadNorms(weights[0], weights[1], 1e-6, norms)
    (expected_pool, expected_cache), (pool, cache) = (make_cache(kv_heads, head_dim, dtype) for _ in range(2))
    expected = one_by_one(kernels, queries, keys, values, angles, expected_cache, group, norms=own)
    turned = kernels.rotate_and_store(queries, keys, values, *angles, cache, group, own)
    assert torch.equal(turned, expected)
    # All other memory is unchanged. Compare bits, because NaN is not equal to itself.
    assert torch.equal(pool.view(torch.int16), expected_pool.view(torch.int16))
    assert int((~pool.isnan()).sum()) == 2 * tokens * kv_heads * head_dim


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    # Such tokens are at the end of a padded batch.
    pytest.importorskip("triton", reason="the package triton is not installed")
    from paceline.kernels import select_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = select_kernels(device, "triton")
    with device:
        pool, cache = make_cache(2, 16, torch.float32)
        x, angles = torch.randn(3, 2, 16), torch.randn(3, 16)
        group = GroupTables(
            5, 0, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1, -1, -1]), torch.tensor([2, 0, 0])
        )
        for store in (
            lambda group: kernels.store_kv(x, x, cache, group),
            lambda group: kernels.rotate_and_store(x, x, x, angles, angles, cache, group),
        ):
            pool.fill_(NAN)
            store(group)
            assert int((~pool.isnan()).sum()) == 2 * 2 * 16
            assert not cache.keys[1, :, 2].isnan().any()
            store(replace(group, write_slots=torch.full((3,), -1)))
            assert int((~pool.isnan()).sum()) == 2 * 2 * 16
