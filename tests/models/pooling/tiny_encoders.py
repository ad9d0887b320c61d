"""Tiny encoders of text with random weights, the files that say how they pool, and their results in plain torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.models.pooling.loader import load_pooling_model
from paceline.models.pooling.model import PoolingModel, TextRow

VOCABULARY = 97
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
_MODERN = {"num_hidden_layers": 4, "local_attention": 12, "cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0}
ENCODERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 4}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "nomic_bert": ("NomicBert", {}),
    "gte": ("Gte", {"type_vocab_size": 2}),
    "modernbert": ("ModernBert", {**_MODERN, "eos_token_id": 2}),
    "distilbert": ("DistilBert", {"hidden_dim": 56}),
    "electra": ("Electra", {"embedding_size": 20}),
    "mpnet": ("MPNet", {}),
}
"""The name of the class in transformers, and its own settings, by `model_type`."""
POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
_TYPE = "sentence_transformers.models"


def save_encoder(folder: Path, kind: str, head: str = "Model", **settings: Any) -> transformers.PreTrainedModel:
    """Save a tiny encoder with large weights, so that each mistake shows, and return it.

    Args:
        kind: a key of ENCODERS.
        head: the end of the class's name, such as "ForSequenceClassification".
    """
    name, own = ENCODERS[kind]
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **own, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}{head}")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
        else:
            parameter.data.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model


def write_modules(
    folder: Path, *modules: tuple[str, Mapping[str, Any]], first: str = "Transformer", **settings: Any
) -> None:
    """Write modules.json with a module `first` and these modules, and their configs."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{_TYPE}.{first}"}]
    for index, (kind, config) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"{_TYPE}.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def load(folder: Path, dtype: torch.dtype | None = None, backend: str = "native") -> PoolingModel:
    device = torch.device("cpu")
    return load_pooling_model(folder, dtype, select_kernels(device, backend), device)


def random_rows(lengths: Sequence[int], pairs: bool = False) -> list[TextRow]:
    """Return inputs of these lengths; with `pairs`, a second text begins at half of each length."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [TextRow(each, len(each) // 2 if pairs else 0) for each in ids]


@torch.inference_mode()
def transformers_output(model: transformers.PreTrainedModel, row: TextRow, types: bool = False) -> Any:
    """Return what transformers computes for one input; with `types`, with the types of a pair's tokens."""
    ids = torch.tensor([row.token_ids])
    further = {}
    if types:
        further["token_type_ids"] = (torch.arange(ids.shape[1]) >= (row.second_start or ids.shape[1])).long()[None]
    return model(ids, **further)


def hidden_states(model: transformers.PreTrainedModel, row: TextRow, types: bool = False) -> Tensor:
    """Return the last hidden states of one input, fp32 [tokens, hidden]."""
    found: Tensor = transformers_output(model, row, types).last_hidden_state[0]
    return found
