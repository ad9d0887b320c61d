"""Layers with a state: convolution and scan follow their formulas, and bits do not depend on chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import RecurrentState
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from tests.kernels.states import SLOTS, Piece, StatePool, pieces_of, sizes_of

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Sizes:
    heads: int = 3
    head_dim: int = 5
    state_size: int = 20
    taps: int = 4
    block_tokens: int = 16

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.state_size


class Layer:
    """A layer with random weights, and its inputs for some contexts."""

    def __init__(self, sizes: Sizes, contexts: Sequence[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            # Make the numbers on the CPU, so that they are the same on all devices.
            return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())

        self.sizes = sizes
        self.weight, self.bias = random(sizes.taps, sizes.channels).to(dtype), random(sizes.channels).to(dtype)
        self.rates = torch.stack((-random(sizes.heads).exp(), random(sizes.heads), random(sizes.heads)))
        self.x = [random(context, sizes.channels).to(dtype) for context in contexts]
        self.time_steps = [random(context, sizes.heads).to(dtype) for context in contexts]


class Pool(StatePool):
    """The states of a layer that is convolved and scanned."""

    def __init__(self, layer: Layer, drafts: int = 0) -> None:
        sizes = layer.sizes
        scanned = ((sizes.heads, sizes.head_dim, sizes.state_size), (1 + drafts, sizes.channels + sizes.heads))
        parts = (*scanned, (sizes.taps - 1 + drafts, sizes.channels))
        super().__init__(parts, list(map(len, layer.x)), sizes.block_tokens)
        *scan, self.convolved = self.parts
        self.scanned = RecurrentState(*scan)
        self._layer = layer

    def step(
        self, kernels: Kernels, pieces: Sequence[Piece], final: tuple[int, ...] = ()
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute tokens [begin, end) of some contexts. Return the convolved and scanned results of each."""
        layer, batch = self._layer, self.batch(pieces, final)
        x, time_steps, group = pieces_of(layer.x, pieces), pieces_of(layer.time_steps, pieces), batch.groups[0]
        seen = kernels.causal_conv(x, layer.weight, layer.bias, self.convolved, batch, group)
        found = kernels.selective_scan(x, time_steps, layer.rates, self.scanned, batch, group)
        return list(zip(torch.split(seen, sizes_of(pieces)), torch.split(found, sizes_of(pieces))))


def formula(layer: Layer, context: int) -> tuple[Tensor, Tensor]:
    """Return the results of both operations for a whole context, in fp64."""
    sizes, x = layer.sizes, layer.x[context].double()
    padded = torch.cat((torch.zeros(sizes.taps - 1, sizes.channels, dtype=torch.float64), x))
    sums = [(layer.weight.double() * padded[i : i + sizes.taps]).sum(0) + layer.bias.double() for i in range(len(x))]
    decay, bias, skip = layer.rates.double()
    state = torch.zeros(sizes.heads, sizes.head_dim, sizes.state_size, dtype=torch.float64)
    found = []
    for row, raw in zip(x, layer.time_steps[context].double()):
        step = torch.log1p((raw + bias).exp())
        inputs = row[: sizes.inner].view(sizes.heads, sizes.head_dim)
        b, c = row[sizes.inner :].chunk(2)
        state = (step * decay).exp()[:, None, None] * state + (step[:, None] * inputs)[:, :, None] * b
        found.append((state @ c + skip[:, None] * inputs).flatten())
    return torch.nn.functional.silu(torch.stack(sums)), torch.stack(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(1, 1, 1, 2), Sizes(2, 33, 16, 3, 32), Sizes(5, 16, 70, 1)], ids=str)
