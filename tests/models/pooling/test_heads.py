"""Scores and labels are those of `transformers`; activations are those that the checkpoint names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.core.pooling import PoolWish
from tests.models.pooling.tiny_encoders import load, random_rows, save_encoder, transformers_output

LENGTHS = (3, 40, 17)
_LABELS = {"num_labels": 3, "id2label": {0: "no", 1: "maybe", 2: "yes"}}


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "nomic_bert", "gte", "modernbert"]
)
def test_one_label_is_a_score_of_a_pair(kind: str, tmp_path: Path) -> None:
    reference, types = (
        save_encoder(tmp_path, kind, "ForSequenceClassification", num_labels=1),
        kind in ("bert", "electra", "gte"),
    )
    model, rows = load(tmp_path), random_rows(LENGTHS, pairs=types)
    assert model.config.tasks == {"classify", "score"}
    raw, scores = model.run(rows, PoolWish("score", activation=False)), model.run(rows, PoolWish("score"))
    for row, number, score in zip(rows, raw, scores):
        expected = transformers_output(reference, row, types).logits
        torch.testing.assert_close(number.values, expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(score.values, torch.sigmoid(expected), atol=2e-5, rtol=0)
    for row, score in zip(rows, scores):
        assert torch.equal(model.run([row], PoolWish("score"))[0].values, score.values)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
def test_tokens_have_labels(kind: str, tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, kind, "ForTokenClassification", **_LABELS)
    model, rows = load(tmp_path), random_rows(LENGTHS)
    assert model.config.tasks == {"token_classify"}
    assert model.config.labels == ("no", "maybe", "yes")
    for row, found in zip(rows, model.run(rows, PoolWish("token_classify"))):
        expected = transformers_output(reference, row).logits[0].softmax(-1)
        torch.testing.assert_close(found.values, expected, atol=2e-5, rtol=0)


def test_modernbert_pools_the_mean_for_labels_if_its_config_says_so(tmp_path: Path) -> None:
    settings = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}
    reference = save_encoder(tmp_path, "modernbert", "ForSequenceClassification", **settings, **_LABELS)
    rows = random_rows(LENGTHS)
    for row, found in zip(rows, load(tmp_path).run(rows, PoolWish("classify", activation=False))):
        torch.testing.assert_close(found.values, transformers_output(reference, row).logits, atol=2e-5, rtol=0)


_SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({}, "softmax"),
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": _SIGMOID}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"problem_type": "regression", "sentence_transformers": {"activation_fn": _SIGMOID}}, "none"),
    ],
)
def test_the_checkpoint_names_the_activation(settings: dict[str, object], activation: str, tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, "bert", "ForSequenceClassification", **_LABELS)
    change_config(tmp_path, **settings)
    model, (row,) = load(tmp_path), random_rows([9])
    logits = transformers_output(reference, row).logits
    expected = {"none": logits, "softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}[activation]
    torch.testing.assert_close(model.run([row], PoolWish("classify"))[0].values, expected, atol=2e-5, rtol=0)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert", "ForSequenceClassification", **_LABELS)
    change_config(tmp_path, sentence_transformers={"activation_fn": "my.own.Function"})
    with pytest.raises(ModelError, match=r"activation 'my\.own\.Function' of the scores is not supported"):
        load(tmp_path)
