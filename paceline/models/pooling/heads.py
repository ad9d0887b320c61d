"""The heads of encoders that give a number for each label. Their weights are read in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.core.pooling_config import PoolingConfig
from paceline.kernels.interface import Kernels
from paceline.models.base import Weights
from paceline.models.pooling.vectors import ACTIVATIONS, VectorLinear, Vectors
from paceline.models.text_encoder_config import TextEncoderConfig


class _Heads:
    """Takes the layers of a head from a checkpoint."""

    def __init__(self, config: PoolingConfig, encoder: TextEncoderConfig, weights: Weights, kernels: Kernels) -> None:
        self.config, self.encoder, self.kernels = config, encoder, kernels
        self._weights = weights

    def linear(self, place: str, size_out: int, bias: bool = True) -> VectorLinear:
        """Take a layer [size_out, hidden]."""
        size_in = self.config.hidden_size
        own_bias = self.take(f"{place}.bias", size_out) if bias else None
        return VectorLinear(self.take(f"{place}.weight", size_out, size_in), own_bias, self.kernels)

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


def _distilbert(heads: _Heads, place: str) -> Vectors:
    dense, classifier = heads.linear("pre_classifier", heads.config.hidden_size), _classifier(heads)
    return lambda x: classifier(torch.relu(dense(x)))


def _electra(heads: _Heads, place: str) -> Vectors:
    dense = heads.linear("classifier.dense", heads.config.hidden_size)
    out = heads.linear("classifier.out_proj", len(heads.config.labels))
    return lambda x: out(ACTIVATIONS["gelu"](dense(x)))


def _modernbert(heads: _Heads, place: str) -> Vectors:
    transform, classifier = _transform_of(heads), _classifier(heads)
    return lambda x: classifier(transform(x))


def _transform_of(heads: _Heads) -> Vectors:
    """A linear layer, an activation and a norm."""
    encoder, kernels = heads.encoder, heads.kernels
    linear = heads.linear("head.dense", heads.config.hidden_size, encoder.head_bias)
    weight = heads.take("head.norm.weight", heads.config.hidden_size)
    bias = heads.take("head.norm.bias", heads.config.hidden_size) if encoder.norm_bias else None
    activate = kernels.gelu_tanh if encoder.head_activation == "gelu_tanh" else kernels.gelu
    return lambda x: kernels.layer_norm(activate(linear(x)), weight, bias, encoder.norm_eps)


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
    "nomic_bert": _bert,
    "gte": _bert,
    "new": _bert,
    "modernbert": _modernbert,
    "distilbert": _distilbert,
    "electra": _electra,
    "mpnet": _roberta,
}
"""The heads of `...ForSequenceClassification`, by `model_type`."""


def take_head(
    config: PoolingConfig, encoder: TextEncoderConfig, weights: Weights, place: str, kernels: Kernels
) -> Vectors | None:
    """Return the head of a model with labels; None if it has none.

    Args:
        place: what the names of the encoder's tensors begin with.
    """
    if not config.labels:
        return None
    heads = _Heads(config, encoder, weights, kernels)
    if "token_classify" not in config.tasks:
        return _SEQUENCE_HEADS[encoder.model_type](heads, place)
    if encoder.model_type == "modernbert":
        return _modernbert(heads, place)
    return _classifier(heads)