def test_convolution_and_scan_are_their_formulas(kernels: Kernels, sizes: Sizes, dtype: torch.dtype) -> None:
    layer = Layer(sizes, (50, 17, 1), dtype)
    pool = Pool(layer)
    first = pool.step(kernels, [(0, 0, 21), (2, 0, 1)])
    second = pool.step(kernels, [(1, 0, 17), (2, 1, 1), (0, 21, 50)])
    results = [[first[0], second[2]], [second[0]], [first[1], second[1]]]
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for context, parts in enumerate(results):
        for found, wanted in zip(zip(*parts), formula(layer, context)):
            whole = torch.cat(found)
            assert whole.dtype == dtype
            torch.testing.assert_close(whole.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(
    computers: list[Kernels], dtype: torch.dtype, data: st.DataObject
) -> None:
    sizes = Sizes(
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from([16, 32])),
    )
    contexts = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    layer = Layer(sizes, contexts, dtype, data.draw(st.integers(0, 99)))
    together, apart = Pool(layer), Pool(layer)
    wholes = together.step(computers[0], [(context, 0, length) for context, length in enumerate(contexts)])
    for context, (length, whole) in enumerate(zip(contexts, wholes)):
        parts, begin = [], 0
        while begin < length:
            end = min(length, begin + data.draw(st.integers(1, 40)))
            parts += apart.step(computers[1], [(context, begin, end)])
            begin = end
        for found, wanted in zip(zip(*parts), whole):
            assert torch.equal(torch.cat(found), wanted)
    # The states after every block are the same, and nothing else was written.
    assert torch.equal(together.bits(), apart.bits())


@dataclass(frozen=True)
class Move:
    """A step of one context."""

    begin: int
    right: int
    """Tokens from `begin` that have the context's inputs."""
    wrong: int
    """Tokens after them that have other inputs, as refused drafts have."""
    final: int


@st.composite
def moves(draw: st.DrawFn, length: int, drafts: int) -> list[Move]:
    """Return steps that together compute a context of `length` tokens, and go back in all ways that drafters need."""
    found, begin = [], 0
    while begin < length:
        kind = draw(st.sampled_from(["prompt", "verify", "own layers", "draft model"]))
        right, ahead = draw(st.integers(1, min(30, length - begin))), draw(st.integers(1, drafts))
        newest = begin + 1
        if kind == "prompt":
            found.append(Move(begin, right, 0, begin + right))
        elif kind == "verify":
            right = min(right, ahead + 1)
            found.append(Move(begin, right, ahead + 1 - right, newest))
        elif kind == "own layers":  # the newest token and drafts after it, all of which are computed again
            found += [Move(begin + i, int(i < right), int(i >= right), begin) for i in range(ahead)]
            right = 0
        else:
            right = min(right, ahead + 1)
            found += [Move(begin + i, int(i < right), int(i >= right), newest) for i in range(ahead + 1)]
        begin += right
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_a_state_goes_back_to_any_token_that_is_not_final(
    computers: list[Kernels], dtype: torch.dtype, data: st.DataObject
) -> None:
    sizes = Sizes(
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from([16, 32])),
    )
    check_going_back(computers, dtype, sizes, data)


