"""The heads of encoders that give a logit for each word of the vocabulary, and what SPLADE makes of them. All are fp32.

SPLADE: Formal et al. 2021, https://arxiv.org/abs/2109.10086.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling_config import SpladeHead
from paceline.kernels.interface import Kernels
from paceline.models.pooling.own_tensors import OwnTensors
from paceline.models.pooling.vectors import VectorLinear, Vectors
from paceline.models.text_encoder_config import TextEncoderConfig

_ROWS = 128
"""Number of tokens whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the tensors of a head."""

    dense: str
    norm: str
    logits: str
    bias: tuple[str, ...]
    """Names of the bias of logits; of two, the first one counts."""


_BERT = _Names(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    ("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
_ROBERTA = _Names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", ("lm_head.decoder.bias", "lm_head.bias"))
_NAMES: Mapping[str, _Names] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "distilbert": _Names("vocab_transform", "vocab_layer_norm", "vocab_projector", ("vocab_projector.bias",)),
    "modernbert": _Names("head.dense", "head.norm", "decoder", ("decoder.bias",)),
}
"""The heads by `model_type`."""


def load_words(
    folder: Path, encoder: TextEncoderConfig, embeddings: str, kernels: Kernels, device: torch.device
) -> Vectors:
    """Return the function from hidden states fp32 [n, hidden] to logits [n, vocabulary].

    Args:
        embeddings: name of the table of words, which is the matrix of the logits if the head has none of its own.

    Raises ModelError if the head is unknown, or a tensor is missing or has another shape.
    """
    if (names := _NAMES.get(encoder.model_type)) is None:
        raise ModelError(f"{folder}: logits of words by {encoder.model_type} are not supported; supported are: "
                         f"{', '.join(_NAMES)}")  # fmt: skip
    size, words = encoder.hidden_size, encoder.vocab_size
    with OwnTensors(folder) as tensors:

        def take(name: str, *shape: int) -> Tensor:
            return tensors.take(name, *shape).to(device)

        def taken(name: str, *shape: int) -> Tensor | None:
            return take(name, *shape) if tensors.has(name) else None

        dense = VectorLinear(take(f"{names.dense}.weight", size, size), taken(f"{names.dense}.bias", size), kernels)
        weight, bias = take(f"{names.norm}.weight", size), taken(f"{names.norm}.bias", size)
        own = f"{names.logits}.weight"
        matrix = take(own if tensors.has(own) else embeddings, words, size)
        last = next((name for name in names.bias if tensors.has(name)), names.bias[0])
        logits = VectorLinear(matrix, take(last, words), kernels)
    is_modern = encoder.norms == "before"
    kind = encoder.head_activation if is_modern else encoder.activation
    activate = {"gelu": kernels.gelu, "gelu_tanh": kernels.gelu_tanh, "silu": kernels.silu}[kind]
    return lambda x: logits(kernels.layer_norm(activate(dense(x)), weight, bias, encoder.norm_eps))


def word_weights(head: SpladeHead, logits_of: Vectors, hidden: Tensor) -> Tensor:
    """Return the weights of words of one text: fp32 [words, 2], ids and weights above 0, in order of ids.

    Args:
        logits_of: the function of `load_words`.
        hidden: fp32 [tokens, hidden].
    """
    found: Tensor | None = None
    for part in torch.split(hidden, _ROWS):
        logits = logits_of(part.contiguous())
        if head.pooling == "max":  # logarithms change no order, so they come last
            own = logits.amax(0)
            found = own if found is None else torch.maximum(found, own)
        else:
            for row in logits:
                own = _logs(row, head.logs).double()
                found = own if found is None else found + own
    assert found is not None, "a text has at least one token"
    weights = (_logs(found, head.logs) if head.pooling == "max" else found.float()).cpu()
    ids = weights.ne(0).nonzero()[:, 0]
    return torch.stack((ids.float(), weights[ids]), dim=1)


def _logs(logits: Tensor, count: int) -> Tensor:
    weights = torch.relu(logits)
    for _ in range(count):
        weights = torch.log1p(weights)
    return weights
