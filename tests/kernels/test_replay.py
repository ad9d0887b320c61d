"""Forward passes, which are recorded once and replayed for other tokens."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.compute.kernels import quantize_q4_1
from bench.compute.small_floats import quantize_fp8
from paceline.core.errors import ConfigError
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import Forward, ForwardInputs, Taps
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.fusing import fuse
from paceline.kernels.native.library import KernelKind, Op, instruction_sets
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, quantize_int8

ROOT = Path(__file__).parents[2]
RECORD = """
import sys
from paceline.kernels.native import NativeKernels
from tests.kernels.conftest import make_case
from tests.kernels.test_replay import Counting, run

kernels = NativeKernels(1)
run(kernels.compile(Counting(kernels).forward), make_case(kernels, [(1, 5)]))
print(*{"torch._dynamo", "sympy", "triton"} & set(sys.modules))
"""
HIDDEN = 60
LENGTHS = [[(1, 5)], [(3, 20), (90, 130)], [(1, 40), (1, 2), (1, 7)]]


class Counting:
    """A small model that counts how often its Python code runs."""

    def __init__(
        self,
        kernels: NativeKernels,
        hidden: int = HIDDEN,
        quantize: Callable[[Tensor], QuantizedMatrix] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / 8

        def matrix(size_out: int, size_in: int) -> PackedWeight:
            weight = randn(size_out, size_in)
            return kernels.pack(weight if quantize is None else quantize(weight))

        self.calls = 0
        self._kernels = kernels
        self._embedding = kernels.pack(randn(50, hidden))
        self._up, self._gate, self._down = matrix(60, hidden), matrix(hidden, hidden), matrix(hidden, 60)
        self._norm = randn(hidden)
        self._frequencies = torch.rand(10, generator=generator)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        self.calls += 1
        taps = inputs.taps or Taps()
        kernels, batch = self._kernels, inputs.batch
        group = batch.groups[0]
        x = inputs.further[-1] if inputs.begin else kernels.embed(inputs.token_ids, self._embedding, 2.0)
        cos, sin = kernels.rotation(inputs.positions, self._frequencies)
        for depth, cache in enumerate(inputs.caches[inputs.begin : inputs.layers], inputs.begin):
            assert isinstance(cache, LayerCache)
            taps.see(depth, x)
            heads = kernels.linear(kernels.rms_norm(x, self._norm, 1e-5), self._up).view(-1, 3, 20)
            heads = kernels.rotate(heads, cos, sin)
            kernels.store_kv(heads, heads, cache, group)
            attended = kernels.attention(heads, cache, batch, group, 0.3, 0.0)
            x = kernels.add(x, kernels.linear(attended.flatten(1), self._down))
            x = kernels.add(x, kernels.silu_and_mul(kernels.linear(x, self._gate), x))
        return kernels.rms_norm(x, self._norm, 1e-5)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return NativeKernels(2)


def run(forward: Forward, case: Any, layers: int | None = None, taps: Taps | None = None) -> Tensor:
    tokens = case.batch.query_start[-1]
    contexts = zip(case.batch.query_start, case.batch.query_start[1:], case.batch.context_len)
    positions = torch.cat([torch.arange(length - (end - start), length) for start, end, length in contexts])
    return forward(ForwardInputs(torch.arange(tokens) % 50, positions, [case.cache] * 3, case.batch, layers, taps))


def test_an_activation_may_come_soon_after_fused_layers(kernels: NativeKernels, paged_case: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    embedding, *own = (kernels.pack(torch.randn(rows, 24, generator=generator)) for rows in (50, 24, 24, 24))

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        gate, up, down = (lambda y, weight=weight: kernels.linear(y, weight) for weight in own)
        return kernels.gelu_tanh_and_mul(down(kernels.silu_and_mul(gate(x), up(x))), x)

    case = paged_case(kernels, [(3, 9)])
    assert torch.equal(run(kernels.compile(forward), case), run(forward, case))


def test_a_replay_gives_the_bits_of_the_pass_for_any_number_of_tokens(
    kernels: NativeKernels, paged_case: Callable[..., Any]
) -> None:
    model = Counting(kernels)
    replay = kernels.compile(model.forward)
    # Use one pool for all, because a pass is recorded again for a new pool.
    case = paged_case(kernels, [(1, 5)])
    results = []
    for lengths in LENGTHS:
        other = paged_case(kernels, lengths)
        case.cache.keys.copy_(other.cache.keys)
        case.cache.values.copy_(other.cache.values)
        other.cache = case.cache
        results.append((run(replay, other), run(model.forward, other)))
    assert model.calls == 1 + len(LENGTHS)
    for replayed, called in results:
        assert torch.equal(replayed, called)


@pytest.mark.parametrize("depths", [(0,), (1, 2), (2, 0, 1)])
def test_a_replay_shows_hidden_states(
    kernels: NativeKernels, paged_case: Callable[..., Any], depths: tuple[int, ...]
) -> None:
    model = Counting(kernels)
    replay = kernels.compile(model.forward)
    case = paged_case(kernels, [(4, 30), (90, 130)])
    without = run(replay, case)
    run(replay, case, taps=Taps(depths))
    calls, replayed, called = model.calls, Taps(depths), Taps(depths)
    result = run(replay, case, taps=replayed)
    assert model.calls == calls, "the pass was not replayed"
    assert torch.equal(result, run(model.forward, case, taps=called))
    assert replayed.states.keys() == called.states.keys() == set(depths)
    assert all(torch.equal(replayed.states[depth], called.states[depth]) for depth in depths)
    assert torch.equal(without, result)


def test_layers_are_recorded_apart(kernels: NativeKernels, paged_case: Callable[..., Any]) -> None:
    model = Counting(kernels)
    replay = kernels.compile(model.forward)
    case = paged_case(kernels, [(4, 30)])
    for layers in (1, None, 1, None):
        assert torch.equal(run(replay, case, layers), run(model.forward, case, layers))
    assert not torch.equal(run(replay, case, 1), run(replay, case))


def test_other_caches_are_not_mistaken_for_those_recorded(
    kernels: NativeKernels, paged_case: Callable[..., Any]
) -> None:
    replay = kernels.compile(Counting(kernels).forward)
    first, second = (paged_case(kernels, [(4, 30)], seed=seed) for seed in (0, 1))
    before = first.cache.keys.clone()
    run(replay, second)
    assert torch.equal(before.nan_to_num(), first.cache.keys.nan_to_num())
    assert not torch.equal(run(replay, first), run(replay, second))


@pytest.mark.parametrize(
    "compute",
    [lambda x: x * 2.0, lambda x: x.mul_(2.0), lambda x: torch.cat((x, x))[:1], lambda x: x[:, ::2].contiguous()],
    ids=["out of place", "in place", "of a list", "a copy"],
)
def test_what_is_computed_outside_of_the_kernels_is_refused(
    kernels: NativeKernels, paged_case: Callable[..., Any], compute: Callable[[Tensor], Tensor]
) -> None:
    model = Counting(kernels)

    def forward(inputs: ForwardInputs) -> Tensor:
        return compute(model.forward(inputs))

    with pytest.raises(ConfigError, match="outside of its kernels"):
        run(kernels.compile(forward), paged_case(kernels, [(1, 5)]))


@pytest.mark.slow
def test_recording_imports_no_compiler() -> None:
    # A compiler would delay the first token, and stay in the memory of every worker.
    done = subprocess.run([sys.executable, "-c", RECORD], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_pass_from_a_later_layer_on_reads_its_inputs(kernels: NativeKernels, paged_case: Callable[..., Any]) -> None:
    model = Counting(kernels)
    replay = kernels.compile(model.forward)
    for lengths in LENGTHS:
        case = paged_case(kernels, lengths)
        tokens = case.batch.query_start[-1]
        ids, caches, wide = torch.arange(tokens) % 50, [case.cache] * 3, torch.randn(tokens, 2 * HIDDEN)
        # Rows that lie apart, as those of a slice do.
        further = (torch.ones(tokens, 1), wide[:, :HIDDEN])
        inputs = ForwardInputs(ids, ids, caches, case.batch, begin=1, further=further)
        expected = model.forward(inputs)
        assert torch.equal(replay(inputs), expected)
        assert not torch.equal(run(replay, case), expected)
    with pytest.raises(IndexError):  # a pass with fewer inputs is another one
        replay(replace(inputs, further=()))


def test_an_error_leaves_the_replay_usable(kernels: NativeKernels, paged_case: Callable[..., Any]) -> None:
    replay = kernels.compile(Counting(kernels).forward)
    case = paged_case(kernels, [(2, 30)])
    good = run(replay, case)
    with pytest.raises(IndexError, match="token id"):
        replay(ForwardInputs(torch.tensor([1, 50]), torch.tensor([28, 29]), [case.cache] * 3, case.batch))
    assert torch.equal(run(replay, case), good)


def test_a_first_call_may_have_no_token(kernels: NativeKernels, paged_case: Callable[..., Any]) -> None:
    replay = kernels.compile(Counting(kernels).forward)
    case = paged_case(kernels, [(2, 30)])
    nothing = torch.empty(0, dtype=torch.int64)
    groups = (replace(case.group, write_slots=nothing, write_offsets=nothing),)
    inputs = ForwardInputs(nothing, nothing, [case.cache], AttentionBatch((0,), (), groups))
    assert replay(inputs).shape == (0, HIDDEN)


def test_passes_of_two_models_are_recorded_one_after_the_other(
    kernels: NativeKernels, paged_case: Callable[..., Any]
) -> None:
    model, case = Counting(kernels), paged_case(kernels, [(2, 30)])
    within, second_is_due = Event(), Event()

    def first(inputs: ForwardInputs) -> Tensor:
        result = model.forward(inputs)
        within.set()
        second_is_due.wait(0.1)  # if the second pass were recorded meanwhile, it would end both recordings
        return kernels.add(result, result)

    def second(inputs: ForwardInputs) -> Tensor:
        second_is_due.set()
        return model.forward(inputs)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run, kernels.compile(first), case)
        assert within.wait(10)
        mine = run(kernels.compile(second), case)
        assert torch.equal(other.result(), 2 * mine)


@pytest.mark.parametrize("which", [0, 1])
def test_tokens_of_another_type_are_refused(kernels: NativeKernels, paged_case: Callable[..., Any], which: int) -> None:
    replay, case = kernels.compile(Counting(kernels).forward), paged_case(kernels, [(2, 30)])
    inputs = [torch.tensor([1, 2]), torch.tensor([28, 29])]
    inputs[which] = inputs[which].int()
    with pytest.raises(ValueError, match="must be int64"):
        replay(ForwardInputs(*inputs, [case.cache], case.batch))


class CountingOperations(NativeKernels):
    """Native kernels that remember the operations of a replay, and how many later ones each is joined with."""

    operations = 0
    joined: Sequence[int] = ()

    def execute(self, ops: Any, count: int, step: Any) -> None:
        if isinstance(ops, ctypes.Array):
            self.operations, self.joined = count, [op.joined for op in ops]
        super().execute(ops, count, step)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize(
    ("how", "operations"),
    [("", 2), ("quantized", 2), ("bias", 4), ("gate is used again", 5), ("other input", 5), ("up is quantized", 4)],
)
def test_a_gated_layer_is_one_operation_with_the_same_bits(
    paged_case: Callable[..., Any], instruction_set: str, dtype: torch.dtype, activation: str, how: str, operations: int
) -> None:
    kernels = CountingOperations(2, instruction_set)
    generator = torch.Generator().manual_seed(0)
    embedding, gate, up = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((99, 70), (50, 70), (50, 70))
    )
    embedding = kernels.pack(embedding)
    gate_weight = kernels.pack(quantize_int8(gate) if how == "quantized" else gate)
    up_weight = kernels.pack(quantize_int8(up) if "quantized" in how else up)
    bias = torch.randn(50, generator=generator).to(dtype) if how == "bias" else None

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        gate = kernels.linear(x, gate_weight, bias)
        up = kernels.linear(kernels.add(x, x) if how == "other input" else x, up_weight)
        y = getattr(kernels, activation)(gate, up)
        return kernels.add(y, gate) if how == "gate is used again" else y

    case, replay = paged_case(kernels, [(2, 30)]), kernels.compile(forward)
    for tokens in (1, 7, 40, 99):
        ids = torch.arange(tokens)
        inputs = ForwardInputs(ids, ids, [case.cache], case.batch)
        replayed = replay(inputs)
        assert kernels.operations == operations
        assert torch.equal(replayed, forward(inputs))


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantize", [None, quantize_int8, quantize_q4_1], ids=["packed", "int8", "q4_1"])
def test_layers_of_one_input_are_computed_together_with_the_same_bits(
    paged_case: Callable[..., Any], instruction_set: str, dtype: torch.dtype, quantize: Any
) -> None:
    kernels = CountingOperations(2, instruction_set)
    generator = torch.Generator().manual_seed(0)
    shapes = [(99, 96), *[(60, 96)] * 6]
    embedding, *layers = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    embedding, bias = kernels.pack(embedding), torch.randn(60, generator=generator).to(dtype)
    weights = [kernels.pack(quantize(each) if quantize and each is not layers[5] else each) for each in layers]

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        first, *others = [kernels.linear(x, own, bias if own is weights[1] else None) for own in weights]
        for other in others:
            first = kernels.silu_and_mul(first, other)
        return first

    case, replay = paged_case(kernels, [(2, 30)]), kernels.compile(forward)
    for tokens in (1, 7, 40):
        ids = torch.arange(tokens)
        inputs = ForwardInputs(ids, ids, [case.cache], case.batch)
        replayed = replay(inputs)
        # At most four are joined, and operations that are not quantized stay separate.
        assert kernels.joined[1:7] == ([3, 0, 0, 0, 1, 0] if quantize is None else [3, 0, 0, 0, 0, 0])
        assert torch.equal(replayed, forward(inputs))


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_layers_of_one_input_are_not_joined_if_only_some_are_multiplied_in_integers(
    paged_case: Callable[..., Any], instruction_set: str
) -> None:
    kernels = CountingOperations(1, instruction_set)
    embedding = kernels.pack(torch.randn(99, 96).bfloat16())
    weights = [kernels.pack(how(torch.randn(60, 96).bfloat16())) for how in (quantize_int8, quantize_fp8) * 2]

    def forward(inputs: ForwardInputs) -> Tensor:
        x = kernels.embed(inputs.token_ids, embedding)
        first, *others = [kernels.linear(x, own) for own in weights]
        for other in others:
            first = kernels.silu_and_mul(first, other)
        return first

    ids = torch.arange(7)
    case = paged_case(kernels, [(2, 30)])
    inputs = ForwardInputs(ids, ids, [case.cache], case.batch)
    replayed = kernels.compile(forward)(inputs)
    assert kernels.joined[1:5] == [0, 0, 0, 0]
    assert torch.equal(replayed, forward(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[(1, 2000)] * 3, [(1, 120)] * 60, [(40, 90)]], ids=["pieces", "whole", "prompt"])
@pytest.mark.parametrize("quantize", [None, quantize_int8], ids=["packed", "quantized"])
def test_nothing_comes_late_from_threads_that_lost_their_core(
    paged_case: Callable[..., Any],
    lengths: list[tuple[int, int]],
    quantize: Callable[[Tensor], QuantizedMatrix] | None,
) -> None:
    # With more threads than cores, a thread can lose its core during a task. Another one takes the task over; later the
    # first thread goes on.

    def passes(kernels: NativeKernels, count: int) -> list[Tensor]:
        replay = kernels.compile(Counting(kernels, hidden=512, quantize=quantize).forward)
        case = paged_case(kernels, lengths, block_tokens=128)
        return [run(replay, case) for _ in range(count)]

    expected = passes(NativeKernels(1), 1)[0]
    for result in passes(NativeKernels(4 * (os.cpu_count() or 1)), 150):
        assert torch.equal(result, expected)


def test_the_adapters_of_layers_with_one_input_are_one_job() -> None:
    x, w, a, b, c = (torch.empty(2, 4, device="meta") for _ in range(5))
    linear, adapt, add = KernelKind.LINEAR, KernelKind.ADAPT, KernelKind.ADD

    def operation(kind: KernelKind, out: Tensor, of: Tensor) -> tuple[Op, tuple[Tensor | None, ...]]:
        return Op(kind), (out, of, None, None, None)

    operations = [
        *(operation(kind, out, x) for out in (a, b) for kind in (linear, adapt)),
        operation(add, w, b),
        operation(linear, c, w),
        operation(adapt, c, w),
    ]
    fused = fuse(operations, [c])
    assert [(op.kind, op.joined) for op, _ in fused] == [
        *((linear, 1), (linear, 0), (adapt, 1), (adapt, 0), (add, 0)),
        *((linear, 0), (adapt, 0)),
    ]
    outs = [operands[0] for _, operands in fused]
    assert all(out is own for out, own in zip(outs, (a, b, a, b, w, c, c), strict=True))
