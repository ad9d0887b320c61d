"""Caches of 8 bits: codes and scales, attention over them, and its independence of batches, chunks and places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache, view_coded_pool, view_states
from paceline.kernels.codes import KVCode, decode, encode
from paceline.kernels.interface import ForwardInputs
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16]
SETS = instruction_sets()


@cache
def native(threads: int, instruction_set: str) -> NativeKernels:
    return NativeKernels(threads, instruction_set)


def attend(kernels: Any, case: Any, cache: LayerCache | None = None, ahead: bool = False) -> Tensor:
    own = cache or case.cache
    out: Tensor = kernels.attention(case.queries, own, case.batch, case.group, 0.25, looks_ahead=ahead)
    return out


@pytest.mark.parametrize("code", KVCode)
def test_a_code_is_the_nearest_one(code: KVCode) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 3
    codes, scales = encode(x, code)
    error = (decode(codes, scales, code) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    if code == KVCode.INT8:
        assert (error <= largest / 127 * 0.51).all()
    else:  # half of the last of four bits, or less than the least normal number
        assert (error <= torch.maximum(x.abs() / 16 * 1.01, largest / 448 * 2**-6)).all()
    assert codes.dtype == torch.uint8
    assert scales.dtype == torch.bfloat16


@pytest.mark.parametrize("code", KVCode)
def test_zeros_and_tiny_numbers_have_codes_and_numbers_that_are_not_finite_have_no_scale(code: KVCode) -> None:
    x = torch.zeros(4, 32)
    x[1] = 1e-38
    x[2, 5] = float("inf")
    x[3, 7] = float("nan")
    codes, scales = encode(x, code)
    numbers = decode(codes, scales, code)
    assert torch.equal(numbers[:2], torch.zeros(2, 32))
    assert numbers[2:].isnan().all()


def stored(kernels: Any, code: KVCode, dtype: torch.dtype) -> tuple[Tensor, LayerCache]:
    """Store random rows, and rows that are zeros, tiny, or not finite, to a pool of zeros."""
    kv_heads, dim, tokens = 2, 48, 32
    slot_bytes = 2 * kv_heads * tokens * (dim + 2) + 64
    pool = torch.zeros(3 * slot_bytes, dtype=torch.uint8)
    cache = view_coded_pool(pool, slot_bytes, 1, kv_heads, tokens, dim, code)[0]
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(50, kv_heads, dim, generator=generator).mul(5).to(dtype) for _ in range(2))
    keys[3], keys[4], keys[7, :, 3] = 0.0, 1e-37, 1e-4
    values[5], values[6] = keys[5] * 1e-4, keys[5] * 1e20
    slots, offsets = torch.tensor([2] * 32 + [0] * 18), torch.cat((torch.randperm(32), torch.arange(7, 25)))
    kernels.store_kv(keys, values, cache, GroupTables(tokens, 0, torch.zeros(1, 1).int(), slots, offsets))
    return pool, cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", KVCode)
@pytest.mark.parametrize("name", SETS)
def test_native_kernels_store_the_bytes_of_the_reference(name: str, code: KVCode, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    expected, _ = stored(ReferenceKernels(), code, dtype)
    torch.manual_seed(0)
    found, _ = stored(native(3, name), code, dtype)
    assert torch.equal(found, expected)
    assert expected.any()


@pytest.mark.parametrize("code", KVCode)
def test_the_scale_of_a_row_that_is_not_finite_is_nan_in_native_kernels(code: KVCode) -> None:
    for name in SETS:
        for bad in (float("inf"), float("nan")):
            pool = torch.zeros(2 * 16 * 66, dtype=torch.uint8)
            own = view_coded_pool(pool, len(pool), 1, 1, 16, 64, code)[0]
            keys = torch.ones(2, 1, 64)
            keys[0, 0, 9] = bad
            group = GroupTables(16, 0, torch.zeros(1, 1).int(), torch.tensor([0, 0]), torch.tensor([3, 4]))
            native(1, name).store_kv(keys, keys, own, group)
            assert own.scales is not None
            assert own.scales.keys[0, 0, 0, 3].isnan()
            assert own.scales.values[0, 0, 0, 3].isnan()
            assert own.scales.keys[0, 0, 0, 4].isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", KVCode)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_attention_equals_the_reference_and_a_row_has_the_same_bits_in_any_batch_and_chunk(
    paged_case: Callable[..., Any], code: KVCode, dtype: torch.dtype, data: st.DataObject
) -> None:
    contexts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    lengths = [(data.draw(st.integers(1, context)), context) for context in contexts]
    kv_heads, softcap = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([0.0, 5.0]))
    heads = kv_heads * data.draw(st.sampled_from([1, 3, 5, 9]))
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 3, heads)]))
    case = paged_case(
        ReferenceKernels(),
        lengths,
        kv_heads=kv_heads,
        heads=heads,
        head_dim=data.draw(st.sampled_from([16, 64, 80])),
        block_tokens=data.draw(st.sampled_from([16, 32, 128])),
        window=data.draw(st.sampled_from([0, 1, 40, 150])),
        seed=data.draw(st.integers(0, 1000)),
        dtype=dtype,
        code=code,
    )
    arguments = (case.cache, case.batch, case.group, 0.25, softcap, sinks)
    expected = ReferenceKernels().attention(case.queries, *arguments)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for name in SETS:
        whole = native(1, name).attention(case.queries, *arguments)
        torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(native(3, name).attention(case.queries, *arguments), whole)
        for request, (count, context) in enumerate(lengths):
            queries, _, group = case.only(request)
            first = case.batch.query_start[request]
            for chunk in (1, 7, 64):
                for begin in range(0, count, max(chunk, count // 3)):
                    end = min(begin + chunk, count)
                    own = AttentionBatch((0, end - begin), (context - count + end,), (group,))
                    part = native(3, name).attention(queries[begin:end], case.cache, own, group, 0.25, softcap, sinks)
                    assert torch.equal(part, whole[first + begin : first + end])


@pytest.mark.parametrize("code", KVCode)
@pytest.mark.parametrize("name", SETS)
def test_attention_that_looks_ahead(name: str, code: KVCode, paged_case: Callable[..., Any]) -> None:
    case = paged_case(ReferenceKernels(), [(60, 150), (5, 40)], head_dim=32, spans={0: [(100, 140)]}, code=code)
    expected = attend(ReferenceKernels(), case, ahead=True)
    torch.testing.assert_close(attend(native(2, name), case, ahead=True), expected, atol=2e-5, rtol=2e-5)
    assert not torch.equal(expected, attend(ReferenceKernels(), case))


@pytest.mark.parametrize("code", KVCode)
@pytest.mark.parametrize("name", SETS)
def test_attention_over_codes_does_not_depend_on_where_blocks_lie(
    name: str, code: KVCode, paged_case: Callable[..., Any]
) -> None:
    results = []
    for block_tokens, places in ((16, 0), (16, 1), (64, 0), (128, 3)):
        case = paged_case(
            ReferenceKernels(), [(40, 300), (1, 200)], head_dim=64, block_tokens=block_tokens, places=places, code=code
        )
        results.append(attend(native(2, name), case))
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("name", SETS)
def test_codes_change_attention_by_little(name: str, paged_case: Callable[..., Any]) -> None:
    cases = [paged_case(native(2, name), [(1, 300), (9, 100)], head_dim=64, code=code) for code in (None, *KVCode)]
    exact, *coded = [attend(native(2, name), case) for case in cases]
    errors = [float((result - exact).norm() / exact.norm()) for result in coded]
    assert 1e-4 < errors[0] < 0.03
    assert 1e-4 < errors[1] < 0.1
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", SETS)
def test_a_slot_outside_the_pool_is_refused(name: str, paged_case: Callable[..., Any]) -> None:
    case = paged_case(native(1, name), [(3, 20)], head_dim=32, code=KVCode.INT8)
    tables = torch.full_like(case.group.tables, 64)
    group = replace(case.group, tables=tables)
    for rows in (case, replace(case, queries=case.queries.repeat(1, 20, 1))):  # codes stay, or are unpacked
        with pytest.raises(IndexError, match="slot outside the pool"):
            native(1, name).attention(rows.queries, case.cache, case.batch, group, 0.25, 0.0)
    keys = torch.zeros(3, 3, 32)
    group = GroupTables(16, 0, tables, torch.tensor([0, 64, 1]), torch.arange(3))
    with pytest.raises(IndexError, match="slot outside the pool"):
        native(1, name).store_kv(keys, keys, case.cache, group)


def test_a_recording_is_of_one_code() -> None:
    pool = torch.zeros(2 * 16 * 66, dtype=torch.uint8)
    ids, batch = torch.zeros(1, dtype=torch.int64), AttentionBatch((0, 1), (1,), ())
    keys = set()
    for code in KVCode:
        caches = view_coded_pool(pool, len(pool), 1, 1, 16, 64, code)
        state = view_states(pool, len(pool), 1, [(4, 4)])
        keys.add(ForwardInputs(ids, ids, caches, batch).recording_key)
        keys.add(ForwardInputs(ids, ids, [*state, *caches, *state], batch).recording_key)
    assert len(keys) == 2 * len(KVCode)


def test_native_kernels_refuse_views_that_are_no_tiles(paged_case: Callable[..., Any]) -> None:
    case = paged_case(native(1, "auto"), [(3, 20)], head_dim=32, code=KVCode.INT8)
    scales = case.cache.scales
    swapped = replace(case.cache, scales=replace(scales, keys=scales.values))
    with pytest.raises(ValueError, match="scales of a tile must follow"):
        attend(native(1, "auto"), case, swapped)
    with pytest.raises(ValueError, match="must be"):
        attend(native(1, "auto"), replace(case, queries=case.queries.repeat(1, 1, 2)))
