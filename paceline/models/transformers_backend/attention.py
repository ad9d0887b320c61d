"""The attention that `transformers` calls in its models: it stores keys and values in KV blocks, and attends over them.

`transformers` finds attention and masks by a name in registries of its process. The registered functions keep no state:
everything that belongs to one model is in its `PagedAttention`, which each of the model's modules knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.kernels.batch import AttentionBatch
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import Kernels

NAME = "paceline"
"""Paceline's name in the registries of `transformers`."""

_OWNER = "_paceline_attention"
"""The attribute of a module that holds the `PagedAttention` of its model."""

_NEUTRAL = frozenset(
    {"dropout", "sliding_window", "is_causal", "position_ids", "cache_position", "position_embeddings"}
)
"""Arguments of attention calls that are not read, because masks and modules have the same values, or because the result
does not depend on them.
"""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask that a model asked `transformers` for. It goes through the model's layers in place of a tensor."""

    allows: Callable[..., Any]
    """Whether a query attends to a key: (batch, head, query position, key position) -> bool, elementwise."""

    def window(self, max_position: int) -> int:
        """Return the number of tokens to which a query attends, itself included; 0 for all tokens before it.

        Raises:
            ModelError: the mask is neither causal nor causal with a window.
        """
        last = max_position - 1
        window = int(self._row(last, last + 1).sum())
        edges = {0, 1, window - 1, window, window + 1, 2 * window + 1, last // 2, last}
        for query in sorted(edge for edge in edges if 0 <= edge <= last):
            keys = torch.arange(min(query + 2, max_position))
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(self._row(query, len(keys)), expected):
                raise ModelError("its attention mask is not causal with at most a sliding window")
        return window if window < max_position else 0

    def _row(self, query: int, keys: int) -> Tensor:
        zero = torch.tensor(0)
        row: Tensor = self.allows(zero, zero, torch.tensor(query), torch.arange(keys))
        return row.expand(keys)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention by a module of a model, without its tensors."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    mask: Mask
    scale: float
    softcap: float
    sinks: Tensor | None
    """[heads]: the argument of `Kernels.attention`; None without sinks."""

    @property
    def head_dim(self) -> int:
        """Size of a head in the cache. The smaller of keys and values is padded with zeros, which change no result."""
        return max(self.key_dim, self.value_dim)


class PagedAttention:
    """The attention of one model. In a dry run it collects the calls of attention; in a step it computes over
    caches.
    """

    def __init__(self, root: nn.Module, kernels: Kernels) -> None:
        self._kernels = kernels
        self._calls: list[AttentionCall] | None = None
        self._layer_of: dict[nn.Module, int] = {}
        self._step: tuple[Sequence[LayerCache], AttentionBatch, Sequence[int]] | None = None
        for module in root.modules():
            setattr(module, _OWNER, self)

    @contextmanager
    def watching(self) -> Iterator[list[AttentionCall]]:
        """Collect the attention calls of a forward pass, which computes nothing meaningful meanwhile."""
        self._calls = []
        try:
            yield self._calls
        finally:
            self._calls = None

    def number(self, calls: Sequence[AttentionCall]) -> None:
        """Give the modules of these calls their layers' numbers, in this order."""
        self._layer_of = {call.module: layer for layer, call in enumerate(calls)}

    @contextmanager
    def over(self, caches: Sequence[LayerCache], batch: AttentionBatch, layer_groups: Sequence[int]) -> Iterator[None]:
        """Let attention read and write these caches, one for each layer."""
        self._step = caches, batch, layer_groups
        try:
            yield
        finally:
            self._step = None

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention of query [1, heads, tokens, key_dim], as [1, tokens, heads, value_dim]."""
        if self._calls is not None:
            self._calls.append(call)
            return query.new_zeros(1, query.shape[2], call.num_heads, call.value_dim)
        if self._step is None:
            raise ModelError("attention was called outside of a step")
        caches, batch, layer_groups = self._step
        layer = self._layer_of[call.module]
        cache, group = caches[layer], batch.groups[layer_groups[layer]]
        dtype = query.dtype if cache.scales is not None else cache.keys.dtype
        queries, keys, values = (_rows(x, call.head_dim, dtype) for x in (query, key, value))
        sinks = None if call.sinks is None else call.sinks.float()
        self._kernels.store_kv(keys, values, cache, group)
        out = self._kernels.attention(queries, cache, batch, group, call.scale, call.softcap, sinks)
        return out[None, :, :, : call.value_dim].to(query.dtype)


def _rows(x: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return x [1, heads, tokens, dim] as [tokens, heads, head_dim], with zeros after dim."""
    return F.pad(x[0].transpose(0, 1), (0, head_dim - x.shape[3])).to(dtype).contiguous()


def register() -> None:
    """Register Paceline's attention and masks in `transformers`. This may be called many times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Callable[..., Any], **_: Any) -> Mask:
    # A mask of padding may come along. No token of ours is padding, and a model's own one allows all tokens.
    return Mask(mask_function)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name, what in others.items() if name not in _NEUTRAL and what is not None and what is not False]
    if unknown:
        raise ModelError(f"its attention ({type(module).__name__}) depends on {', '.join(sorted(unknown))}")
    if not isinstance(attention_mask, Mask):
        raise ModelError(f"its attention ({type(module).__name__}) has a mask that transformers did not make")
    call = AttentionCall(
        module,
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        attention_mask,
        query.shape[3] ** -0.5 if scaling is None else float(scaling),
        float(softcap or 0.0),
        s_aux,
    )
    owner: PagedAttention = getattr(module, _OWNER)
    return owner.attend(call, query, key, value), None
