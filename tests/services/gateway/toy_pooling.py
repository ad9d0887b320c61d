"""Toy models and workers that pool: their results are simple functions of the tokens of an input."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from paceline.proto import common_pb2, worker_pb2
from tests.services.gateway.toy_model import END, write_toy_model

DIM = 16
LABELS = ("even", "odd")
PROMPTS = {"query": "q: ", "document": "d: "}

_TASKS = common_pb2


def write_toy_encoder(
    folder: Path, architecture: str = "BertModel", labels: int = 0, template: str | None = None, **settings: Any
) -> Path:
    """Write the files of an encoder that embeds, or has labels, and return the folder.

    Args:
        architecture: "BertModel" embeds; "BertForSequenceClassification" has labels, and scores pairs if it has one.
        template: the model's chat template; None is none.
        settings: fields of config_sentence_transformers.json, such as prompts.
    """
    write_toy_model(folder, chat_template=template)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert",
        "architectures": [architecture],
        "hidden_size": DIM,
        "vocab_size": 300,
        "max_position_embeddings": 64,
        "matryoshka_dimensions": [8],
        "id2label": {str(index): name for index, name in enumerate(LABELS[:labels])},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if not labels:
        kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
        if architecture == "ColBert":
            kinds[1] = ("Normalize", "1_Normalize")
        listed = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        pooling = {"word_embedding_dimension": DIM, "pooling_mode_mean_tokens": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def toy_rows(pool: common_pb2.PoolWork, one: common_pb2.PoolInput) -> NDArray[np.float32]:
    """Return the result of an input [rows, dim].

    A vector counts the letters of the input by their last four bits, and has the length 1. The score of a pair is the
    share of the second text's letters that the first one has. Labels have the shares of even and odd letters; without
    activation, their numbers.
    """
    ids = [token for token in one.token_ids if token < 256]
    match pool.task:
        case _TASKS.POOL_TASK_EMBED:
            counts = Counter(token % DIM for token in ids)
            vector = np.array([counts[index] for index in range(pool.dimensions or DIM)], np.float32)
            normalize = not pool.HasField("normalize") or pool.normalize
            return (vector / np.linalg.norm(vector) if normalize else vector)[None]
        case _TASKS.POOL_TASK_TOKEN_EMBED:
            return np.eye(DIM, dtype=np.float32)[[token % DIM for token in ids]]
        case _TASKS.POOL_TASK_SPARSE:
            return np.array(sorted(Counter(ids).items(), reverse=True), np.float32)
        case _TASKS.POOL_TASK_SCORE:
            first = {token for token in one.token_ids[: one.second_start] if token < 256}
            second = [token for token in one.token_ids[one.second_start :] if token < 256]
            share = sum(token in first for token in second) / max(1, len(second))
            return np.array([[share if not pool.HasField("activation") or pool.activation else 10 * share]], np.float32)
        case _:
            odd = sum(token % 2 for token in ids)
            numbers = np.array([[len(ids) - odd, odd]], np.float32)
            return numbers / len(ids) if not pool.HasField("activation") or pool.activation else numbers


def toy_events(pool: common_pb2.PoolWork) -> Iterator[worker_pb2.ComputeEvent]:
    """Yield the results of work, one input in each event."""
    for index, one in enumerate(pool.inputs):
        rows = toy_rows(pool, one)
        pooled = worker_pb2.Pooled(first=index, rows=[len(rows)], dim=rows.shape[1], data=rows.astype("<f4").tobytes())
        yield worker_pb2.ComputeEvent(pooled=pooled)
