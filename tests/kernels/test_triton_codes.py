"""Triton kernels over caches of 8 bits: the bytes of the reference, and attention that depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import view_coded_pool
from paceline.kernels.codes import KVCode
from paceline.kernels.interface import HeadNorms, Kernels, NormKind
from paceline.kernels.reference import ReferenceKernels
from tests.kernels.test_coded_caches import attend, stored
from tests.kernels.test_triton_kernels import DEVICE, product

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="the package triton is not installed")

FP32, BF16 = torch.float32, torch.bfloat16
REFERENCE = ReferenceKernels()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if DEVICE.type == "cpu":  # rows of a product depend on their number with some BLAS libraries
        monkeypatch.setattr(np, "matmul", product)
    return select_kernels(DEVICE, "triton")


@pytest.fixture(autouse=True)
def device() -> Any:
    with DEVICE:
        yield


@pytest.mark.filterwarnings("ignore:invalid value")  # from numpy in the interpreter
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("code", KVCode)
def test_stored_bytes_are_those_of_the_reference(triton: Kernels, code: KVCode, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected, _ = stored(REFERENCE, code, dtype)
    torch.manual_seed(0)
    found, _ = stored(triton, code, dtype)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("code", KVCode)
def test_rows_that_are_not_finite_have_the_scale_nan_and_padding_is_not_stored(triton: Kernels, code: KVCode) -> None:
    before, pool = torch.zeros(2, 2 * 16 * 66, dtype=torch.uint8)  # slot -1 and the pool
    cache = view_coded_pool(pool, len(pool), 1, 1, 16, 64, code)[0]
    keys = torch.ones(4, 1, 64)
    keys[0, 0, 9], keys[1, 0, 2] = float("inf"), float("nan")
    places = torch.tensor([3, 4, 5, 6])
    group = GroupTables(16, 0, torch.zeros(1, 1).int(), torch.tensor([0, 0, 0, -1]), places)
    triton.store_kv(keys, -keys, cache, group)
    assert cache.scales is not None
    for scales in (cache.scales.keys, cache.scales.values):
        assert scales[0, 0, 0, 3:7].isnan().tolist() == [True, True, False, False]
        assert scales[0, 0, 0, 6] == 0
    assert not before.any()


@pytest.mark.parametrize("code", KVCode)
def test_fused_stores_write_what_separate_ones_do(triton: Kernels, code: KVCode) -> None:
    weights = torch.rand(32) + 0.5
    norms = HeadNorms(weights, weights.flip(0), 1e-5, NormKind.ROUNDED)
    queries, keys, values = torch.randn(5, 4, 32), torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    cos, sin = torch.rand(5, 32), torch.rand(5, 32)
    found = []
    for kernels in (triton, REFERENCE):
        pool = torch.zeros(2 * 2 * 16 * 34, dtype=torch.uint8)
        cache = view_coded_pool(pool, len(pool), 1, 2, 16, 32, code)[0]
        group = GroupTables(16, 0, torch.zeros(1, 1).int(), torch.zeros(5).long(), torch.arange(5) + 9)
        found.append((kernels.rotate_and_store(queries, keys, values, cos, sin, cache, group, norms), pool))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    # A norm may differ in the last bit, and then a code by one.
    assert (found[0][1] != found[1][1]).float().mean() < 0.02
    assert found[1][1].any()


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "block_tokens", "window", "dtype", "code"),
    [
        (48, 9, 3, 16, 0, FP32, KVCode.INT8),
        (80, 4, 4, 32, 33, FP32, KVCode.FP8_E4M3),
        (128, 4, 2, 64, 300, BF16, KVCode.INT8),
        pytest.param(16, 70, 1, 128, 0, BF16, KVCode.FP8_E4M3, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_attention_is_that_of_the_reference_and_a_row_has_the_same_bits_in_any_chunk(
    triton: Kernels,
    paged_case: Callable[..., Any],
    head_dim: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    window: int,
    dtype: torch.dtype,
    code: KVCode,
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
    lengths = [(3, 300), (70, 90), (1, 17)]
    case = paged_case(REFERENCE, lengths, **shape, window=window, dtype=dtype, code=code)
    sinks = torch.linspace(-3, 3, heads)
    arguments = (case.group, 0.25, 5.0, sinks)
    expected = REFERENCE.attention(case.queries, case.cache, case.batch, *arguments)
    whole = triton.attention(case.queries, case.cache, case.batch, *arguments)
    tolerance = 2e-5 if dtype == FP32 else 3e-2
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
    for request, (count, context) in enumerate(lengths):
        queries, _, group = case.only(request)
        for begin, end in ((0, 1), (count // 2, count)):
            batch = AttentionBatch((0, end - begin), (context - count + end,), (group,))
            part = triton.attention(queries[begin:end], case.cache, batch, group, 0.25, 5.0, sinks)
            first = case.batch.query_start[request]
            assert torch.equal(part, whole[first + begin : first + end])


@pytest.mark.parametrize("code", KVCode)
def test_attention_that_looks_ahead(triton: Kernels, code: KVCode, paged_case: Callable[..., Any]) -> None:
    case = paged_case(REFERENCE, [(30, 80)], head_dim=32, spans={0: [(55, 70)]}, code=code)
    expected = attend(REFERENCE, case, ahead=True)
    torch.testing.assert_close(attend(triton, case, ahead=True), expected, atol=2e-5, rtol=2e-5)
    assert not torch.equal(attend(triton, case), attend(triton, case, ahead=True))


def test_a_broken_token_reaches_no_token_before_it(triton: Kernels, paged_case: Callable[..., Any]) -> None:
    case = paged_case(REFERENCE, [(8, 40)], head_dim=32, code=KVCode.INT8)
    sound = attend(triton, case)
    scales = case.cache.scales
    slot = int(case.group.tables[0, 2])
    scales.keys[slot, :, 0, 3] = scales.values[slot, :, 0, 3] = float("nan")  # position 35, that of query 3
    found = attend(triton, case)
    assert torch.equal(found[:3], sound[:3])
    assert found[3:].isnan().all()
