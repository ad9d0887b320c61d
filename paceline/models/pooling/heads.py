"""The heads of encoders that give a number for each label. Their weights are read in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.core.pooling_config import PoolingConfig
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.pooling.vectors import ACTIVATIONS, VectorLinear, Vectors


class _Heads:
    """Takes the layers of a head from a checkpoint."""

    def __init__(self, config: PoolingConfig, weights: Weights, kernels: Kernels) -> None:
        self.config, self._weights, self._kernels = config, weights, kernels

    def linear(self, place: str, size_out: int, bias: bool = True) -> VectorLinear:
        """Take a layer [size_out, hidden]."""
        size_in = self.config.hidden_size
        own_bias = self.take(f"{place}.bias", size_out) if bias else None
        return VectorLinear(self.take(f"{place}.weight", size_out, size_in), own_bias, self._kernels)

    def take(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, *shape, dtype=torch.float32)


def _bert(heads: _Heads, place: str) -> Vectors:
    """The pooler of BERT, and a linear layer."""
    dense, classifier = _dense_of(heads, f"{place}pooler.dense"), _classifier(heads)
    return lambda x: classifier(dense(x))


def _roberta(heads: _Heads, place: str) -> Vectors:
    dense = _dense_of(heads, "classifier.dense")
    out = heads.linear("classifier.out_proj", len(heads.config.labels))
    return lambda x: out(dense(x))


def _dense_of(heads: _Heads, place: str) -> Vectors:
    linear = heads.linear(place, heads.config.hidden_size)
    return lambda x: ACTIVATIONS["tanh"](linear(x))


def _classifier(heads: _Heads) -> Vectors:
    return heads.linear("classifier", len(heads.config.labels))


_SEQUENCE_HEADS: Mapping[str, Callable[[_Heads, str], Vectors]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
}
"""The heads of `...ForSequenceClassification`, by `model_type`."""


def take_head(config: PoolingConfig, model_type: str, weights: Weights, place: str, kernels: Kernels) -> Vectors | None:
    """Return the head of a model with labels; None if it has none.

    Args:
        weights: gives fp32.
        place: what the names of the encoder's tensors begin with.
    """
    if not config.labels:
        return None
    heads = _Heads(config, weights, kernels)
    return _classifier(heads) if "token_classify" in config.tasks else _SEQUENCE_HEADS[model_type](heads, place)
