"""A model as the engine uses it: its forward pass is compiled, and skips layers for tokens without a wanted result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.kv_coding import KVCoding
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.interface import Forward, ForwardInputs, Kernels, Logits, Taps
from paceline.kernels.transfer import to_device
from paceline.models.adapters.linears import PassAdapters
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.base import PADDING, Architecture, EncodedRows


class CompiledModel:
    """A `Model` made of an architecture whose forward pass the kernels compile: they record it, or capture CUDA graphs.

    If the last layers of the model have no KV of their own, they store nothing. So tokens whose results are not wanted,
    such as tokens within a prompt, stop before these layers. A second pass computes the other tokens in these layers.

    A step with rows of encodings has other compiled passes, which do not embed the tokens.

    Args:
        adapters: the adapters of the model's linear layers; None if it takes none.
    """

    def __init__(self, model: Architecture, kernels: Kernels, adapters: ModelAdapters | None = None) -> None:
        self._model = model
        self.adapters = adapters
        self._passing = PassAdapters() if adapters is None else adapters.passing
        self.config = model.config
        self.group_shapes = model.group_shapes
        self.layer_groups = model.layer_groups
        self.embed = model.embed
        self._lookups = model.lookups
        self._encoded_inputs = model.encoded_inputs
        self._layers = model.config.num_layers
        self._storing_layers = model.config.storing_layers
        compiles = kernels.compiles_states or not any(shape.state for shape in model.group_shapes)
        passes: list[Forward] = [model.forward, partial(model.forward, embedded=True)]
        self._run, self._run_embedded = [kernels.compile(run) if compiles else run for run in passes]

    def code_kv(self, coding: KVCoding) -> None:
        self._model.code_kv(coding)
        self.group_shapes, self.layer_groups = self._model.group_shapes, self._model.layer_groups

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Logits:
        self._passing.rows = adapters
        return self._model.logits(hidden)

    def forward(
        self, inputs: ForwardInputs, wanted: Sequence[int] | None = None, encoded: EncodedRows | None = None
    ) -> Tensor:
        embedded: Sequence[Tensor] = ()
        if encoded is not None:
            inputs = replace(inputs, token_ids=inputs.token_ids.index_fill(0, encoded.places, PADDING))
            self._passing.rows = inputs.batch.adapters
            embedded = self._encoded_inputs(inputs.token_ids, inputs.positions, encoded)
        taps = inputs.taps
        if wanted is None or sum(wanted) == len(inputs.token_ids) or not self._can_stop(inputs):
            hidden = self._compute(inputs, embedded)
            if taps is not None:
                taps.check(hidden)
            return hidden if wanted is None else wanted_rows(hidden, inputs.batch, wanted)
        hidden = self._store(inputs, embedded)
        rows = to_device(_last(inputs.batch, wanted), hidden.device)
        last_hidden = hidden[rows]
        if len(rows):
            last = replace(
                inputs,
                token_ids=inputs.token_ids[rows],
                positions=inputs.positions[rows],
                batch=_only(inputs.batch, wanted, rows),
                taps=None,
                begin=self._storing_layers,
                further=(last_hidden,),
            )
            last_hidden = self._compute(last, [each[rows] for each in embedded])
        if taps is not None:
            # Later layers store nothing, so they can break only the tokens whose results are wanted.
            taps.check(hidden.index_copy(0, rows, last_hidden))
        return last_hidden

    def _can_stop(self, inputs: ForwardInputs) -> bool:
        """Return whether tokens may stop before the layers without KV of their own."""
        last = self._storing_layers
        return inputs.layers is None and last < self._layers and all(depth <= last for depth in inputs.depths)

    def _store(self, inputs: ForwardInputs, embedded: Sequence[Tensor]) -> Tensor:
        """Run the layers up to the last one that stores KV. Return the hidden states after it, [tokens, hidden]."""
        last, depths = self._storing_layers, inputs.depths
        taps = Taps(tuple(dict.fromkeys((*depths, last))))
        self._compute(replace(inputs, layers=last, taps=taps), embedded)
        inputs.keep_states([taps.states[depth] for depth in depths])
        return taps.states[last]

    def _compute(self, inputs: ForwardInputs, embedded: Sequence[Tensor]) -> Tensor:
        """Run layers [begin, layers) in one compiled pass.

        Args:
            embedded: the result of `Architecture.encoded_inputs`; empty if no token has a row of an encoding.
        """
        self._passing.rows = inputs.batch.adapters
        looked_up = self._lookups(inputs.token_ids, inputs.begin, inputs.layers)
        run = self._run_embedded if embedded else self._run
        return run(replace(inputs, further=(*embedded, *looked_up, *inputs.further)))


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
    last_keys = None if batch.last_keys is None else batch.last_keys[rows]
    adapters = None if batch.adapters is None else batch.adapters[rows]
    starts = (0, *accumulate(wanted))
    return replace(batch, query_start=starts, groups=groups, last_keys=last_keys, adapters=adapters)
