"""Tables of the vectors of tokens: model2vec, with and without the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import TextRow
from tests.models.pooling.tiny_encoders import load, write_modules

WORDS, SIZE = 12, 6
ROWS = [TextRow([3, 5, 5, 11]), TextRow([7])]


def write(folder: Path, tensors: dict[str, Tensor], **config: object) -> None:
    save_file(tensors, folder / "model.safetensors")
    own = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "hidden_dim": SIZE,
        "normalize": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(own))
    vocabulary = {("[UNK]", *"abcdefghijklmnop")[index]: index for index in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_vector_is_the_mean_of_those_of_its_tokens(tmp_path: Path) -> None:
    table, weights = torch.randn(5, SIZE), torch.rand(WORDS)
    mapping = torch.arange(WORDS) % 5
    tensors = {"embeddings": table, "weights": weights.double(), "mapping": mapping}
    write(tmp_path, tensors, normalize=True)
    model = load(tmp_path)
    assert (model.config.tasks, model.config.dim, model.config.dropped_ids) == ({"embed"}, SIZE, {0})
    folded = table[mapping] * weights[:, None]
    for row, found in zip(ROWS, model.run(ROWS, PoolWish("embed"))):
        expected = torch.nn.functional.normalize(folded[list(row.token_ids)].mean(0), dim=0)
        torch.testing.assert_close(found.values, expected[None], atol=1e-6, rtol=0)
        assert torch.equal(model.run([row], PoolWish("embed"))[0].values, found.values)


def test_the_modules_of_sentence_transformers_decide_if_there_are_any(tmp_path: Path) -> None:
    table = torch.randn(WORDS, SIZE)
    write(tmp_path, {"embedding.weight": table}, normalize=True)
    write_modules(tmp_path, first="StaticEmbedding")
    model = load(tmp_path)
    assert not model.config.dropped_ids
    found = model.run(ROWS, PoolWish("embed"))
    torch.testing.assert_close(found[0].values, table[list(ROWS[0].token_ids)].mean(0)[None], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weights": torch.ones(WORDS)}, "lacks the table embeddings"),
        ({"embeddings": torch.ones(WORDS, SIZE), "bias": torch.ones(2)}, "has the unknown tensors bias"),
        ({"embeddings": torch.ones(WORDS, 5)}, r"embeddings is \[12, 5\] instead of \[vocabulary, 6\]"),
        ({"embeddings": torch.ones(5, SIZE), "mapping": torch.arange(6)}, "a row that the table does not have"),
        ({"embeddings": torch.ones(WORDS, SIZE), "weights": torch.ones(3)}, r"weights is \[3\] instead of \[12\]"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    write(tmp_path, tensors)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_table_in_a_folder_of_its_own_is_refused_with_advice(tmp_path: Path) -> None:
    write(tmp_path, {"embeddings": torch.ones(WORDS, SIZE)})
    listed = [
        {"idx": 0, "name": "0", "path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelError, match="in the folder 0_StaticEmbedding; Paceline reads them from the model's own"):
        load(tmp_path)
