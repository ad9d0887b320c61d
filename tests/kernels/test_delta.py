"""The gated delta rule follows its formula, and its bits do not depend on chunks, batches or threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

DRAFTS = 5
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Sizes:
    key_heads: int = 2
    repeats: int = 3
    key_dim: int = 20
    value_dim: int = 37
    block_tokens: int = 16

    @property
    def heads(self) -> int:
        return self.key_heads * self.repeats

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def row(self) -> int:
        return 2 * self.keys + self.heads * self.value_dim


class Contexts(StatePool):
    """A layer with random weights, its inputs for some contexts, and their states."""

    def __init__(self, sizes: Sizes, lengths: Sequence[int], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            # Make the numbers on the CPU, so that they are the same on all devices.
            return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())

        self.sizes = sizes
        self.rates = torch.stack((-random(sizes.heads).exp(), random(sizes.heads)))
        self.x = [random(length, sizes.row).to(dtype) for length in lengths]
        self.gates = [random(length, sizes.heads).to(dtype) for length in lengths]
        self.time_steps = [random(length, sizes.heads).to(dtype) for length in lengths]
        inputs = sizes.row + 2 * sizes.heads
        parts = ((sizes.heads, sizes.key_dim, sizes.value_dim), (1 + DRAFTS, inputs), (3,))
        super().__init__(parts, lengths, sizes.block_tokens)
        self.state = RecurrentState(*self.parts[:2])

    def step(self, kernels: Kernels, pieces: Sequence[Piece], final: tuple[int, ...] = ()) -> list[Tensor]:
        """Compute tokens [begin, end) of some contexts, and return the results of each."""
        batch = self.batch(pieces, final)
        x, gates, time_steps = (pieces_of(own, pieces) for own in (self.x, self.gates, self.time_steps))
        found = kernels.gated_delta_rule(x, gates, time_steps, self.rates, self.state, batch, batch.groups[0])
        return list(torch.split(found, sizes_of(pieces)))

    def formula(self, context: int) -> Tensor:
        """Return the results for a whole context, in fp64."""
        sizes, (decay, bias) = self.sizes, self.rates.double()
        state = torch.zeros(sizes.heads, sizes.key_dim, sizes.value_dim, dtype=torch.float64)
        found = []
        rows = zip(self.x[context].double(), self.gates[context].double(), self.time_steps[context].double())
        for row, gate, time_step in rows:
            queries = row[: sizes.keys].view(sizes.key_heads, sizes.key_dim)
            keys = row[sizes.keys : 2 * sizes.keys].view(sizes.key_heads, sizes.key_dim)
            values = row[2 * sizes.keys :].view(sizes.heads, sizes.value_dim)
            step, written = torch.log1p((time_step + bias).exp()), 1 / (1 + (-gate).exp())
            for head in range(sizes.heads):
                query, key = (own[head // sizes.repeats] for own in (queries, keys))
                query = query / (query @ query + 1e-6).sqrt() / sizes.key_dim**0.5
                key = key / (key @ key + 1e-6).sqrt()
                state[head] *= (step[head] * decay[head]).exp()
                state[head] += torch.outer(key, written[head] * (values[head] - key @ state[head]))
                found.append(query @ state[head])
        return torch.cat(found).view(len(self.x[context]), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(1, 1, 1, 1), Sizes(1, 4, 33, 16, 32), Sizes(3, 1, 16, 150)], ids=str)
def test_the_rule_is_its_formula(kernels: Kernels, sizes: Sizes, dtype: torch.dtype) -> None:
    contexts = Contexts(sizes, (50, 17, 1), dtype)
    first = contexts.step(kernels, [(0, 0, 21), (2, 0, 1)])
    second = contexts.step(kernels, [(1, 0, 17), (0, 21, 50)])
    results = [torch.cat((first[0], second[1])), second[0], first[1]]
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for context, found in enumerate(results):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), contexts.formula(context), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_a_token_has_the_same_bits_in_any_batch_and_chunk(
    computers: list[Kernels], dtype: torch.dtype, data: st.DataObject
) -> None:
    sizes = Sizes(
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 90)),
        data.draw(st.sampled_from([16, 32])),
    )
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    seed = data.draw(st.integers(0, 99))
    together, apart = Contexts(sizes, lengths, dtype, seed), Contexts(sizes, lengths, dtype, seed)
    wholes = together.step(computers[0], [(context, 0, length) for context, length in enumerate(lengths)])
    for context, (length, whole) in enumerate(zip(lengths, wholes)):
        parts, begin = [], 0
        while begin < length:
            end = min(length, begin + data.draw(st.integers(1, 40)))
            parts += apart.step(computers[1], [(context, begin, end)])
            begin = end
        assert torch.equal(torch.cat(parts), whole)
    # The states after every block are the same, and nothing else was written.
    assert torch.equal(together.bits(), apart.bits())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_refused_drafts_leave_no_trace(computers: list[Kernels], dtype: torch.dtype, data: st.DataObject) -> None:
    sizes, length = Sizes(data.draw(st.integers(1, 2)), 2, 5, 17), data.draw(st.integers(1, 50))
    right, mixed = (Contexts(sizes, [length + DRAFTS], dtype, seed) for seed in (1, 2))
    mixed.rates = right.rates
    (whole,) = right.step(computers[0], [(0, 0, length)])
    begin, parts = 0, []
    while begin < length:
        accepted = data.draw(st.integers(1, min(length - begin, DRAFTS)))
        for own, other in ((mixed.x, right.x), (mixed.gates, right.gates), (mixed.time_steps, right.time_steps)):
            own[0][begin : begin + accepted] = other[0][begin : begin + accepted]
        refused = data.draw(st.integers(0, DRAFTS + 1 - accepted))
        (found,) = mixed.step(computers[1], [(0, begin, begin + accepted + refused)], (begin + 1,))
        parts.append(found[:accepted])
        begin += accepted
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_slot_outside_the_pool_is_refused(where: int) -> None:
    contexts = Contexts(Sizes(), (40,), torch.float32)
    contexts.step(NativeKernels(1), [(0, 0, 10)])
    contexts.tables[0][where] = SLOTS
    with pytest.raises(IndexError, match="slot outside the pool"):
        contexts.step(NativeKernels(1), [(0, 10, 40)])


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x[:, 1:], r" must be \["),
        ("x", lambda x: torch.cat((x, x), 1)[:, : 8 * 20 + 6 * 37], "6 value heads cannot share 4 key heads evenly"),
        ("x", lambda x: x[:, 80:], "6 value heads cannot share 0 key heads evenly"),
        ("gates", lambda gates: gates.bfloat16(), r" must be \["),
        ("time_steps", lambda time_steps: time_steps[1:], r" must be \["),
        ("rates", lambda rates: rates[:1], r" must be \["),
        ("state", lambda state: RecurrentState(state.state.bfloat16(), state.pending), r" must be \["),
        ("state", lambda state: RecurrentState(state.state, state.pending[:, :, 1:]), r" must be \["),
        ("state", lambda state: RecurrentState(state.state, state.pending.clone()), "in the same blocks"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, change: Change, message: str) -> None:
    contexts, nowhere = Contexts(Sizes(), (3,), torch.float32), torch.zeros(3, dtype=torch.int64)
    group = GroupTables(16, 2, torch.zeros(1, 1, dtype=torch.int32), nowhere, nowhere)
    operands: dict[str, Any] = {
        "x": contexts.x[0],
        "gates": contexts.gates[0],
        "time_steps": contexts.time_steps[0],
        "rates": contexts.rates,
        "state": contexts.state,
    }
    operands[name] = change(operands[name])
    with pytest.raises(ValueError, match=message):
        NativeKernels(1).gated_delta_rule(**operands, batch=AttentionBatch((0, 3), (3,), (group,)), group=group)
