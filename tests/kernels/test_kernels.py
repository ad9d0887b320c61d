"""Comparison of every backend with the formulas of `Kernels`, computed naively in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import view_pool
from paceline.kernels.interface import Kernels, NormKind
from paceline.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.slow

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16]
MIXED = [(1, 63), (7, 60), (33, 33), (1, 1), (16, 48), (5, 100)]


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def naive_attention(
    case: Any,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
    looks_ahead: bool = False,
    both_sides: bool = False,
) -> Tensor:
    """Compute attention for one query, head and key at a time. A query at p sees positions (p - window, p], or up to
    its last key, or up to that or p + window - 1."""
    out = torch.zeros_like(case.queries, dtype=torch.float64)
    heads, kv_heads = case.queries.shape[1], case.keys[0].shape[1]
    for request, context in enumerate(case.batch.context_len):
        start, end = case.batch.query_start[request : request + 2]
        keys, values = case.keys[request].double(), case.values[request].double()
        for token in range(start, end):
            position = context - (end - token)
            first = max(0, position - case.window + 1) if case.window else 0
            last = int(case.batch.last_keys[token]) if looks_ahead else position
            last = min(last, position + case.window - 1) if both_sides else last
            for head in range(heads):
                seen = slice(first, last + 1)
                shared = head // (heads // kv_heads)
                scores = keys[seen, shared] @ case.queries[token, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - scores.max())
                total = weights.sum()
                if sinks is not None:
                    total += torch.exp(sinks[head].double() - scores.max())
                out[token, head] = weights / total @ values[seen, shared]
    return out


def run_attention(kernels: Kernels, case: Any, scale: float = 0.25, softcap: float = 0.0) -> Tensor:
    return kernels.attention(case.queries, case.cache, case.batch, case.group, scale, softcap)


@pytest.mark.parametrize(
    ("window", "softcap", "dtype"),
    [(0, 0.0, BF16), (0, 5.0, FP32), (1, 5.0, FP32), (16, 0.0, FP32), (23, 5.0, BF16)],
    ids=str,
)
def test_attention_of_a_mixed_batch(
    kernels: Kernels, paged_case: Callable[..., Any], window: int, softcap: float, dtype: torch.dtype
) -> None:
    case = paged_case(kernels, MIXED, window=window, dtype=dtype)
    close(run_attention(kernels, case, softcap=softcap), naive_attention(case, 0.25, softcap))


@pytest.mark.parametrize(("window", "softcap", "dtype"), [(0, 0.0, FP32), (23, 5.0, BF16)], ids=str)
def test_attention_with_sinks(
    kernels: Kernels, paged_case: Callable[..., Any], window: int, softcap: float, dtype: torch.dtype
) -> None:
    case = paged_case(kernels, [*MIXED, (3, 300)], window=window, dtype=dtype)
    sinks = torch.tensor([0.5, -3.0, 2.0, 300.0, -300.0, 0.0])  # one that leaves nothing, and one without effect
    actual = kernels.attention(case.queries, case.cache, case.batch, case.group, 0.25, softcap, sinks)
    close(actual, naive_attention(case, 0.25, softcap, sinks))
    assert not actual[:, 3].any()
    without = run_attention(kernels, case, softcap=softcap)
    close(actual[:, 4], without[:, 4].double())


@pytest.mark.parametrize(("window", "dtype"), [(7, FP32), pytest.param(70, BF16, marks=pytest.mark.thorough)], ids=str)
def test_a_window_may_bound_both_sides(
    kernels: Kernels, paged_case: Callable[..., Any], window: int, dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (33, 33), (60, 60), (300, 300)]
    case = paged_case(
        kernels, lengths, window=window, dtype=dtype, spans={i: [(0, n)] for i, (n, _) in enumerate(lengths)}
    )
    actual = kernels.attention(case.queries, case.cache, case.batch, case.group, 0.25, 0.0, None, True, True)
    close(actual, naive_attention(case, 0.25, 0.0, looks_ahead=True, both_sides=True))


@pytest.mark.parametrize(
    ("window", "softcap", "dtype"),
    [(23, 5.0, BF16), *(pytest.param(*rare, marks=pytest.mark.thorough) for rare in ((0, 0.0, BF16), (0, 0.0, FP32)))],
    ids=str,
)
def test_attention_may_look_ahead(
    kernels: Kernels, paged_case: Callable[..., Any], window: int, softcap: float, dtype: torch.dtype
) -> None:
    lengths = [*MIXED, (50, 100), (20, 300)]
    # A whole span, one whose first tokens are no queries, two side by side, one that is longer than a window, and one
    # in a context that is long enough for splits.
    spans = {2: [(5, 20)], 4: [(20, 40)], 5: [(95, 98), (98, 100)], 6: [(55, 95)], 7: [(240, 290)]}
    case = paged_case(kernels, lengths, window=window, dtype=dtype, spans=spans)
    sinks = torch.tensor([0.5, -3.0, 2.0, 30.0, -30.0, 0.0]) if softcap else None
    actual = kernels.attention(case.queries, case.cache, case.batch, case.group, 0.25, softcap, sinks, True)
    close(actual, naive_attention(case, 0.25, softcap, sinks, looks_ahead=True))
    # Layers that do not look ahead are computed with the same batch.
    causal = replace(case.batch, last_keys=None)
    expected = kernels.attention(case.queries, case.cache, causal, case.group, 0.25, softcap)
    assert torch.equal(run_attention(kernels, case, softcap=softcap), expected)


def test_attention_of_any_shape(kernels: Kernels, paged_case: Callable[..., Any]) -> None:
    @settings(max_examples=8 if kernels.name.startswith("triton") else 30)  # Triton's interpreter is slow
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_any_shape(kernels, paged_case, data)

    check()


def check_any_shape(kernels: Kernels, paged_case: Callable[..., Any], data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    lengths = [(data.draw(st.integers(1, context)), context) for context in contexts]
    kv_heads = data.draw(st.integers(1, 3))
    case = paged_case(
        kernels,
        lengths,
        kv_heads=kv_heads,
        heads=kv_heads * data.draw(st.integers(1, 4)),
        head_dim=data.draw(st.sampled_from([8, 60, 64, 80])),
        block_tokens=data.draw(st.sampled_from([16, 32])),
        window=data.draw(st.sampled_from([0, 1, 7, 16, 40])),
        seed=data.draw(st.integers(0, 1000)),
    )
    close(run_attention(kernels, case), naive_attention(case, 0.25, 0.0))


@pytest.mark.parametrize(("window", "dtype"), [(0, BF16), (23, FP32)], ids=str)
def test_attention_of_a_request_does_not_depend_on_its_batch_mates(
    kernels: Kernels, paged_case: Callable[..., Any], window: int, dtype: torch.dtype
) -> None:
    case = paged_case(kernels, MIXED, window=window, dtype=dtype)
    together = run_attention(kernels, case)
    for request in range(len(MIXED)):
        queries, batch, group = case.only(request)
        alone = kernels.attention(queries, case.cache, batch, group, 0.25, 0.0)
        start, end = case.batch.query_start[request : request + 2]
        assert torch.equal(alone, together[start:end])


@pytest.mark.parametrize(("head_dim", "dtype"), [(256, FP32), (512, BF16), (512, FP32)], ids=str)
def test_attention_of_large_heads(
    kernels: Kernels, paged_case: Callable[..., Any], head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(kernels, [(1, 300), (17, 30)], heads=8, kv_heads=1, head_dim=head_dim, dtype=dtype)
    together = run_attention(kernels, case, scale=0.05)
    close(together, naive_attention(case, 0.05, 0.0))
    queries, batch, group = case.only(0)
    assert torch.equal(kernels.attention(queries, case.cache, batch, group, 0.05, 0.0), together[:1])


def test_attention_passes_over_a_request_without_queries(kernels: Kernels, paged_case: Callable[..., Any]) -> None:
    case = paged_case(kernels, [(3, 20), (0, 17), (2, 9)])
    close(run_attention(kernels, case), naive_attention(case, 0.25, 0.0))


def test_store_kv_writes_the_named_places_and_nothing_else(kernels: Kernels) -> None:
    keys, values = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    pool = torch.full((5 * 800,), float("nan"))
    caches = view_pool(pool, 800, 2, 2, 16, 6)
    slots, offsets = torch.tensor([4, 0, 4]), torch.tensor([15, 3, 0])
    group = GroupTables(16, 0, torch.zeros(1, 1, dtype=torch.int32), slots, offsets)
    kernels.store_kv(keys, values, caches[1], group)
    for token in range(3):
        assert torch.equal(caches[1].keys[slots[token], :, offsets[token]], keys[token])
        assert torch.equal(caches[1].values[slots[token], :, offsets[token]], values[token])
    assert int(pool.isfinite().sum()) == keys.numel() + values.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("shape", [(1, 63), (5, 60), (3, 2, 20)])
def test_rms_norm(kernels: Kernels, shape: tuple[int, ...], kind: NormKind, dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    factor = weight.double() + 1.0 if kind == NormKind.UNIT_OFFSET else weight.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-5) * factor
    actual = kernels.rms_norm(x, weight, 1e-5, kind)
    assert actual.dtype == dtype
    close(actual, expected)
    assert torch.equal(kernels.rms_norm(x[:1], weight, 1e-5, kind), actual[:1])


def test_rms_norm_rounds_as_its_kind_says(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 200).bfloat16(), torch.randn(200).bfloat16()
    wide, factor = x.float(), weight.float()
    normed = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    once = {NormKind.UNIT_OFFSET: normed * (1.0 + factor), NormKind.WIDE: normed * factor}
    expected = {NormKind.ROUNDED: normed.bfloat16() * weight, **{kind: x.bfloat16() for kind, x in once.items()}}
    for kind, rounded in expected.items():
        # The sum may differ in its last bits, which changes few roundings. Another kind changes many.
        assert (kernels.rms_norm(x, weight, 1e-5, kind) != rounded).sum() < 20


def test_rms_norm_squares_in_fp32() -> None:
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)  # the square is too large for fp16
    assert torch.equal(ReferenceKernels().rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones_like(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_turns_pairs_of_the_two_halves(kernels: Kernels, dtype: torch.dtype) -> None:
    tokens, heads, head_dim = 5, 3, 20
    x = torch.randn(tokens, heads, head_dim).to(dtype)
    angles = torch.randn(tokens, head_dim // 2).double()
    expected = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    for token in range(tokens):
        for pair in range(head_dim // 2):
            angle = float(angles[token, pair])
            first, second = x[token, :, pair].double(), x[token, :, pair + head_dim // 2].double()
            expected[token, :, pair] = first * math.cos(angle) - second * math.sin(angle)
            expected[token, :, pair + head_dim // 2] = second * math.cos(angle) + first * math.sin(angle)
    twice = torch.cat((angles, angles), dim=-1).float()
    actual = kernels.rotate(x, twice.cos(), twice.sin())
    assert actual.dtype == dtype
    close(actual, expected)
    assert torch.equal(kernels.rotate(x[2:3], twice[2:3].cos(), twice[2:3].sin()), actual[2:3])


def test_rotation_turns_by_the_position_and_may_grow(kernels: Kernels) -> None:
    positions, frequencies = torch.tensor([0, 1, 15, 16, 47, 48, 1000]), torch.rand(5)
    angles = (positions.float().unsqueeze(1) * frequencies).double().repeat(1, 2)
    for scale, growth in ((1.0, 0.0), (1.3, 0.0), (0.7, 0.2)):
        factors = scale * (1 + growth * torch.log(1 + positions.double() // 16)).unsqueeze(1)
        cos, sin = kernels.rotation(positions, frequencies, scale, growth, 16)
        assert cos.dtype == sin.dtype == torch.float32
        close(cos, angles.cos() * factors)
        close(sin, angles.sin() * factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(kernels: Kernels, bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 63).to(dtype), (torch.randn(60, 63) / 8).to(dtype)
    offset = torch.randn(60).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0.0)
    close(kernels.linear(x, kernels.pack(weight), offset), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 64, 500])
def test_logits_are_linear_in_fp32_and_know_their_best(kernels: Kernels, vocab: int, dtype: torch.dtype) -> None:
    # Integers, so that many results are equal; one row with zeros of both signs, and one with negative numbers.
    weight = torch.randint(-2, 3, (vocab, 32)).to(dtype)
    x = torch.randint(-2, 3, (40, 32)).to(dtype)
    x[3] = 0
    weight[:, 0], x[:, 0], x[5] = 1, -3, 0
    x[5, 0] = -7
    packed = kernels.pack(weight)
    for rows in (1, 5, 16, 17, 33, 40):
        logits, linear = kernels.logits(x[:rows], packed), kernels.linear(x[:rows], packed)
        assert logits.values.dtype == torch.float32
        assert torch.equal(logits.values, linear.float())
        if logits.best is not None:
            assert logits.best.tolist() == linear.float().numpy().argmax(axis=1).tolist()


def test_logits_that_are_no_numbers_have_a_best_that_exists(kernels: Kernels) -> None:
    x = torch.full((3, 32), torch.nan)
    x[0], x[1, :2] = torch.inf, 0
    best = kernels.logits(x, kernels.pack(-torch.ones(70, 32))).best
    assert best is None or all(0 <= token < 70 for token in best.tolist())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations(kernels: Kernels, dtype: torch.dtype) -> None:
    gate, up = torch.randn(7, 63).to(dtype), torch.randn(7, 63).to(dtype)
    g, u = gate.double(), up.double()
    close(kernels.silu_and_mul(gate, up), g / (1 + torch.exp(-g)) * u)
    close(kernels.sigmoid_and_mul(gate, up), 1 / (1 + torch.exp(-g)) * u)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    close(kernels.gelu_tanh_and_mul(gate, up), 0.5 * g * (1 + tanh) * u)


def test_attention_copies_no_more_than_the_context_of_a_large_pool() -> None:
    slots, layers, kv_heads, block_tokens, head_dim = 2000, 3, 2, 16, 32
    slot_elements = layers * 2 * kv_heads * block_tokens * head_dim
    cache = view_pool(torch.zeros(slots * slot_elements), slot_elements, layers, kv_heads, block_tokens, head_dim)[1]
    zero = torch.zeros(1, dtype=torch.int64)
    group = GroupTables(block_tokens, 0, torch.tensor([[7, 1900, 3]], dtype=torch.int32), zero, zero)
    batch = AttentionBatch((0, 1), (40,), (group,))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        ReferenceKernels().attention(torch.zeros(1, 4, head_dim), cache, batch, group, 1.0, 0.0)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.function_events)
    plane_bytes = slots * kv_heads * block_tokens * head_dim * 4
    assert allocated < plane_bytes // 10
