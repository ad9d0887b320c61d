"""Experts of the native kernels: any form of weights, any batch and number of threads, and recorded passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.compute.kernels import quantize_q4_1
from bench.compute.small_floats import quantize_fp8, quantize_mxfp4
from paceline.core.experts import ExpertActivation, Routing
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import LayerState
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.kernels import COMPRESSING
from paceline.kernels.native.library import COMPRESSED, instruction_sets
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.quantized import quantize_int8
from paceline.kernels.reference import ReferenceKernels

Pack = Callable[[Tensor], PackedWeight]
REFERENCE = ReferenceKernels()
SETS = pytest.mark.parametrize("name", instruction_sets())


@cache
def native(threads: int, name: str) -> NativeKernels:
    return NativeKernels(threads, name)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack_experts(
    kernels: Kernels,
    pack: Pack,
    experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype = torch.bfloat16,
    activation: ExpertActivation = "silu",
) -> ExpertWeights:
    """Return experts of random matrices, each packed by `pack`."""

    def matrices(seed: int, size_out: int, size_in: int) -> list[PackedWeight]:
        return [pack(weight.to(dtype)) for weight in random(experts, size_out, size_in, seed=seed) / size_in**0.5]

    gate, up, down = matrices(1, inner, hidden), matrices(2, inner, hidden), matrices(3, hidden, inner)
    return kernels.index_experts(ExpertWeights(gate, up, down, activation))


def choice(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return REFERENCE.choose_experts(random(tokens, experts, seed=seed) * 2, Routing(top_k, normalize=True))


def near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()


QUANTIZE = {"int8": quantize_int8, "q4_1": quantize_q4_1, "mxfp4": quantize_mxfp4, "fp8": quantize_fp8}


@SETS
@pytest.mark.parametrize(
    ("how", "dtype"), [*((how, torch.bfloat16) for how in QUANTIZE), ("int8", torch.float32)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 90])
def test_quantized_experts(name: str, dtype: torch.dtype, how: str, tokens: int) -> None:
    kernels, sizes = native(2, name), (4, 96, 64, dtype)
    own = pack_experts(kernels, lambda weight: kernels.pack(QUANTIZE[how](weight)), *sizes)
    wanted = pack_experts(REFERENCE, lambda weight: REFERENCE.pack(QUANTIZE[how](weight)), *sizes)
    x = random(tokens, 96, dtype=dtype)
    ids, weights = choice(tokens, 4, 2)
    near(
        kernels.experts(x, ids, weights, own),
        REFERENCE.experts(x, ids, weights, wanted),
        0.02 if dtype == torch.bfloat16 else 1e-5,
    )


@SETS
@pytest.mark.parametrize("tokens", [1, 6, 90])
def test_matrices_of_a_layer_may_have_different_forms(name: str, tokens: int) -> None:
    kernels, whole = native(2, name), NativeKernels(1, name, compress=False)

    def cycled(*packs: Pack) -> Pack:
        turns = cycle(packs)
        return lambda weight: next(turns)(weight)

    # Compressed where the instruction set does this, not compressed, quantized, and quantized but not multiplied in
    # integers. With five experts, each matrix of an expert has another form.
    quantizers = (quantize_int8, quantize_fp8)
    own = cycled(kernels.pack, whole.pack, *(lambda weight, how=how: kernels.pack(how(weight)) for how in quantizers))
    plain = cycled(
        REFERENCE.pack, REFERENCE.pack, *(lambda weight, how=how: REFERENCE.pack(how(weight)) for how in quantizers)
    )
    mixed, wanted = pack_experts(kernels, own, 5, 96, 96), pack_experts(REFERENCE, plain, 5, 96, 96)
    formats = {weight.format for weight in (*mixed.gate, *mixed.up, *mixed.down)}
    assert len(formats) == (4 if name in COMPRESSING else 3)
    assert (COMPRESSED in formats) == (name in COMPRESSING)
    x = random(tokens, 96, dtype=torch.bfloat16)
    ids, weights = choice(tokens, 5, 3)
    near(kernels.experts(x, ids, weights, mixed), REFERENCE.experts(x, ids, weights, wanted), 0.02)


@SETS
@settings(max_examples=12)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    how = data.draw(st.sampled_from(["whole", *QUANTIZE]))
    experts = data.draw(st.integers(1, 6))
    top_k, tokens = data.draw(st.integers(1, experts)), data.draw(st.sampled_from([2, 9, 17, 40]))
    hidden, inner = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 80))
    activation = data.draw(st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]))
    if how in ("q4_1", "mxfp4", "fp8"):
        hidden, inner = 32 * -(-hidden // 32), 32 * -(-inner // 32)
    x = random(tokens, hidden, dtype=dtype)
    ids, weights = choice(tokens, experts, top_k)
    results = []
    for threads in (1, 2, 3):
        kernels = native(threads, name)
        own = pack_experts(
            kernels,
            lambda weight: kernels.pack(QUANTIZE[how](weight) if how in QUANTIZE else weight),  # noqa: B023
            experts,
            hidden,
            inner,
            dtype,
            activation,
        )
        parts = data.draw(st.sampled_from([(tokens,), (1, tokens - 1), (1,) * tokens, (tokens // 2, -(-tokens // 2))]))
        cut = zip(*(torch.split(tensor, list(parts)) for tensor in (x, ids, weights)))
        results.append(torch.cat([kernels.experts(*part, own) for part in cut]))
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_more_pairs_than_are_computed_together() -> None:
    """8192 pairs fit into one pass of the kernel."""
    kernels, tokens = native(2, "auto"), 1100
    own, wanted = (pack_experts(each, each.pack, 9, 16, 8, torch.float32) for each in (kernels, REFERENCE))
    x = random(tokens, 16)
    ids, weights = choice(tokens, 9, 8)
    found = kernels.experts(x, ids, weights, own)
    torch.testing.assert_close(found, REFERENCE.experts(x, ids, weights, wanted), atol=1e-5, rtol=1e-5)


def test_an_expert_that_does_not_exist_is_refused() -> None:
    kernels = native(1, "auto")
    own = pack_experts(kernels, kernels.pack, 3, 16, 8, torch.float32)
    for expert in (3, -1):
        with pytest.raises(IndexError, match="an expert does not exist"):
            kernels.experts(random(1, 16), torch.tensor([[0, expert]]), torch.ones(1, 2), own)


@SETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_recorded_pass_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    kernels = native(2, name)
    embedding, router = (kernels.pack(random(50, 48, seed=seed, dtype=dtype)) for seed in (7, 8))
    gate, bias = kernels.pack(random(1, 48, seed=9, dtype=dtype)), random(50, seed=10, dtype=dtype)
    correction, scales = random(50, seed=11), random(50, seed=12)
    experts = pack_experts(kernels, kernels.pack, 50, 48, 24, dtype)
    nowhere = [LayerState((torch.empty(0),))]

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        for layer in range(3):
            logits = kernels.router_logits(x, router, bias)
            ids, weights = kernels.choose_experts(logits, Routing(4, normalize=layer > 0), correction, scales)
            x = kernels.add_gated(x, kernels.experts(x, ids, weights, experts), kernels.linear(x, gate))
        return x

    replay = kernels.compile(forward)
    for tokens in (3, 1, 90, 2):
        ids = torch.arange(tokens) % 50
        inputs = ForwardInputs(ids, ids, nowhere, AttentionBatch((0, tokens), (tokens,), ()))
        assert torch.equal(replay(inputs), forward(inputs))


def test_a_choice_that_is_not_possible_is_refused() -> None:
    kernels, logits = native(1, instruction_sets()[0]), random(2, 8)
    for routing in (Routing(9), Routing(0), Routing(2, groups=3), Routing(5, groups=4, top_groups=2)):
        with pytest.raises(ValueError, match="cannot choose among 8 experts"):
            kernels.choose_experts(logits, routing)
    with pytest.raises(ValueError, match="the corrections must be"):
        kernels.choose_experts(logits, Routing(2), correction=random(7))


def test_experts_of_different_shapes_are_refused() -> None:
    big, small = REFERENCE.pack(random(24, 16)), REFERENCE.pack(random(16, 24))
    ExpertWeights([big], [big], [small], "silu")
    with pytest.raises(ValueError, match="all 1 experts must have matrices 24 x 16 and 16 x 24"):
        ExpertWeights([big], [small], [small], "silu")
    with pytest.raises(ValueError, match="all 2 experts must have matrices"):
        ExpertWeights([big, big], [big, big], [small], "silu")
    with pytest.raises(ValueError, match="the biases of experts must have the shapes"):
        ExpertWeights([big], [big], [small], "silu", random(1, 24), random(1, 24), None)
