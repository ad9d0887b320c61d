"""ColBERT: markers, queries that are expanded, tokens without vectors, in the three forms of its files."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import TextRow
from tests.models.pooling.tiny_encoders import load, save_encoder, write_modules

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", "[Q] ", ".", ",", *"abcdefgh")
MASK, POINT, LENGTH, SIZE = 4, 8, 14, 20
QUERY, DOCUMENT = [2, 5, 10, POINT, 12, 3], [2, 6, 10, POINT, 12, 9, 3]
_DENSE = {"in_features": 32, "out_features": SIZE, "bias": False}
_DENSE["activation_function"] = "torch.nn.modules.linear.Identity"  # type: ignore[assignment]
Write = Callable[[Path, Tensor, bool], None]


def write_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(VOCABULARY)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))


def as_modules(folder: Path, weight: Tensor, attend: bool) -> None:
    mask = {"skiplist_words": list(string.punctuation)}
    write_modules(folder, ("Dense", _DENSE), ("MultiVectorMask", mask), ("Normalize", {}))
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    expansion = {"strategy": "fixed", "length": LENGTH, "attend": attend}
    (folder / "sentence_bert_config.json").write_text(json.dumps({"query_expansion": expansion}))


def as_pylate(folder: Path, weight: Tensor, attend: bool) -> None:
    settings = {"query_length": LENGTH, "attend_to_expansion_tokens": attend, "query_prefix": "[Q] "}
    write_modules(folder, ("Dense", _DENSE), model_type="ColBERT", document_prefix="[unused1] ", **settings)
    listed = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(
        listed.replace("sentence_transformers.models.Dense", "pylate.models.Dense.Dense")
    )
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")


def as_stanford(folder: Path, weight: Tensor, attend: bool) -> None:
    path = folder / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "linear.weight": weight}, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"query_maxlen": LENGTH, "attend_to_mask_tokens": attend, "dim": SIZE, "doc_maxlen": 30}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))


@torch.inference_mode()
def expected(reference: Any, weight: Tensor, ids: Sequence[int], seen: int) -> Tensor:
    """Return the vectors of tokens of which the first `seen` are attended to."""
    mask = (torch.arange(len(ids)) < seen).long()[None]
    states = reference(torch.tensor([list(ids)]), attention_mask=mask).last_hidden_state[0]
    return torch.nn.functional.normalize(states @ weight.T, dim=1)


@pytest.mark.parametrize("write", [as_modules, as_pylate, as_stanford])
@pytest.mark.parametrize("attend", [False, True])
def test_queries_are_expanded_and_documents_lose_their_punctuation(write: Write, attend: bool, tmp_path: Path) -> None:
    reference, weight = save_encoder(tmp_path, "bert", vocab_size=len(VOCABULARY)), torch.randn(SIZE, 32)
    write_tokenizer(tmp_path)
    write(tmp_path, weight, attend)
    model = load(tmp_path)
    config = model.config
    assert (config.tasks, config.dim, config.similarity) == ({"token_embed"}, SIZE, "maxsim")
    assert (config.limit("query"), config.limit("document")) == (LENGTH, 30 if write is as_stanford else 80)
    queries = [TextRow(QUERY), TextRow([2, 5, 11, 3]), TextRow([*QUERY[:-1]] * 2 + [11, 11, 11, 3])]
    found = model.run(queries, PoolWish("token_embed", role="query"))
    for row, own in zip(queries, found):
        ids = [*row.token_ids, *[MASK] * (LENGTH - len(row.token_ids))]
        seen = len(ids) if attend else len(row.token_ids)
        torch.testing.assert_close(own.values, expected(reference, weight, ids, seen), atol=2e-5, rtol=0)
        assert torch.equal(model.run([row], PoolWish("token_embed", role="query"))[0].values, own.values)
    whole = expected(reference, weight, DOCUMENT, len(DOCUMENT))
    for role in (None, "document"):
        (own,) = model.run([TextRow(DOCUMENT)], PoolWish("token_embed", role=role))  # type: ignore[arg-type]
        torch.testing.assert_close(own.values, whole[[0, 1, 2, 4, 6]], atol=2e-5, rtol=0)


def test_markers_are_tokens_and_other_prefixes_are_prompts(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", vocab_size=len(VOCABULARY))
    write_tokenizer(tmp_path)
    weight = torch.randn(SIZE, 32)
    as_pylate(tmp_path, weight, False)
    config = load(tmp_path).config
    assert config.marker_ids == {"query": 7, "document": 6}
    assert config.prompts == {"query": "", "document": " "}
    write_modules(tmp_path, ("Dense", _DENSE), model_type="ColBERT", query_prefix="search: ", skiplist_words=["a"],
                  prompts={"query": "find "}, query_expansion=None)  # fmt: skip
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    config = load(tmp_path).config
    assert (config.marker_ids, config.prompts, config.expansion) == ({}, {"query": "search: find "}, None)
    assert config.skipped_ids == {VOCABULARY.index("a")}


def test_longer_queries_are_allowed_if_the_length_is_the_least(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", vocab_size=len(VOCABULARY))
    write_tokenizer(tmp_path)
    as_modules(tmp_path, torch.randn(SIZE, 32), False)
    path = tmp_path / "sentence_bert_config.json"
    path.write_text(json.dumps({"query_expansion": {"strategy": "min", "length": LENGTH}, "document_length": 20}))
    config = load(tmp_path).config
    assert (config.limit("query"), config.limit(None)) == (80, 20)
    for broken, message in (
        ({"strategy": "more", "length": 3}, "strategy is fixed or min"),
        ({"strategy": "fixed"}, "the length of query_expansion must be a positive whole number"),
        ({"strategy": "fixed", "length": 81}, "expanded to 81 tokens, and the model takes 80"),
        ({"strategy": "fixed", "length": 9, "token": "[X]"}, r"the token '\[X\]', which the tokenizer does not have"),
    ):
        path.write_text(json.dumps({"query_expansion": broken}))
        with pytest.raises(ModelError, match=message):
            load(tmp_path)
