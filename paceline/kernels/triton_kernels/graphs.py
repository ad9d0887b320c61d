"""Decode steps as CUDA graphs: recorded once for each size of a batch, then replayed by one call.

A step is padded to the next size with tokens that are not stored and requests without tokens. No row depends on other
rows, so the real rows keep their bits. The exception is the vendor's matrix product, which `triton` uses and
`triton-invariant` does not: even without graphs, it may add in another order if the number of rows changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import triton
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import Forward, ForwardInputs, Taps, run_with_states
from paceline.kernels.transfer import to_device
from paceline.kernels.triton_kernels.attention import SPLIT, StaticBatch

_MAX_QUERIES = 16
"""Largest number of tokens of one request in a recorded step: one token and its drafts."""
_MAX_TOKENS = 512
"""Largest number of tokens of a recorded step. The time of a larger step is determined by the device, not by its
launches.
"""
_MAX_GRAPHS = 64


class Recording(Protocol):
    """A recorded computation, whose inputs and results keep their place in memory."""

    results: list[Tensor]

    def replay(self) -> None:
        """Compute `results` again from the present inputs."""


Record = Callable[[Callable[[], list[Tensor]]], Recording]


class CudaRecorder:
    """Makes CUDA graphs, which all share one memory pool for results and intermediate values."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], list[Tensor]]) -> Recording:
        # The first run compiles kernels, and vendor libraries allocate memory. Both must happen before the recording.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = run()
        return _CudaRecording(graph, results)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Tensor]) -> None:
        self.results = results
        self.replay = graph.replay


class CalledAgain:
    """A recording for Triton's interpreter, which has no graphs: a replay calls the function again."""

    def __init__(self, run: Callable[[], list[Tensor]]) -> None:
        self._run = run
        self.results = run()

    def replay(self) -> None:
        for result, computed in zip(self.results, self._run()):
            result.copy_(computed)


@dataclass(frozen=True, slots=True)
class Size:
    """The largest batch that a recording can replay."""

    requests: int
    """Largest number of requests, a power of two."""
    queries: int
    """Largest number of tokens of each request, a power of two."""
    context: int
    """Largest number of keys of each request: SPLIT times a power of two."""


def size_of(batch: AttentionBatch) -> Size | None:
    """Return the smallest size that fits; None if the step is too large or empty, or if its tokens look ahead or have
    adapters, whose kernels depend on the largest rank among them.
    """
    if not batch.context_len or batch.query_start[-1] == 0 or batch.last_keys is not None or batch.adapters is not None:
        return None
    queries = triton.next_power_of_2(max(end - begin for begin, end in pairwise(batch.query_start)))
    requests = triton.next_power_of_2(len(batch.context_len))
    if queries > _MAX_QUERIES or requests * queries > _MAX_TOKENS:
        return None
    return Size(requests, queries, SPLIT * triton.next_power_of_2(-(-max(batch.context_len) // SPLIT)))


class Graphs:
    """A forward pass whose small steps are recorded when their size first comes, and replayed from then on.

    Args:
        recorder: makes a recorder. All recordings of one recorder share a memory pool and are dropped together.
        plans: returns the data of the last batch that kernels keep on the device; every replay reads this data.
    """

    def __init__(
        self, forward: Forward, recorder: Callable[[], Record], plans: Callable[[], object] = lambda: None
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._record = recorder()
        self._plans = plans
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        size = size_of(inputs.batch)
        if size is None:
            return self._forward(inputs)
        key = (size, *inputs.recording_key)
        if key not in self._graphs:
            if len(self._graphs) == _MAX_GRAPHS:
                self._graphs.clear()
                self._record = self._recorder()
            self._graphs[key] = _Graph(_FixedInputs(size, inputs), self._forward, self._record, self._plans)
        result, *states = self._graphs[key].run(inputs)
        inputs.keep_states(states)
        return result


class _Graph:
    def __init__(self, fixed: _FixedInputs, forward: Forward, record: Record, plans: Callable[[], object]) -> None:
        self._fixed = fixed
        self._recording = record(lambda: run_with_states(forward, fixed.inputs))
        # The plans were made before the recording, outside of its pool. Nothing else keeps the memory that it reads.
        self._read_by_replays = plans()

    def run(self, inputs: ForwardInputs) -> list[Tensor]:
        self._fixed.fill(inputs)
        self._recording.replay()
        # The results are clones, because the next replay writes to the same place.
        return [result[: len(inputs.token_ids)].clone() for result in self._recording.results]


class _FixedInputs:
    """The inputs of a recording, always in the same place.

    Args:
        first: the first step, which is copied in.
    """

    def __init__(self, size: Size, first: ForwardInputs) -> None:
        requests, tokens = size.requests, size.requests * size.queries
        device = self._device = first.token_ids.device
        self._lengths = torch.zeros(2 * requests + 1, dtype=torch.int32, device=device)
        query_start, context_len = torch.split(self._lengths, [requests + 1, requests])
        self._batch = StaticBatch(
            tuple(range(0, tokens + 1, size.queries)),
            (size.context,) * requests,
            tuple(_room_for(group, size, device) for group in first.batch.groups),
            query_start,
            context_len,
        )
        self.inputs = replace(
            first,
            token_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=device),
            batch=self._batch,
            further=[
                torch.zeros(tokens, *tensor.shape[1:], dtype=tensor.dtype, device=device) for tensor in first.further
            ],
            taps=Taps(first.depths),
        )
        self.fill(first)

    def fill(self, step: ForwardInputs) -> None:
        """Copy the inputs of a step to their fixed places. Tokens of earlier steps remain after them, but have no slot
        and belong to no request.
        """
        batch, fixed = step.batch, self._batch
        tokens, missing = len(step.token_ids), len(fixed.context_len) - len(batch.context_len)
        self.inputs.token_ids[:tokens].copy_(step.token_ids)
        self.inputs.positions[:tokens].copy_(step.positions)
        for place, tensor in zip(self.inputs.further, step.further):
            place[:tokens].copy_(tensor)
        lengths = (*batch.query_start, *(tokens,) * missing, *batch.context_len, *(0,) * missing)
        self._lengths.copy_(to_device(torch.tensor(lengths, dtype=torch.int32, device="cpu"), self._device))
        for fixed_group, group in zip(fixed.groups, batch.groups):
            requests, width = group.tables.shape[0], min(fixed_group.tables.shape[1], group.tables.shape[1])
            fixed_group.tables[:requests, :width].copy_(group.tables[:, :width])
            fixed_group.write_slots.fill_(-1)
            fixed_group.write_slots[:tokens].copy_(group.write_slots)
            fixed_group.write_offsets[:tokens].copy_(group.write_offsets)


def _room_for(group: GroupTables, size: Size, device: torch.device) -> GroupTables:
    tokens, blocks = size.requests * size.queries, -(-size.context // group.block_tokens)
    return replace(
        group,
        tables=torch.zeros(size.requests, blocks, dtype=torch.int32, device=device),
        write_slots=torch.full((tokens,), -1, dtype=torch.int64, device=device),
        write_offsets=torch.zeros(tokens, dtype=torch.int64, device=device),
    )
