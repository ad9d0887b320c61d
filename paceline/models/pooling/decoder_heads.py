"""Heads of decoders: linear layers that give numbers for labels, and rows of the head for two tokens. All are fp32."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling_config import PoolingConfig
from paceline.kernels.interface import Kernels
from paceline.models.pooling.own_tensors import OwnTensors
from paceline.models.pooling.vectors import VectorLinear, Vectors

_EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Names of the matrix that gives logits, the first one that a checkpoint has."""


def load_head(folder: Path, config: PoolingConfig, kernels: Kernels) -> Vectors | None:
    """Return the head of a decoder; None if its results are the hidden states.

    Raises ModelError if a tensor is missing or has another shape than config.json says.
    """
    with OwnTensors(folder) as tensors:
        if config.score_tokens is not None:
            return VectorLinear(_score_row(tensors, config.score_tokens), None, kernels)
        if not config.labels:
            return None
        count, hidden = len(config.labels), config.hidden_size
        if tensors.has("score.weight"):
            bias = tensors.take("score.bias", count) if tensors.has("score.bias") else None
            return VectorLinear(tensors.take("score.weight", count, hidden), bias, kernels)
        # Reward models have two layers, with the rectifier between them.
        first, last = tensors.take("score.0.weight", hidden, hidden), tensors.take("score.2.weight", count, hidden)
        inner = VectorLinear(first, tensors.take("score.0.bias", hidden), kernels)
        outer = VectorLinear(last, tensors.take("score.2.bias", count), kernels)
        return lambda rows: outer(inner(rows).relu_())


def _score_row(tensors: OwnTensors, tokens: tuple[int, int | None]) -> Tensor:
    """Return the row of the head whose product with a hidden state is the logit of the first token, less that of the
    second if there is one: fp32 [1, hidden].
    """
    name = next((name for name in _EMBEDDINGS if tensors.has(name)), None)
    if name is None:
        raise ModelError(f"{tensors.folder} has no matrix for the logits of the tokens {tokens}")
    first, second = tokens
    row = tensors.row(name, first)
    return (row if second is None else row - tensors.row(name, second))[None]
