"""A model as the engine uses it: its forward pass is compiled, and computes no more than is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, Taps
from paceline.kernels.transfer import to_device
from paceline.models.base import Architecture


class CompiledModel:
    """An architecture whose kernels compile its forward pass: they record it, or capture CUDA graphs. See `Model`.

    If the last layers of the model have no KV of their own, nothing is stored there. So tokens whose results nobody
    wants, such as those within a prompt, stop before these layers. The other tokens go on in a pass of their own.
    """

    def __init__(self, model: Architecture, kernels: Kernels) -> None:
        self.config = model.config
        self.group_shapes = model.group_shapes
        self.layer_groups = model.layer_groups
        self.logits = model.logits
        self.embed = model.embed
        self._lookups = model.lookups
        self._layers = model.config.num_layers
        self._storing_layers = model.config.storing_layers
        compiles = kernels.compiles_states or not any(shape.state for shape in model.group_shapes)
        self._run = kernels.compile(model.forward) if compiles else model.forward

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        if wanted is None or sum(wanted) == len(token_ids) or not self._can_stop(layers, taps):
            inputs = self._lookups(token_ids, 0, layers)
            hidden = self._run(token_ids, positions, caches, batch, layers, taps, 0, inputs)
            return hidden if wanted is None else wanted_rows(hidden, batch, wanted)
        hidden = self._store(token_ids, positions, caches, batch, taps)
        if not any(wanted):
            return hidden[:0]
        rows = to_device(_last(batch, wanted), hidden.device)
        token_ids, positions, hidden = token_ids[rows], positions[rows], hidden[rows]
        begin = self._storing_layers
        inputs = (*self._lookups(token_ids, begin, None), hidden)
        return self._run(token_ids, positions, caches, _only(batch, wanted, rows), None, None, begin, inputs)

    def _can_stop(self, layers: int | None, taps: Taps | None) -> bool:
        """Return whether tokens may stop before the layers without KV of their own."""
        last = self._storing_layers
        return layers is None and last < self._layers and all(depth <= last for depth in (taps or Taps()).depths)

    def _store(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        taps: Taps | None,
    ) -> Tensor:
        """Run the layers up to the last one that stores KV. Return the hidden states after it, [tokens, hidden]."""
        last = self._storing_layers
        depths = taps.depths if taps is not None else ()
        own = Taps(tuple(dict.fromkeys((*depths, last))))
        inputs = self._lookups(token_ids, 0, last)
        self._run(token_ids, positions, caches, batch, last, own, 0, inputs)
        if taps is not None:
            taps.states.update({depth: own.states[depth] for depth in depths})
        return own.states[last]


def wanted_rows(x: Tensor, batch: AttentionBatch, wanted: Sequence[int]) -> Tensor:
    """Return the rows of x [tokens, ...] for the last wanted[r] tokens of each request r."""
    return x if sum(wanted) == len(x) else x[to_device(_last(batch, wanted), x.device)]


def _last(batch: AttentionBatch, wanted: Sequence[int]) -> Tensor:
    """Return the places of the last wanted[r] tokens of each request r: int64 [wanted tokens]."""
    ends = batch.query_start[1:]
    return torch.tensor([row for end, count in zip(ends, wanted) for row in range(end - count, end)], dtype=torch.int64)


def _only(batch: AttentionBatch, wanted: Sequence[int], rows: Tensor) -> AttentionBatch:
    """Return the batch of these rows: the last wanted[r] tokens of each request r."""
    groups = tuple(
        replace(group, write_slots=group.write_slots[rows], write_offsets=group.write_offsets[rows])
        for group in batch.groups
    )
    return replace(batch, query_start=(0, *accumulate(wanted)), groups=groups)
