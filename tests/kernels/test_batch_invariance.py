"""A row of a result has the same bits in any batch, with any chunks of a prompt, and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import Kernels, NormKind
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets

DTYPES = [torch.float32, torch.bfloat16]
THREADS = [1, 2, 3]


@cache
def native(threads: int, instruction_set: str) -> NativeKernels:
    return NativeKernels(threads, instruction_set)


@pytest.fixture(scope="session", params=instruction_sets())
def teams(request: pytest.FixtureRequest) -> list[NativeKernels]:
    """Kernels with the same instruction set, with one thread and with several."""
    return [native(threads, request.param) for threads in THREADS]


def same(results: list[Tensor]) -> None:
    assert not results[0].isnan().any()
    for result in results[1:]:
        assert torch.equal(result, results[0])


def randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_linear_gives_a_row_the_same_bits_beside_any_others(
    teams: list[NativeKernels], dtype: torch.dtype, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = data.draw(st.sampled_from([1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 50, 70]))
    size_in, size_out = data.draw(st.integers(1, 130)), data.draw(st.integers(1, 70))
    weight = randn(generator, dtype, size_out, size_in)
    bias = randn(generator, dtype, size_out) if data.draw(st.booleans()) else None
    x = randn(generator, dtype, rows, size_in)
    poisoned = torch.full((3 * rows, size_in), float("nan"), dtype=dtype)
    poisoned[1::3] = x
    results = []
    for kernels in teams:
        packed = kernels.pack(weight)
        results.append(kernels.linear(x, packed, bias))
        results.append(kernels.linear(poisoned[1::3], packed, bias))
        results.append(kernels.linear(poisoned, packed, bias)[1::3])
        results.append(torch.cat([kernels.linear(row, packed, bias) for row in x.split(1)]))
        results.append(torch.cat([kernels.linear(part, packed, bias) for part in x.split(7)]))
    same(results)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 192), (1536, 96), (2048, 640)])
def test_linear_of_a_real_shape_gives_a_row_the_same_bits_in_a_long_prompt(
    teams: list[NativeKernels], size_in: int, size_out: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = randn(generator, dtype, size_out, size_in), randn(generator, dtype, 1100, size_in)
    for kernels in teams:
        packed = kernels.pack(weight)
        whole = kernels.linear(x, packed)
        for row in (0, 1, 31, 32, 500, 1099):
            same([kernels.linear(x[row : row + 1], packed), whole[row : row + 1], whole[row : row + 1]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_on_rows_give_a_row_the_same_bits_beside_any_others(
    teams: list[NativeKernels], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (randn(generator, dtype, *shape) for shape in ((300, 63), (300, 63), (63,)))
    heads, frequencies = randn(generator, dtype, 300, 3, 20), torch.rand(10, generator=generator)
    positions, ids = torch.arange(300) * 37, torch.randint(0, 300, (300,), generator=generator)

    def rotated(kernels: Kernels, rows: slice) -> Tensor:
        return kernels.rotate(heads[rows], *kernels.rotation(positions[rows], frequencies, 1.3, 0.1, 100))

    operations: list[Callable[[Kernels, slice], Tensor]] = [
        *(lambda kernels, rows, kind=kind: kernels.rms_norm(x[rows], weight, 1e-5, kind) for kind in NormKind),
        lambda kernels, rows: kernels.silu_and_mul(x[rows], y[rows]),
        lambda kernels, rows: kernels.gelu_tanh_and_mul(x[rows], y[rows]),
        lambda kernels, rows: kernels.sigmoid_and_mul(x[rows], y[rows]),
        lambda kernels, rows: kernels.add(x[rows], y[rows]),
        lambda kernels, rows: kernels.embed(ids[rows], kernels.pack(x), 3.7),
        rotated,
    ]
    for operation in operations:
        whole = [operation(kernels, slice(None)) for kernels in teams]
        same(whole)
        for rows in (slice(0, 1), slice(7, 8), slice(299, 300), slice(5, 200)):
            same([whole[0][rows], *(operation(kernels, rows) for kernels in teams)])


def chunked(case: Any, kernels: Kernels, request: int, chunk: int, softcap: float, sinks: Tensor | None) -> Tensor:
    """Compute the queries of one request in chunks. Each chunk gets only the context up to its last token."""
    queries, batch, group = case.only(request)
    count, context = len(queries), batch.context_len[0]
    parts = []
    for begin in range(0, count, chunk):
        end = min(begin + chunk, count)
        own = AttentionBatch((0, end - begin), (context - count + end,), (group,))
        parts.append(kernels.attention(queries[begin:end], case.cache, own, group, 0.25, softcap, sinks))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_attention_gives_a_row_the_same_bits_in_any_batch_and_chunk(
    teams: list[NativeKernels], paged_case: Callable[..., Any], dtype: torch.dtype, data: st.DataObject
) -> None:
    contexts = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    lengths = [(data.draw(st.integers(1, context)), context) for context in contexts]
    kv_heads, softcap = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([0.0, 5.0]))
    heads = kv_heads * data.draw(st.integers(1, 5))
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 3, heads)]))
    case = paged_case(
        teams[0],
        lengths,
        kv_heads=kv_heads,
        heads=heads,
        head_dim=data.draw(st.sampled_from([8, 60, 64, 80])),
        block_tokens=data.draw(st.sampled_from([16, 24, 32])),
        window=data.draw(st.sampled_from([0, 1, 40, 150])),
        seed=data.draw(st.integers(0, 1000)),
        dtype=dtype,
    )
    wholes = [
        kernels.attention(case.queries, case.cache, case.batch, case.group, 0.25, softcap, sinks) for kernels in teams
    ]
    same(wholes)
    for request in range(len(lengths)):
        start, end = case.batch.query_start[request : request + 2]
        for kernels in teams:
            for chunk in (1, 7, 64):
                same([wholes[0][start:end], chunked(case, kernels, request, chunk, softcap, sinks)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_attention_that_looks_ahead_gives_a_row_the_same_bits_in_any_batch_and_chunk(
    teams: list[NativeKernels], paged_case: Callable[..., Any], dtype: torch.dtype, data: st.DataObject
) -> None:
    length = data.draw(st.integers(150, 400))
    start = data.draw(st.integers(0, length - 130))
    end = data.draw(st.integers(start + 1, start + 130))
    case = paged_case(
        teams[0],
        [(length, length), (5, 40)],
        kv_heads=1,
        heads=data.draw(st.integers(1, 5)),
        head_dim=data.draw(st.sampled_from([8, 64])),
        window=data.draw(st.sampled_from([0, 1, 40, 150])),
        dtype=dtype,
        spans={0: [(start, end)], 1: [(35, 40)]},
    )
    wholes = [
        kernels.attention(case.queries, case.cache, case.batch, case.group, 0.25, 0.0, None, True) for kernels in teams
    ]
    same(wholes)
    queries, batch, group = case.only(0)
    inside = data.draw(st.integers(start, end))
    for kernels in teams:
        # The span alone, its last tokens after a cached prefix, and all of it with its neighbours.
        for first, last in ((start, end), (inside, end), (start // 2, end), (0, min(length, end + 60))):
            if first == last:
                continue
            own = AttentionBatch((0, last - first), (last,), (group,), last_keys=batch.last_keys[first:last])
            found = kernels.attention(queries[first:last], case.cache, own, group, 0.25, 0.0, None, True)
            same([wholes[0][first:last], found])


def test_attention_does_not_depend_on_where_blocks_lie(
    teams: list[NativeKernels], paged_case: Callable[..., Any]
) -> None:
    results = []
    for kernels, block_tokens in zip(teams, (16, 32, 64)):
        case = paged_case(kernels, [(40, 300), (1, 200)], block_tokens=block_tokens, dtype=torch.bfloat16)
        shuffled = paged_case(kernels, [(40, 300), (1, 200)], block_tokens=block_tokens, dtype=torch.bfloat16, places=1)
        for own in (case, shuffled):
            results.append(kernels.attention(own.queries, own.cache, own.batch, own.group, 0.25, 0.0))
    same(results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_slot_outside_the_pool_is_refused(
    teams: list[NativeKernels], paged_case: Callable[..., Any], dtype: torch.dtype
) -> None:
    case = paged_case(teams[0], [(3, 20)], dtype=dtype)
    tables = torch.full_like(case.group.tables, 64)
    group = GroupTables(16, 0, tables, case.group.write_slots, case.group.write_offsets)
    with pytest.raises(IndexError, match="slot outside the pool"):
        teams[0].attention(case.queries, case.cache, case.batch, group, 0.25, 0.0)
    keys = torch.zeros(3, 3, 20, dtype=dtype)
    group = GroupTables(16, 0, tables, torch.tensor([0, 64, 1]), torch.arange(3))
    with pytest.raises(IndexError, match="slot outside the pool"):
        teams[0].store_kv(keys, keys, case.cache, group)


def test_a_token_outside_the_vocabulary_is_refused(teams: list[NativeKernels]) -> None:
    with pytest.raises(IndexError, match="token id lies outside"):
        teams[0].embed(torch.tensor([0, 5]), teams[0].pack(torch.zeros(5, 4)))
