"""For any groups of a model, each layer has a place of its own in the blocks, and attention works there."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.kv_groups import state_groups
from paceline.core.kv_layout import GroupShape, KVLayout, make_layout
from paceline.engine.runner import layer_caches
from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import AnyCache, LayerCache, LayerState
from paceline.kernels.interface import Kernels

CPU = torch.device("cpu")
SLOTS = 3


@st.composite
def models(draw: st.DrawFn) -> tuple[GroupShape, ...]:
    """Draw groups of a model with layers of any kinds in any order. Some layers read the cache of an earlier one."""
    kinds = draw(
        st.lists(
            st.tuples(
                st.integers(1, 3),
                st.sampled_from([1, 5, 8, 24, 64]),
                st.sampled_from([0, 1, 20, 100]),
                st.integers(1, 2),
            ),
            max_size=3,
            unique=True,
        )
    )
    own = draw(st.integers(1, 5)) if kinds else 0
    recurrent = draw(st.integers(0 if kinds else 1, 7))
    layers = draw(st.permutations(range(own + recurrent)))
    of_kind = [draw(st.sampled_from(kinds)) for _ in range(own)]
    shapes = []
    for kind in dict.fromkeys(of_kind):
        heads, head_dim, window, planes = kind
        mine = tuple(layer for layer, own in zip(layers, of_kind) if own == kind)
        shapes.append(GroupShape(f"kind-{len(shapes)}", mine, heads, head_dim, window, planes=planes))
    readers = [(own + recurrent + index, draw(st.sampled_from(layers[:own]))) for index in range(2)] if own else []
    for index, shape in enumerate(shapes):
        taken = tuple(pair for pair in readers if pair[1] in shape.layers)
        shapes[index] = dataclasses.replace(shape, readers=taken)
    if recurrent:
        state = (
            (draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))),
            (draw(st.integers(0, 3)), draw(st.integers(1, 60))),
        )
        shapes += state_groups("state", layers[own:], state, tuple(shapes))
    elif draw(st.booleans()):
        return tuple(part for shape in shapes for part in shape.divided(draw(st.integers(1, len(shape.layers)))))
    return tuple(shapes)


def tensors(cache: AnyCache, planes: int = 2) -> tuple[Tensor, ...]:
    return cache.parts if isinstance(cache, LayerState) else (cache.keys, cache.values)[:planes]


@settings(max_examples=60)
@given(models(), st.sampled_from([torch.bfloat16, torch.float32]), st.booleans())
def test_no_two_layers_share_a_byte_and_none_leaves_its_slot(
    shapes: tuple[GroupShape, ...], dtype: torch.dtype, drafts: bool
) -> None:
    own = 1 + max(layer for shape in shapes for layer in (*shape.layers, *dict(shape.readers)))
    if drafts:
        shapes += tuple(shape.of_drafter(own) for shape in shapes)
    layout = make_layout(shapes, dtype.itemsize, "m")
    readers = {layer: source for shape in shapes for layer, source in shape.readers}
    for group in layout.groups:
        pool = torch.zeros(SLOTS * layout.slot_bytes // dtype.itemsize, dtype=dtype)
        caches = layer_caches(layout, pool)
        assert len(caches) == own * (1 + drafts)
        views = [view for layer in group.shape.layers for view in tensors(caches[layer], group.shape.planes)]
        for value, view in enumerate(views, 1):
            assert len(view) == SLOTS
            view[1] = value
        # No layer has overwritten another layer's values, and the neighbouring slots are unchanged.
        for value, view in enumerate(views, 1):
            assert bool((view[1] == value).all())
        assert not pool.view(SLOTS, -1)[[0, 2]].any()
    for layer, source in readers.items():
        assert [view.data_ptr() for view in tensors(caches[layer])] == [
            view.data_ptr() for view in tensors(caches[source])
        ]


def write_context(
    kernels: Kernels, layout: KVLayout, cache: LayerCache, index: int, rng: random.Random
) -> tuple[Tensor, AttentionBatch]:
    """Write a context of 40 tokens. Return its keys, which are its values too, and a batch of its last 7 tokens."""
    group, tokens = layout.groups[index], 40
    slots = rng.sample(range(len(cache.keys)), group.blocks_for(tokens))
    positions = torch.arange(tokens)
    keys = torch.randn(tokens, group.shape.kv_heads, group.shape.head_dim)
    tables = torch.tensor([slots], dtype=torch.int32)
    places = tables[0, positions // group.block_tokens].long(), positions % group.block_tokens
    kernels.store_kv(keys, keys, cache, GroupTables(group.block_tokens, group.shape.window, tables, *places))
    behind = GroupTables(group.block_tokens, group.shape.window, tables, places[0][-7:], places[1][-7:])
    return keys, AttentionBatch((0, 7), (tokens,), (behind,))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_layers_without_a_cache_attend_to_that_of_another_layer(backend: str) -> None:
    # As in Gemma 3n: layers 4 and 5 read the caches of layers 0 and 2, whose head sizes differ.
    kernels, rng = select_kernels(CPU, backend), random.Random(1)
    shapes = (
        GroupShape("sliding", (0, 1), 2, 24, window=20, readers=((4, 0),)),
        GroupShape("full", (2, 3), 1, 64, readers=((5, 2),)),
    )
    layout = make_layout(shapes, 4, "m")
    caches = layer_caches(layout, torch.full((20 * layout.slot_bytes // 4,), float("nan")))
    assert len(caches) == 6
    for reader, source, index in ((4, 0, 0), (5, 2, 1)):
        shape, own, theirs = shapes[index], caches[reader], caches[source]
        assert isinstance(own, LayerCache)
        assert isinstance(theirs, LayerCache)
        keys, batch = write_context(kernels, layout, theirs, index, rng)
        queries = torch.randn(7, 2 * shape.kv_heads, shape.head_dim)
        found = kernels.attention(queries, own, batch, batch.groups[0], 0.2, 0.0)
        for token, query in enumerate(queries):
            position = 33 + token
            seen = keys[max(0, position - shape.window + 1) if shape.window else 0 : position + 1]
            scores = torch.einsum("kd,hd->hk", seen[:, 0], query[:2]) * 0.2
            torch.testing.assert_close(found[token, :2], scores.softmax(-1) @ seen[:, 0], atol=1e-5, rtol=1e-5)
