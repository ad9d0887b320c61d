"""Steps that are padded to a recording's size give the same bits, and the padding changes no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu.random_model import PackedWeights, RandomWeights, llama_config
from paceline.core.kv_layout import make_layout
from paceline.engine.runner import layer_caches
from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import ForwardInputs, Taps
from paceline.models.gemma3 import Gemma3

pytest.importorskip("triton", reason="the package triton is not installed")

from paceline.kernels.triton_kernels.graphs import CalledAgain, CudaRecorder, Graphs, Recording, Size, size_of

# Rows that pad a step have arbitrary content, about which numpy warns in Triton's interpreter.
pytestmark = [
    pytest.mark.slow,
    *(pytest.mark.filterwarnings(f"ignore:{kind} ") for kind in ("overflow", "invalid value", "divide by zero")),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = llama_config(hidden=40, inner=48, layers=2, heads=2, kv_heads=1, vocab=64)
FULL = LLAMA.attention["full"]
CONFIG = replace(LLAMA, layer_types=("sliding", "full"), attention={"full": FULL, "sliding": replace(FULL, window=20)})
SLOTS = 128
STEPS = [
    [(1, 5)],
    [(1, 30), (1, 1), (1, 63)],
    [(3, 40), (1, 17), (2, 2)],
    [(2, 260)],  # long enough for splits
    [(1, 60), (0, 9), (1, 33)],  # the second request has ended
    [(1, 7)],  # smaller than the earlier steps of the same recording
]
"""Steps: the number of queries and the context length of each request."""


def recorder() -> Callable[[Callable[[], Tensor]], Recording]:
    return CudaRecorder() if DEVICE.type == "cuda" else CalledAgain


class World:
    """A model with two groups, and steps over a pool that is NaN outside of contexts."""

    def __init__(self) -> None:
        self.kernels = select_kernels(DEVICE, "triton-invariant")
        weights = PackedWeights(RandomWeights(CONFIG, torch.float32, DEVICE), self.kernels)
        self.model = Gemma3(CONFIG, weights, self.kernels)
        self.layout = make_layout(self.model.group_shapes, 4, "test")
        self.elements = self.layout.slot_bytes // 4

    def make(self, lengths: list[tuple[int, int]], seed: int) -> tuple[Tensor, Tensor, AttentionBatch, Tensor]:
        """Return the inputs of a step, and the pool before it, which has random contexts."""
        generator = torch.Generator().manual_seed(seed)
        pool = torch.full((SLOTS, self.elements), float("nan"))
        free = iter(torch.randperm(SLOTS, generator=generator).tolist())
        places = [(request, p) for request, (count, end) in enumerate(lengths) for p in range(end - count, end)]
        groups = []
        for group in self.layout.groups:
            window, width = group.shape.window, max(group.blocks_for(context) for _, context in lengths)
            tables = torch.full((len(lengths), width + 1), 2**31 - 1, dtype=torch.int32)
            for request, (count, context) in enumerate(lengths):
                first = max(0, context - count - window + 1) if window else 0
                for block in range(first // group.block_tokens, group.blocks_for(context)):
                    tables[request, block] = slot = next(free)
                    pool[slot] = torch.randn(self.elements, generator=generator)
            slots = [int(tables[request, position // group.block_tokens]) for request, position in places]
            offsets = [position % group.block_tokens for _, position in places]
            groups.append(GroupTables(group.block_tokens, window, tables.to(DEVICE), ints(slots), ints(offsets)))
        starts = [sum(count for count, _ in lengths[:request]) for request in range(len(lengths) + 1)]
        batch = AttentionBatch(tuple(starts), tuple(context for _, context in lengths), tuple(groups))
        ids = torch.randint(0, CONFIG.vocab_size, (len(places),), generator=generator)
        return ids.to(DEVICE), ints([position for _, position in places]), batch, pool


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(DEVICE)


def test_a_step_that_is_filled_up_has_the_bits_of_the_step() -> None:
    world = World()
    graphs = Graphs(world.model.forward, recorder)
    held = torch.zeros(SLOTS, world.elements, device=DEVICE)
    caches = layer_caches(world.layout, held.view(-1))
    for seed, lengths in enumerate(STEPS):
        ids, positions, batch, pool = world.make(lengths, seed)
        held.copy_(pool)
        inputs = ForwardInputs(ids, positions, caches, batch)
        expected, expected_pool = world.model.forward(inputs), held.clone()
        held.copy_(pool)
        result = graphs(inputs)
        assert torch.equal(result, expected)
        assert torch.equal(held.view(torch.int32), expected_pool.view(torch.int32))


def test_hidden_states_are_those_of_the_step() -> None:
    world = World()
    graphs = Graphs(world.model.forward, recorder)
    held = torch.zeros(SLOTS, world.elements, device=DEVICE)
    caches = layer_caches(world.layout, held.view(-1))
    # The second step is padded, and the third one replays the recording of the first.
    for seed, lengths in enumerate((STEPS[0], STEPS[2], STEPS[-1])):
        ids, positions, batch, pool = world.make(lengths, seed)
        replayed, called = Taps((1, 0)), Taps((1, 0))
        held.copy_(pool)
        expected = world.model.forward(ForwardInputs(ids, positions, caches, batch, taps=called))
        held.copy_(pool)
        assert torch.equal(graphs(ForwardInputs(ids, positions, caches, batch, taps=replayed)), expected)
        assert all(torch.equal(replayed.states[depth], called.states[depth]) for depth in (0, 1))


def test_a_pass_from_a_later_layer_on_reads_its_inputs() -> None:
    world = World()
    graphs = Graphs(world.model.forward, recorder)
    held = torch.zeros(SLOTS, world.elements, device=DEVICE)
    caches = layer_caches(world.layout, held.view(-1))
    for seed, lengths in enumerate(STEPS[:3]):
        ids, positions, batch, pool = world.make(lengths, seed)
        x = torch.randn(len(ids), CONFIG.hidden_size, device=DEVICE)
        held.copy_(pool)
        inputs = ForwardInputs(ids, positions, caches, batch, begin=1, further=(x,))
        expected = world.model.forward(inputs)
        held.copy_(pool)
        assert torch.equal(graphs(inputs), expected)


def test_results_outlive_the_next_step() -> None:
    world = World()
    graphs = Graphs(world.model.forward, recorder)
    held = torch.zeros(SLOTS, world.elements, device=DEVICE)
    caches = layer_caches(world.layout, held.view(-1))
    results = []
    for seed in range(2):
        ids, positions, batch, pool = world.make([(1, 9), (1, 12)], seed)
        held.copy_(pool)
        inputs = ForwardInputs(ids, positions, caches, batch)
        results.append((graphs(inputs), world.model.forward(inputs)))
    assert all(torch.equal(*pair) for pair in results)
    assert not torch.equal(results[0][0], results[1][0])


def test_a_recording_keeps_what_its_replays_read() -> None:
    world = World()
    plans = [{"a plan": torch.zeros(1)}]
    graphs = Graphs(world.model.forward, recorder, lambda: plans[0])
    ids, positions, batch, pool = world.make([(1, 9)], 1)
    graphs(ForwardInputs(ids, positions, layer_caches(world.layout, pool.view(-1)), batch))
    read = weakref.ref(plans[0]["a plan"])
    plans[0] = {}  # the next batch does this
    gc.collect()
    assert read() is not None


@pytest.mark.thorough
def test_sizes_layers_and_caches_have_recordings_of_their_own() -> None:
    world = World()
    recorded: list[Recording] = []

    def record(run: Callable[[], list[Tensor]]) -> Recording:
        recorded.append(recorder()(run))
        return recorded[-1]

    graphs = Graphs(world.model.forward, lambda: record)
    pools = [torch.zeros(SLOTS, world.elements, device=DEVICE) for _ in range(2)]
    caches = [layer_caches(world.layout, pool.view(-1)) for pool in pools]

    def run(lengths: list[tuple[int, int]], pool: int, layers: int | None = None) -> int:
        ids, positions, batch, content = world.make(lengths, 1)
        pools[pool].copy_(content)
        inputs = ForwardInputs(ids, positions, caches[pool], batch, layers)
        assert torch.equal(graphs(inputs), world.model.forward(inputs))
        return len(recorded)

    assert run([(1, 9)], 0) == 1
    assert run([(1, 33)], 0) == 1
    assert run([(1, 9)], 0, layers=1) == 2
    assert run([(1, 9)], 1) == 3
    assert run([(1, 9), (1, 9)], 0) == 4
    assert run([(17, 18)], 0) == 4  # a prompt is not recorded


@pytest.mark.parametrize(
    ("counts", "contexts", "expected"),
    [
        ([1], [1], Size(1, 1, 256)),
        ([1] * 3, [1, 256, 9], Size(4, 1, 256)),
        ([1] * 64, [4096] * 64, Size(64, 1, 4096)),
        ([5, 0, 1], [257, 9, 9], Size(4, 8, 512)),
        ([16] * 32, [600] * 32, Size(32, 16, 1024)),
        ([16] * 33, [600] * 33, None),
        ([17], [600], None),
        ([1] * 513, [9] * 513, None),
        ([0], [9], None),
        ([], [], None),
    ],
)
def test_a_step_takes_the_smallest_size_that_holds_it(counts: list[int], contexts: list[int], expected: object) -> None:
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    assert size_of(AttentionBatch(tuple(starts), tuple(contexts), ())) == expected


def test_a_step_that_looks_ahead_has_no_size() -> None:
    assert size_of(AttentionBatch((0, 2), (2,), (), last_keys=torch.tensor([1, 1]))) is None
