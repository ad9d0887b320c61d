"""A test of a loaded model: Paceline's attention, in chunks and mixed batches, must give the results of the model's own
attention over a whole context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.kv_layout import BASE_TOKENS, make_layout
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache, view_pool
from paceline.kernels.interface import ForwardInputs
from paceline.models.base import Model

_TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of hidden states that is accepted, relative to their size. Wrong attention and lost states differ
by far more.
"""
_CHUNKS = ((0, 5), (5, 6), (6, BASE_TOKENS))
"""The chunks in which two contexts are computed together."""


def check_results(model: Model, own_hidden: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Compare a model's hidden states over paged caches with its hidden states under its own attention.

    This finds faults that no other check finds: states besides keys and values, positions that count differently,
    biases of attention scores, and tokens that see later tokens or tokens of other requests.

    Args:
        own_hidden: computes the hidden states [tokens, hidden] of one context [tokens].

    Raises:
        ModelError: the hidden states differ by more than the tolerance.
    """
    vocab_size = model.config.vocab_size
    contexts = [(torch.arange(BASE_TOKENS) * step + 3) % vocab_size for step in (7, 11)]
    for expected, paged in zip(map(own_hidden, contexts), _in_chunks(model, contexts, dtype)):
        if not expected.isfinite().all():
            raise ModelError("its own code computes NaN or infinity; check that the weights are whole")
        errors = (paged.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)
        # The median, because rounding sends a token to another expert now and then.
        if not (error := float(errors.median())) <= _TOLERANCES[dtype]:
            raise ModelError(
                f"with our attention, its hidden states differ by {error:.1%} from those with its own, so its tokens "
                "depend on something else than keys and values of the tokens before"
            )


def _in_chunks(model: Model, contexts: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the hidden states of contexts of at most one block each, computed chunk by chunk in one batch."""
    layout = make_layout(model.group_shapes, dtype.itemsize, "")
    count, slot_elements = len(contexts), layout.slot_bytes // dtype.itemsize
    pool = torch.zeros(count * len(layout.groups) * slot_elements, dtype=dtype)
    caches: dict[int, LayerCache] = {}
    for group in layout.groups:
        shape = group.shape
        views = view_pool(pool, slot_elements, len(shape.layers), shape.kv_heads, group.block_tokens, shape.head_dim)
        caches.update(zip(shape.layers, views))
    parts: list[list[Tensor]] = [[] for _ in contexts]
    for begin, end in _CHUNKS:
        positions = torch.arange(begin, end).repeat(count)
        tables = []
        for index, group in enumerate(layout.groups):
            slots = torch.arange(count) + index * count
            written = slots.repeat_interleave(end - begin)
            table = slots[:, None].int()
            tables.append(GroupTables(group.block_tokens, group.shape.window, table, written, positions))
        starts = tuple(accumulate([0] + [end - begin] * count))
        batch = AttentionBatch(starts, (end,) * count, tuple(tables))
        tokens = torch.cat([context[begin:end] for context in contexts])
        hidden = model.forward(ForwardInputs(tokens, positions, [caches[layer] for layer in sorted(caches)], batch))
        for chunks, part in zip(parts, torch.split(hidden, end - begin)):
            chunks.append(part)
    model.logits(parts[0][0])
    return [torch.cat(chunks) for chunks in parts]
