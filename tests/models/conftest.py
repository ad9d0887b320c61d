from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from paceline.core.kv_layout import KVGroup, make_layout
from paceline.kernels.interface import AttentionBatch, GroupTables, LayerCache, view_pool
from paceline.models.base import Model

TRIMMED = 2**31 - 1
"""Stands in a table where nothing may be read; as an index it would raise."""


class PagedContexts:
    """The contexts of some requests in a NaN-poisoned pool of shuffled slots, and the model's steps over them.

    Blocks that fall behind a window are poisoned again and struck from the table, as the engine gives them back.
    """

    def __init__(self, model: Model, requests: int, max_tokens: int) -> None:
        layout = make_layout(model.group_shapes, 4, "test")
        self._model = model
        self._slots = iter(torch.randperm(requests * layout.slots_for(max_tokens)).tolist())
        slot_elements = layout.slot_bytes // 4
        self._pool = torch.full((requests * layout.slots_for(max_tokens) * slot_elements,), float("nan"))
        self._by_slot = self._pool.view(-1, slot_elements)
        self._groups = layout.groups
        self._tables = [
            torch.full((requests, group.blocks_for(max_tokens)), TRIMMED, dtype=torch.int32) for group in layout.groups
        ]
        self._caches = self._layer_caches(layout.groups, slot_elements)
        self._lengths = [0] * requests

    def _layer_caches(self, groups: Sequence[KVGroup], slot_elements: int) -> list[LayerCache]:
        by_layer: dict[int, LayerCache] = {}
        for group in groups:
            shape = group.shape
            views = view_pool(
                self._pool, slot_elements, len(shape.layers), shape.kv_heads, group.block_tokens, shape.head_dim
            )
            by_layer.update(zip(shape.layers, views))
        return [by_layer[layer] for layer in range(len(by_layer))]

    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """Appends tokens to some requests -> fp32 logits [new tokens, vocab] of each."""
        starts, positions = [0], []
        for request, new in tokens.items():
            positions.append(torch.arange(self._lengths[request], self._lengths[request] + len(new)))
            self._lengths[request] += len(new)
            starts.append(starts[-1] + len(new))
        contexts = tuple(self._lengths[request] for request in tokens)
        groups = tuple(self._group_tables(index, list(tokens), positions) for index, _ in enumerate(self._groups))
        batch = AttentionBatch(tuple(starts), contexts, groups)
        flat = torch.tensor([token for new in tokens.values() for token in new])
        with torch.inference_mode():
            hidden = self._model.forward(flat, torch.cat(positions), self._caches, batch)
            logits = self._model.logits(hidden)
        self._trim()
        return {request: logits[starts[row] : starts[row + 1]] for row, request in enumerate(tokens)}

    def _group_tables(self, index: int, requests: list[int], positions: list[Tensor]) -> GroupTables:
        group, table = self._groups[index], self._tables[index]
        for request, own in zip(requests, positions):
            for block in range(int(own[0]) // group.block_tokens, int(own[-1]) // group.block_tokens + 1):
                if table[request, block] == TRIMMED:
                    table[request, block] = next(self._slots)
        slots = [table[request, own // group.block_tokens] for request, own in zip(requests, positions)]
        places = torch.cat(positions) % group.block_tokens
        return GroupTables(group.block_tokens, group.shape.window, table[requests], torch.cat(slots).long(), places)

    def _trim(self) -> None:
        for group, table in zip(self._groups, self._tables):
            for request, length in enumerate(self._lengths):
                for block in range(group.first_needed_block(length)):
                    if table[request, block] != TRIMMED:
                        self._by_slot[table[request, block]] = float("nan")
                        table[request, block] = TRIMMED


@pytest.fixture(scope="session")
def paged_contexts() -> type[PagedContexts]:
    return PagedContexts


SaveTiny = Callable[..., transformers.PreTrainedModel]


@pytest.fixture
def save_llama(tmp_path: Path) -> SaveTiny:
    """Saves a tiny random Llama to tmp_path and returns the reference."""

    def save(max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object) -> object:
        fields: dict[str, object] = {
            "vocab_size": 101,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = transformers.LlamaConfig(**{**fields, **changes})
        return _save(transformers.LlamaForCausalLM(config), tmp_path, max_shard_size, dtype)

    return save


@pytest.fixture
def save_gemma3(tmp_path: Path) -> SaveTiny:
    """Saves a tiny random Gemma 3, window 20, to tmp_path and returns the reference."""

    def save(max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object) -> object:
        fields: dict[str, object] = {
            "vocab_size": 103,
            "hidden_size": 40,
            "intermediate_size": 72,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 19,
            "sliding_window": 20,
            "max_position_embeddings": 4096,
        }
        config = transformers.Gemma3TextConfig(**{**fields, **changes})
        return _save(transformers.Gemma3ForCausalLM(config), tmp_path, max_shard_size, dtype)

    return save


def _save(
    model: transformers.PreTrainedModel, folder: Path, max_shard_size: str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that every term shows in the logits; norms and biases too are not what they start as.
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
