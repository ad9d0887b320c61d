"""Properties of the Triton kernels beyond those of all backends: bits depend only on a token's own context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import Kernels
from paceline.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="the package triton is not installed")

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Largest shared memory of a program, by architecture."""


@pytest.fixture(params=["triton", "triton-invariant"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with DEVICE:
        yield select_kernels(DEVICE, request.param)


def product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return [..., m, k] @ [..., k, n], with the same order of additions along k in each row."""
    terms = a[..., :, :, None].astype(dtype) * b[..., None, :, :].astype(dtype)
    return np.add.reduce(terms, axis=-2)


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    # On a GPU, products do not depend on a row's place in a tile. In the interpreter they do with some BLAS libraries.
    if DEVICE.type == "cpu":
        monkeypatch.setattr(np, "matmul", product)
    with DEVICE:
        yield select_kernels(DEVICE, "triton-invariant")


def attend(kernels: Kernels, case: Any, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    return kernels.attention(case.queries, case.cache, case.batch, case.group, 0.2, softcap, sinks)


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "block_tokens", "window", "dtype"),
    [
        (48, 9, 3, 5, 0, FP32),
        (80, 4, 4, 24, 33, FP32),
        (256, 4, 2, 64, 500, BF16),
        *(
            pytest.param(*rare, marks=pytest.mark.thorough)
            for rare in (
                (48, 9, 3, 5, 0, BF16),
                (96, 7, 1, 16, 0, BF16),
                (128, 4, 1, 16, 300, FP32),
                (2, 3, 1, 16, 0, FP32),
                (16, 70, 1, 16, 280, BF16),
            )
        ),
    ],
    ids=str,
)
def test_attention_of_odd_shapes_is_that_of_the_reference(
    invariant: Kernels,
    paged_case: Callable[..., Any],
    head_dim: int,
    heads: int,
    kv_heads: int,
    block_tokens: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    lengths = [(1, 1), (1, block_tokens), (3, 40)] if block_tokens == 5 else [(1, 1), (1, 300), (30, 40), (2, 257)]
    shape = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "block_tokens": block_tokens}
    case = paged_case(ReferenceKernels(), lengths, window=window, dtype=dtype, **shape)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    softcap = 3.0 if dtype == torch.float32 else 0.0
    expected = attend(ReferenceKernels(), case, softcap)
    torch.testing.assert_close(attend(invariant, case, softcap), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("window", "dtype"), [pytest.param(0, BF16, marks=pytest.mark.thorough), (290, FP32)], ids=str)
def test_attention_does_not_depend_on_how_a_prompt_was_cut(
    invariant: Kernels, paged_case: Callable[..., Any], window: int, dtype: torch.dtype
) -> None:
    # Chunks of up to 16 tokens have one program per split; larger chunks have one program for all splits.
    case = paged_case(ReferenceKernels(), [(20, 520), (4, 20)], window=window, heads=4, kv_heads=1, dtype=dtype)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    whole = attend(invariant, case, sinks=sinks)[:20]
    _, _, group = case.only(0)
    for sizes in ((1, 1, 18), (17, 2, 1), (5, 15)):
        pieces, first = [], 0
        for size in sizes:
            batch = AttentionBatch((0, size), (500 + first + size,), (group,))
            queries = case.queries[first : first + size]
            pieces.append(invariant.attention(queries, case.cache, batch, group, 0.2, 0.0, sinks))
            first += size
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.thorough), 70])
def test_attention_that_looks_ahead_does_not_depend_on_how_a_prompt_was_cut(
    invariant: Kernels, paged_case: Callable[..., Any], window: int
) -> None:
    # The span begins before the last 40 tokens, crosses a split, and is longer than the smaller window.
    span = {0: [(420, 530)]}
    case = paged_case(ReferenceKernels(), [(130, 540)], window=window, heads=4, kv_heads=1, spans=span)
    queries, batch, group = case.only(0)
    assert batch.last_keys is not None
    whole = invariant.attention(queries, case.cache, batch, group, 0.2, 0.0, looks_ahead=True)
    for first, end in ((0, 120), (10, 120), (110, 130), (115, 120)):
        keys = batch.last_keys[first:end]
        own = AttentionBatch((0, end - first), (410 + end,), (group,), last_keys=keys)
        found = invariant.attention(queries[first:end], case.cache, own, group, 0.2, 0.0, looks_ahead=True)
        assert torch.equal(found, whole[first:end])


def test_attention_of_long_contexts_does_not_depend_on_their_batch_mates(
    invariant: Kernels, paged_case: Callable[..., Any]
) -> None:
    case = paged_case(ReferenceKernels(), [(1, 280), (9, 320), (1, 70), (1, 1), (1, 260)])
    together = attend(invariant, case)
    for request in range(5):
        queries, batch, group = case.only(request)
        start, end = case.batch.query_start[request : request + 2]
        alone = invariant.attention(queries, case.cache, batch, group, 0.2, 0.0)
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_invariant_linear_does_not_depend_on_the_number_of_rows(
    invariant: Kernels, bias: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(131, 75).to(dtype), (torch.randn(67, 75) / 8).to(dtype)
    offset = torch.randn(67).to(dtype) if bias else None
    together = invariant.linear(x, weight, offset)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    expected = torch.nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=tolerance)
    for rows in (slice(0, 1), slice(70, 71), slice(63, 66), slice(5, 130), slice(4, 4)):
        assert torch.equal(invariant.linear(x[rows], weight, offset), together[rows])


def test_rows_may_lie_apart_in_memory(kernels: Kernels) -> None:
    wide = torch.randn(5, 3, 4, 20)
    apart, close = wide[:, 1], wide[:, 1].clone()
    angles = torch.randn(5, 20)
    assert torch.equal(kernels.rotate(apart, angles, angles), kernels.rotate(close, angles, angles))
    assert torch.equal(kernels.rms_norm(apart, angles[0], 1e-5), kernels.rms_norm(close, angles[0], 1e-5))
    assert torch.equal(kernels.silu_and_mul(apart, close), kernels.silu_and_mul(close, close))
    weight = kernels.pack(torch.randn(7, 20))
    torch.testing.assert_close(kernels.linear(apart[:, 0], weight), kernels.linear(close[:, 0], weight))
    caches = [LayerCache(torch.zeros(2, 4, 16, 20), torch.zeros(2, 4, 16, 20)) for _ in range(2)]
    slots, places = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([3, 0, 15, 7, 9])
    group = GroupTables(16, 0, torch.tensor([[1, 0]], dtype=torch.int32), slots, places)
    batch = AttentionBatch((0, 5), (20,), (group,))
    results = []
    for cache, rows in zip(caches, (apart, close)):
        kernels.store_kv(rows, rows * 2, cache, group)
        results.append(kernels.attention(rows, cache, batch, group, 0.2, 0.0))
    assert torch.equal(caches[0].keys, caches[1].keys)
    assert torch.equal(caches[0].values, caches[1].values)
    assert torch.equal(*results)


def test_a_pool_may_have_more_elements_than_32_bits_count(invariant: Kernels) -> None:
    # Only pages that are written to take memory.
    slot_elements = 2**30
    pool = torch.empty(3 * slot_elements, dtype=torch.bfloat16)
    planes = [pool.as_strided((3, 1, 16, 16), (slot_elements, 256, 16, 1), first) for first in (0, 256)]
    cache = LayerCache(planes[0], planes[1])
    keys, values = torch.randn(16, 1, 16).bfloat16(), torch.randn(16, 1, 16).bfloat16()
    group = GroupTables(
        16, 0, torch.tensor([[2]], dtype=torch.int32), torch.full((16,), 2), torch.arange(16, dtype=torch.int64)
    )
    invariant.store_kv(keys, values, cache, group)
    assert torch.equal(cache.keys[2, 0], keys[:, 0])
    batch = AttentionBatch((0, 1), (16,), (group,))
    queries = torch.randn(1, 2, 16).bfloat16()
    attended = invariant.attention(queries, cache, batch, group, 0.2, 0.0)
    expected = ReferenceKernels().attention(queries, cache, batch, group, 0.2, 0.0)
    torch.testing.assert_close(attended, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:overflow")  # from numpy in the interpreter
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_activations_of_extreme_numbers_are_finite(kernels: Kernels, name: str) -> None:
    gate, up = torch.tensor([[-80.0, -1e-30, 0.0, 1e-30, 80.0]]), torch.ones(1, 5)
    expected = getattr(ReferenceKernels(), name)(gate, up)
    torch.testing.assert_close(getattr(kernels, name)(gate, up), expected, atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "models"),
    [
        (90, ("llama", "deepseek", "fp8_e4m3")),  # deepseek has the largest heads
        *(pytest.param(architecture, (), marks=pytest.mark.thorough) for architecture in (80, 90)),
    ],
    ids=str,
)
def test_every_kernel_compiles_for_gpus_and_fits_into_their_shared_memory(
    tmp_path: Path, architecture: int, models: tuple[str, ...]
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_triton", str(architecture), *models]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    rowwise = {"add_rms_norm", "gated", "rms_norm", "rotate", "rotate_and_store", "store_codes", "store_kv"}
    experts = {"sort_pairs", "expert_products", "weighted_sum"}
    names = {"attend", "combine", "matmul", *experts, *rowwise, "accept", "best", "draw", "move"}
    assert {line["architecture"] for line in lines} == {architecture}
    assert {line["kernel"] for line in lines} == names
    assert max(line["shared_bytes"] for line in lines) <= SHARED_BYTES[architecture]
    # Without knowing that addresses are multiples of 16, the compiler loads weights one element at a time.
    plain = [line for line in lines if not line["code"]]
    copies = {name: [line["wide_copies"] for line in plain if line["kernel"] == name] for name in names}
    assert sum(line["byte_loads"] for line in lines if line["kernel"] == "attend") == 0
    assert min(copies["attend"]) > 0
    assert min(copies["expert_products"]) == max(copies["matmul"]) > 0  # both have the same tiles


def test_the_scores_of_experts_do_not_depend_on_the_batch(invariant: Kernels) -> None:
    x, weight = torch.randn(21, 40), torch.randn(7, 40)
    packed = invariant.pack(weight)
    together = invariant.router_logits(x, packed)
    assert torch.equal(together, torch.cat([invariant.router_logits(row, packed) for row in x.split(1)]))
    torch.testing.assert_close(together, x @ weight.T, atol=1e-4, rtol=1e-4)
