"""The layers of a model in `transformers` and their KV groups, found by its attention calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.core.errors import ModelError
from paceline.core.kv_layout import GroupShape
from paceline.models.transformers_backend.attention import AttentionCall

_LAYER = re.compile(r"(.+?)\.(\d+)(?:\.|$)")
"""The name of a module within a layer: the list of layers, and the layer's index in it."""
_TOKENWISE = re.compile("Norm|Mlp|MLP|MoE|Moe|Experts|FeedForward|Dropout")
"""Names of the classes of modules that compute each token by itself."""


def find_decoder(causal: nn.Module, calls: Sequence[AttentionCall]) -> tuple[str, Any]:
    """Return the name of the decoder in a causal model, and the decoder: everything between the token ids and the head.

    Args:
        calls: the attention calls of a forward pass of the whole model.

    Raises:
        ModelError: the attention calls are not those of a plain stack of layers, which each attend once.
    """
    names = {module: name for name, module in causal.named_modules()}
    stacks: dict[str, set[int]] = {}
    for call in calls:
        stack, index = _place(names.get(call.module, ""), call.module)
        layer_numbers = stacks.setdefault(stack, set())
        if index in layer_numbers:
            raise ModelError(f"layer {index} calls attention more than once")
        layer_numbers.add(index)
    stacks = stacks or {_first_stack(causal): set()}
    if len(stacks) > 1:
        raise ModelError(f"its attention is not in one stack of layers, but in {' and '.join(stacks)}")
    ((stack, attending),) = stacks.items()
    for index, layer in enumerate(causal.get_submodule(stack).children()):
        if index not in attending:
            raise ModelError(
                f"layer {index} ({_mixers(layer)}) does not call the attention interface of transformers, so there are "
                "no keys and values of it to keep"
            )
    if getattr(causal, "_is_stateful", False):
        raise ModelError("its layers keep states besides keys and values, which is not supported")
    place = stack
    while place := place.rpartition(".")[0]:
        decoder = causal.get_submodule(place)
        inputs = inspect.signature(decoder.forward).parameters
        if "input_ids" in inputs:
            if "position_ids" not in inputs:
                raise ModelError(f"{type(decoder).__name__} takes no positions (position_ids)")
            return place, decoder
    raise ModelError(f"no part of it takes token ids and computes the layers {stack}")


def kv_groups(calls: Sequence[AttentionCall], max_position: int) -> tuple[tuple[GroupShape, ...], tuple[int, ...]]:
    """Return the KV groups of layers that make these attention calls, and the group index of each layer."""
    windows = [call.mask.window(max_position) for call in calls]
    kinds = [(window, call.num_kv_heads, call.head_dim) for window, call in zip(windows, calls)]
    different = list(dict.fromkeys(kinds))
    shapes = tuple(
        GroupShape(
            name=f"{'sliding' if kind[0] else 'full'}-{index}",
            layers=tuple(layer for layer, layer_kind in enumerate(kinds) if layer_kind == kind),
            kv_heads=kind[1],
            head_dim=kind[2],
            window=kind[0],
        )
        for index, kind in enumerate(different)
    )
    return shapes, tuple(different.index(kind) for kind in kinds)


def _mixers(layer: nn.Module) -> str:
    """Return the classes of a layer's parts that may mix tokens, or of the layer if it has no other parts."""
    parts = dict.fromkeys(type(part).__name__ for part in layer.children())
    return ", ".join(part for part in parts if not _TOKENWISE.search(part)) or type(layer).__name__


def _first_stack(causal: nn.Module) -> str:
    """Return the name of the first list of layers in a model that never calls attention."""
    name: str
    for name, module in causal.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            return name
    raise ModelError("it has no stack of layers")


def _place(name: str, module: nn.Module) -> tuple[str, int]:
    match = _LAYER.match(name)
    if match is None:
        raise ModelError(f"its attention {type(module).__name__} ({name}) is not in a stack of layers")
    return match[1], int(match[2])
