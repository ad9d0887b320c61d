from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache, view_coded_pool, view_pool
from paceline.kernels.codes import KVCode
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.kernels.reference import ReferenceKernels

SLOTS = 64


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with Triton as thorough, but for one variant of each function, because its interpreter is slow."""
    if torch.cuda.is_available():
        return
    slow = [item for item in items if _runs_triton(item) and not item.get_closest_marker("thorough")]
    last = {_function_of(item): item for item in slow}  # the last variant usually has the most options
    for item in slow:
        if item is not last[_function_of(item)]:
            item.add_marker(pytest.mark.thorough)


def _runs_triton(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    is_ours = item.nodeid.startswith("tests/kernels/")
    return is_ours and callspec is not None and callspec.params.get("kernels") == "triton"


def _function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@dataclass
class PagedCase:
    """Contexts in a pool that is NaN everywhere else. Table entries before a window are invalid."""

    queries: Tensor
    keys: list[Tensor]
    """Keys of each request, [context, kv_heads, head_dim]. Values have the same shape."""
    values: list[Tensor]
    cache: LayerCache
    batch: AttentionBatch
    window: int

    @property
    def group(self) -> GroupTables:
        return self.batch.groups[0]

    def only(self, request: int) -> tuple[Tensor, AttentionBatch, GroupTables]:
        """Return the queries, batch and group of one request without the others."""
        start, end = self.batch.query_start[request], self.batch.query_start[request + 1]
        group = GroupTables(
            self.group.block_tokens,
            self.group.window,
            self.group.tables[request : request + 1],
            self.group.write_slots[start:end],
            self.group.write_offsets[start:end],
        )
        context, last_keys = self.batch.context_len[request], self.batch.last_keys
        own = None if last_keys is None else last_keys[start:end]
        return self.queries[start:end], AttentionBatch((0, end - start), (context,), (group,), last_keys=own), group


def make_case(
    kernels: Kernels,
    lengths: list[tuple[int, int]],
    *,
    heads: int = 6,
    kv_heads: int = 3,
    head_dim: int = 20,
    block_tokens: int = 16,
    window: int = 0,
    seed: int = 0,
    places: int = 0,
    dtype: torch.dtype = torch.float32,
    spans: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    code: KVCode | None = None,
) -> PagedCase:
    """Make a case. `lengths` has (query tokens, context length) of each request.

    `seed` is the seed of the numbers, `places` the seed of the blocks' slots. `spans` has, for some requests, (start,
    end) of tokens that see each other if attention looks ahead. `code` is that of keys and values.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        # Make the numbers on the CPU, so that they are the same on all devices.
        return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)

    slot_elements = 2 * kv_heads * block_tokens * (head_dim + 2) + 24  # with padding after the block
    pool = torch.full((SLOTS * slot_elements,), float("nan"), dtype=dtype)
    if code is None:
        cache = view_pool(pool, slot_elements, 1, kv_heads, block_tokens, head_dim)[0]
    else:
        slot_bytes = slot_elements * dtype.itemsize
        cache = view_coded_pool(pool, slot_bytes, 1, kv_heads, block_tokens, head_dim, code)[0]
    free = iter(torch.randperm(SLOTS, generator=torch.Generator().manual_seed(places), device="cpu").tolist())
    width = max(-(-context // block_tokens) for _, context in lengths)
    tables = torch.full((len(lengths), width), 2**31 - 1, dtype=torch.int32)
    keys, values, starts, slots, offsets = [], [], [0], [], []
    for request, (count, context) in enumerate(lengths):
        keys.append(random(context, kv_heads, head_dim))
        values.append(random(context, kv_heads, head_dim))
        first_key = max(0, context - count - window + 1) if window else 0
        for block in range(first_key // block_tokens, -(-context // block_tokens)):
            tables[request, block] = next(free)
        positions = torch.arange(first_key, context)
        group = GroupTables(
            block_tokens,
            window,
            tables,
            tables[request, positions // block_tokens].long(),
            positions % block_tokens,
        )
        kernels.store_kv(keys[-1][first_key:], values[-1][first_key:], cache, group)
        slots.append(group.write_slots[len(positions) - count :])
        offsets.append(group.write_offsets[len(positions) - count :])
        starts.append(starts[-1] + count)
    group = GroupTables(block_tokens, window, tables, torch.cat(slots), torch.cat(offsets))
    last_keys = None if spans is None else _last_keys(lengths, spans)
    batch = AttentionBatch(tuple(starts), tuple(context for _, context in lengths), (group,), last_keys=last_keys)
    return PagedCase(random(starts[-1], heads, head_dim), keys, values, cache, batch, window)


def _last_keys(lengths: Sequence[tuple[int, int]], spans: Mapping[int, Sequence[tuple[int, int]]]) -> Tensor:
    found = []
    for request, (count, context) in enumerate(lengths):
        last = torch.arange(context)
        for start, end in spans.get(request, ()):
            last[start:end] = end - 1
        found.append(last[context - count :])
    return torch.cat(found)


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., PagedCase]:
    return make_case


BACKENDS: dict[str, Callable[[], Kernels]] = {
    "reference": ReferenceKernels,
    **{f"native-{name}": partial(NativeKernels, 2, name) for name in instruction_sets()},
}


@pytest.fixture(scope="session", params=[*BACKENDS, "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Every backend, because all must pass the same tests. Triton runs on a GPU if there is one."""
    if request.param != "triton":
        yield BACKENDS[request.param]()
        return
    pytest.importorskip("triton", reason="the package triton is not installed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        yield select_kernels(device, request.param)


@pytest.fixture(scope="module", params=["reference", *instruction_sets()])
def computers(request: pytest.FixtureRequest) -> list[Kernels]:
    """Kernels whose results must have the same bits: the same instruction set with one thread and with several."""
    if request.param == "reference":
        return [ReferenceKernels(), ReferenceKernels()]
    return [NativeKernels(threads, request.param) for threads in (1, 3)]
