"""Heads of decoders: linear layers that give numbers for labels, and rows of the head for two tokens. All are fp32."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling_config import PoolingConfig
from paceline.kernels.interface import Kernels
from paceline.models.folder import weight_files
from paceline.models.pooling.vectors import VectorLinear, Vectors

_EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")
"""Names of the matrix that gives logits, the first one that a checkpoint has."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def load_head(folder: Path, config: PoolingConfig, kernels: Kernels) -> Vectors | None:
    """Return the head of a decoder; None if its results are the hidden states.

    Raises ModelError if a tensor is missing or has another shape than config.json says.
    """
    with _Tensors(folder) as tensors:
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


def _score_row(tensors: _Tensors, tokens: tuple[int, int | None]) -> Tensor:
    """Return the row of the head whose product with a hidden state is the logit of the first token, less that of the
    second if there is one: fp32 [1, hidden].
    """
    name = next((name for name in _EMBEDDINGS if tensors.has(name)), None)
    if name is None:
        raise ModelError(f"{tensors.folder} has no matrix for the logits of the tokens {tokens}")
    first, second = tokens
    row = tensors.row(name, first)
    return (row if second is None else row - tensors.row(name, second))[None]


class _Tensors:
    """The tensors of a folder's safetensors, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._of: dict[str, Any] = {}

    def __enter__(self) -> _Tensors:
        for path in weight_files(self.folder):
            try:
                file: Any = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
                self._of.update(dict.fromkeys(file.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged or not a safetensors file: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def has(self, name: str) -> bool:
        return name in self._of

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in fp32. Raises ModelError if it is missing or has another shape."""
        if name not in self._of:
            raise ModelError(f"the weights of {self.folder} do not fit config.json: missing tensors: {name}")
        tensor: Tensor = self._of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {list(tensor.shape)} instead of {list(shape)}")
        return self._as_fp32(name, tensor)

    def row(self, name: str, index: int) -> Tensor:
        """Return one row of a matrix, fp32 [size]. Raises ModelError if there is no such row."""
        part = self._of[name].get_slice(name)
        if not 0 <= index < part.get_shape()[0]:
            raise ModelError(f"{self.folder}: {name} has no row for the token {index}")
        return self._as_fp32(name, part[index : index + 1][0])

    def _as_fp32(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{self.folder}: {name} is quantized, but heads that pool must not be")
        return tensor.to(torch.float32, copy=True)
