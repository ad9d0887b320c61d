"""Sparse vectors of SPLADE: weights of words from the logits of tokens, as transformers computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling import PoolWish
from tests.models.pooling.tiny_encoders import load, random_rows, save_encoder, transformers_output, write_modules

LENGTHS = (1, 9, 40)


def dense(found: Tensor | None, words: int) -> Tensor:
    """Return a vector with a number for each word."""
    assert found is not None
    ids = found[:, 0].long()
    assert torch.equal(ids, ids.unique())
    assert bool((found[:, 1] > 0).all())
    return torch.zeros(words).index_put_((ids,), found[:, 1])


@pytest.mark.parametrize("kind", ["bert", "roberta", "camembert", "distilbert", "mpnet", "modernbert"])
@pytest.mark.parametrize(("pooling", "activation"), [("max", "relu"), ("sum", "log1p_relu")])
def test_weights_are_those_of_transformers(kind: str, pooling: str, activation: str, tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, kind, "ForMaskedLM")
    module = {"pooling_strategy": pooling, "activation_function": activation}
    write_modules(tmp_path, ("SpladePooling", module), first="MLMTransformer")
    model, rows = load(tmp_path), random_rows(LENGTHS)
    assert (model.config.tasks, model.config.dim, model.config.similarity) == ({"sparse"}, 97, "dot")
    for row, found in zip(rows, model.run(rows, PoolWish("sparse"))):
        weights = transformers_output(reference, row).logits[0].relu().log1p()
        weights = weights.log1p() if activation == "log1p_relu" else weights
        expected = weights.amax(0) if pooling == "max" else weights.sum(0)
        torch.testing.assert_close(dense(found.values, 97), expected, atol=2e-5, rtol=1e-5)
        assert torch.equal(model.run([row], PoolWish("sparse"))[0].values, found.values)


def test_a_head_may_have_a_matrix_of_its_own(tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, "bert", "ForMaskedLM", tie_word_embeddings=False)
    write_modules(tmp_path, ("SpladePooling", {}), first="MLMTransformer")
    (row,) = random_rows([9])
    expected = transformers_output(reference, row).logits[0].relu().log1p().amax(0)
    found = load(tmp_path).run([row], PoolWish("sparse"))[0].values
    torch.testing.assert_close(dense(found, 97), expected, atol=2e-5, rtol=0)


def test_a_transformer_of_the_newer_form_says_that_it_makes_logits(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", "ForMaskedLM")
    write_modules(tmp_path, ("SpladePooling", {}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "fill-mask"}))
    assert load(tmp_path).config.tasks == {"sparse"}


def test_heads_that_are_missing_or_unknown_are_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", "ForMaskedLM")
    write_modules(tmp_path, ("SpladePooling", {"pooling_strategy": "mean"}), first="MLMTransformer")
    with pytest.raises(ModelError, match="pooling_strategy must be max or sum, not 'mean'"):
        load(tmp_path)
    write_modules(tmp_path, ("SpladePooling", {}), first="MLMTransformer")
    path, name = tmp_path / "model.safetensors", "cls.predictions.transform.dense.weight"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=rf"missing tensors: {name}"):
        load(tmp_path)
