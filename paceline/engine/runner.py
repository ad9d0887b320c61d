"""Computes steps: turns chunks into tensors, runs the model over the paged cache, samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.core.types import Token
from paceline.engine.sampler import SamplingRow, sample, score
from paceline.engine.step import Chunk, ChunkResult, Step
from paceline.kernels.interface import AttentionBatch, GroupTables, LayerCache, view_pool
from paceline.models.base import Model

_SCORED_ROWS = 256
"""Rows of prompt logits at a time: a long prompt times a large vocabulary would not fit into memory."""


class ModelRunner:
    """Runs one model over one pool of KV blocks.

    Args:
        pool: the blocks, flat, of the cache's dtype: [slots * layout.slot_bytes / itemsize]. On CPU this is the arena
            itself, so that what is stored is where others find it.
    """

    def __init__(self, model: Model, layout: KVLayout, pool: Tensor) -> None:
        self._model = model
        self._layout = layout
        self._device = pool.device
        self._caches = _layer_caches(layout, pool)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[ChunkResult]:
        """One forward pass; one result for each chunk, in order."""
        chunks = step.chunks
        token_ids = np.concatenate([chunk.request.token_ids[chunk.start : chunk.end] for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        batch = self._attention_batch(chunks, positions)
        hidden = self._model.forward(self._to_device(token_ids), self._to_device(positions), self._caches, batch)
        sampled = iter(self._sample(hidden, chunks, batch.query_start))
        return [
            ChunkResult(next(sampled) if chunk.samples else None, self._score(hidden, chunk, start))
            for chunk, start in zip(chunks, batch.query_start)
        ]

    def _attention_batch(self, chunks: Sequence[Chunk], positions: np.ndarray) -> AttentionBatch:
        lengths = [chunk.length for chunk in chunks]
        owner = np.repeat(np.arange(len(chunks)), lengths)
        groups = []
        for index, group in enumerate(self._layout.groups):
            tables = _stack_tables([chunk.request.tables[index] for chunk in chunks])
            slots = tables[owner, positions // group.block_tokens]
            groups.append(
                GroupTables(
                    block_tokens=group.block_tokens,
                    window=group.shape.window,
                    tables=self._to_device(tables.astype(np.int32)),
                    write_slots=self._to_device(slots),
                    write_offsets=self._to_device(positions % group.block_tokens),
                )
            )
        return AttentionBatch(
            query_start=(0, *np.cumsum(lengths).tolist()),
            context_len=tuple(chunk.end for chunk in chunks),
            groups=tuple(groups),
        )

    def _sample(self, hidden: Tensor, chunks: Sequence[Chunk], query_start: Sequence[int]) -> list[Token]:
        ends = [end - 1 for chunk, end in zip(chunks, query_start[1:]) if chunk.samples]
        if not ends:
            return []
        requests = [chunk.request for chunk in chunks if chunk.samples]
        rows = [SamplingRow(request.sampling, request.token_ids, request.prompt_len) for request in requests]
        return sample(self._model.logits(hidden[ends]), rows)

    def _score(self, hidden: Tensor, chunk: Chunk, start: int) -> list[Token]:
        tokens: list[Token] = []
        for first in range(0, len(chunk.scored), _SCORED_ROWS):
            positions = chunk.scored[first : first + _SCORED_ROWS]
            logits = self._model.logits(hidden[start + first : start + first + len(positions)])
            targets = chunk.request.token_ids[positions.start : positions.stop]
            tokens += score(logits, targets, chunk.request.sampling.prompt_logprobs or 0)
        return tokens

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _layer_caches(layout: KVLayout, pool: Tensor) -> list[LayerCache]:
    """One cache a layer of the model, in the model's order."""
    by_layer: dict[int, LayerCache] = {}
    for group in layout.groups:
        shape = group.shape
        slot_elements = layout.slot_bytes // layout.itemsize
        views = view_pool(pool, slot_elements, len(shape.layers), shape.kv_heads, group.block_tokens, shape.head_dim)
        by_layer.update(zip(shape.layers, views))
    return [by_layer[layer] for layer in sorted(by_layer)]


def _stack_tables(tables: Sequence[list[int]]) -> np.ndarray:
    """Block tables of several requests as one array [requests, blocks]; 0 fills what no query reads."""
    stacked = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(stacked, tables):
        row[: len(table)] = table
    return stacked
