"""Tables of the vectors of tokens, without a transformer: model2vec, and StaticEmbedding of sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling_config import PoolingConfig
from paceline.models.pooling.vectors import read_tensors

_FILE = "model.safetensors"


class StaticTable:
    """An `Encode` whose hidden states are rows of a table.

    Args:
        table: [vocabulary, size].
    """

    types = 0

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.vocab_size = len(table)

    def __call__(
        self, token_ids: Tensor, type_ids: Tensor, lengths: Sequence[int], seen: Sequence[int] | None = None
    ) -> Tensor:
        return self._table[token_ids.to(self._table.device)]


def load_table(folder: Path, config: PoolingConfig, device: torch.device) -> StaticTable:
    """Load the table of a folder: `embedding.weight`, or those of model2vec: `embeddings`, of which `mapping` has the
    row of each token, and `weights` its factor.

    Raises ModelError if a tensor is missing, unknown, or has another shape than the others say.
    """
    path = folder / _FILE
    tensors = dict(read_tensors(path, device))
    own = "embedding.weight" if "embedding.weight" in tensors else "embeddings"
    table, mapping, weights = tensors.pop(own, None), tensors.pop("mapping", None), tensors.pop("weights", None)
    if table is None or tensors:
        found = f"has the unknown tensors {', '.join(tensors)}" if tensors else "lacks the table embeddings"
        raise ModelError(f"{path} {found}")
    table = table.float()
    if table.dim() != 2 or table.shape[1] != config.hidden_size:
        raise ModelError(f"{path}: {own} is {list(table.shape)} instead of [vocabulary, {config.hidden_size}]")
    if mapping is not None:
        if not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise ModelError(f"{path}: mapping names a row that the table does not have")
        table = table[mapping.long()]
    if weights is not None:
        if weights.shape != table.shape[:1]:
            raise ModelError(f"{path}: weights is {list(weights.shape)} instead of [{len(table)}]")
        table = table * weights.float()[:, None]
    return StaticTable(table)