def check_going_back(computers: list[Kernels], dtype: torch.dtype, sizes: Sizes, data: st.DataObject) -> None:
    """Compute contexts with drafts, and compare the results of their own tokens with those of one prompt."""
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=2))
    drafts = data.draw(st.integers(1, 16))
    padded = [length + 2 * drafts for length in lengths]
    right, wrong = Layer(sizes, padded, dtype, seed=1), Layer(sizes, padded, dtype, seed=2)
    layer = Layer(sizes, padded, dtype)
    layer.weight, layer.bias, layer.rates = right.weight, right.bias, right.rates
    wanted = Pool(right).step(computers[0], [(row, 0, length) for row, length in enumerate(lengths)])
    pool, found = Pool(layer, drafts), [[torch.zeros_like(part) for part in own] for own in wanted]
    plans = [data.draw(moves(length, drafts)) for length in lengths]
    for step in zip_longest(*plans):
        own = [(row, move) for row, move in enumerate(step) if move is not None]
        for row, move in own:
            middle, end = move.begin + move.right, move.begin + move.right + move.wrong
            for inputs in ("x", "time_steps"):
                mine = getattr(layer, inputs)[row]
                mine[move.begin : middle] = getattr(right, inputs)[row][move.begin : middle]
                mine[middle:end] = getattr(wrong, inputs)[row][middle:end]
            # A later step may begin after the final tokens, so their last block is kept, too.
            pool.keep_only(row, min(move.begin, move.final) - 1, move.begin - 1)
        before = pool.bits()
        results = pool.step(
            computers[1],
            [(row, move.begin, move.begin + move.right + move.wrong) for row, move in own],
            tuple(min(move.final, move.begin + move.right + move.wrong) for _, move in own),
        )
        for (row, move), result in zip(own, results):
            for mine, part in zip(found[row], result):
                mine[move.begin : move.begin + move.right] = part[: move.right]
            full = pool.tables[row][: min(move.begin, move.final) // sizes.block_tokens]
            assert torch.equal(pool.bits().view(SLOTS, -1)[full], before.view(SLOTS, -1)[full])
    for mine, whole in zip(found, wanted):
        for part, other in zip(mine, whole):
            assert torch.equal(part, other)


def test_a_step_that_begins_before_the_final_tokens_is_refused(computers: list[Kernels]) -> None:
    layer = Layer(Sizes(block_tokens=32), (40,), torch.float32)
    pool = Pool(layer, 16)
    pool.step(computers[0], [(0, 0, 10)], (8,))
    pool.step(computers[0], [(0, 8, 10)], (9,))
    with pytest.raises(ValueError, match="state"):
        pool.step(computers[0], [(0, 8, 10)], (9,))
    with pytest.raises(ValueError, match=r"taken back|go back"):
        pool.step(computers[0], [(0, 10, 28)], (10,))


def test_a_context_goes_on_from_another_s_full_block_and_leaves_it_as_it_is(computers: list[Kernels]) -> None:
    kernels = computers[0]
    layer = Layer(Sizes(), (50, 50), torch.float32)
    layer.x[1][:32], layer.time_steps[1][:32] = layer.x[0][:32], layer.time_steps[0][:32]
    alone, shared = Pool(layer), Pool(layer)
    ((seen, found),) = alone.step(kernels, [(1, 0, 50)])
    shared.step(kernels, [(0, 0, 50)])
    shared.tables[1][:2] = shared.tables[0][:2]
    before = shared.bits().view(SLOTS, -1)[shared.tables[0]]
    ((seen_behind, found_behind),) = shared.step(kernels, [(1, 32, 50)])
    assert torch.equal(seen_behind, seen[32:])
    assert torch.equal(found_behind, found[32:])
    assert torch.equal(shared.bits().view(SLOTS, -1)[shared.tables[0]], before)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_slot_outside_the_pool_is_refused(where: int) -> None:
    layer = Layer(Sizes(), (40,), torch.float32)
    pool = Pool(layer)
    pool.step(NativeKernels(1), [(0, 0, 10)])
    pool.tables[0][where] = SLOTS
    with pytest.raises(IndexError, match="slot outside the pool"):
        pool.step(NativeKernels(1), [(0, 10, 40)])


Change = Callable[[Any], Any]


def three_tokens() -> tuple[Layer, Pool, AttentionBatch]:
    layer, nowhere = Layer(Sizes(), (3,), torch.float32), torch.zeros(3, dtype=torch.int64)
    group = GroupTables(16, 2, torch.zeros(1, 1, dtype=torch.int32), nowhere, nowhere)
    return layer, Pool(layer), AttentionBatch((0, 3), (3,), (group,))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda weight: weight.bfloat16()),
        ("weight", lambda weight: weight.repeat(2, 1)),
        ("bias", lambda bias: bias[1:]),
        ("state", lambda state: state.mT),
        ("state", lambda state: state.mT.contiguous().mT),
    ],
)
def test_operands_of_a_convolution_that_do_not_fit_are_refused(name: str, change: Change) -> None:
    layer, pool, batch = three_tokens()
    operands = {"weight": layer.weight, "bias": layer.bias, "state": pool.convolved}
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=r" must be \[|must be dense"):
        NativeKernels(1).causal_conv(layer.x[0], **operands, batch=batch, group=batch.groups[0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[:, 1:]),
        ("time_steps", lambda time_steps: time_steps[1:]),
        ("rates", lambda rates: rates.double()),
        ("state", lambda state: RecurrentState(state.state.bfloat16(), state.pending)),
        ("state", lambda state: RecurrentState(state.state, state.pending[:, 1:])),
        ("state", lambda state: RecurrentState(state.state, state.pending.clone())),
    ],
)
def test_operands_of_a_scan_that_do_not_fit_are_refused(name: str, change: Change) -> None:
    layer, pool, batch = three_tokens()
    operands: dict[str, Any] = {"x": layer.x[0], "time_steps": layer.time_steps[0], "rates": layer.rates}
    operands["state"] = pool.scanned
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=r" must be \[|must be in the same blocks"):
        NativeKernels(1).selective_scan(**operands, batch=batch, group=batch.groups[0])


def test_scaling_is_rounded_to_the_dtype(kernels: Kernels) -> None:
    for dtype in DTYPES:
        x = torch.randn(5, 37).to(dtype)
        assert torch.equal(kernels.scale(x, 0.37), (x.float() * 0.37).to(dtype))
