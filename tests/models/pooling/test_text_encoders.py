"""Encoders of text compute what `transformers` computes, and an input's result depends on no other input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import TextRow
from tests.models.pooling.tiny_encoders import (
    ENCODERS,
    POOLING,
    hidden_states,
    load,
    random_rows,
    save_encoder,
    write_modules,
)

LENGTHS = (1, 7, 40, 2, 33, 64)
_WITH_TYPES = ("bert", "electra", "nomic_bert", "gte")


@pytest.mark.parametrize("kind", ENCODERS)
def test_hidden_states_are_those_of_transformers_alone_and_in_any_batch(kind: str, tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, kind)
    write_modules(tmp_path, ("Pooling", POOLING))
    model, types = load(tmp_path), kind in _WITH_TYPES
    rows = random_rows(LENGTHS, pairs=types)
    together = model.run(rows, PoolWish("token_embed"))
    means = model.run(rows, PoolWish("embed"))
    for row, found, mean in zip(rows, together, means):
        expected = hidden_states(reference, row, types)
        assert found.values is not None
        torch.testing.assert_close(found.values, expected, atol=5e-5, rtol=0)  # states are as large as 5
        assert mean.values is not None
        torch.testing.assert_close(mean.values[0], expected.mean(0), atol=2e-5, rtol=0)
    for wish, results in ((PoolWish("token_embed"), together), (PoolWish("embed"), means)):
        for row, found in zip(rows, results):
            (alone,) = model.run([row], wish)
            assert torch.equal(alone.values, found.values)
        backwards = model.run([*rows[::-1], *rows], wish)
        assert all(torch.equal(a.values, b.values) for a, b in zip(backwards, [*results[::-1], *results]))


@pytest.mark.parametrize("kind", ENCODERS)
def test_bf16_keeps_the_direction_of_vectors(kind: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, kind)
    write_modules(tmp_path, ("Pooling", POOLING))
    rows = random_rows(LENGTHS)
    wide, narrow = (load(tmp_path, dtype).run(rows, PoolWish("embed")) for dtype in (torch.float32, torch.bfloat16))
    for a, b in zip(wide, narrow):
        assert a.values is not None
        assert b.values is not None
        assert F.cosine_similarity(a.values, b.values).item() >= 0.999


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_the_reference_kernels_compute_the_same(kind: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, kind)
    write_modules(tmp_path, ("Pooling", POOLING))
    rows = random_rows(LENGTHS)
    native, reference = (load(tmp_path, backend=name).run(rows, PoolWish("embed")) for name in ("native", "reference"))
    for a, b in zip(native, reference):
        torch.testing.assert_close(a.values, b.values, atol=2e-5, rtol=0)


def test_a_longer_pass_than_any_before_changes_nothing(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    write_modules(tmp_path, ("Pooling", POOLING))
    model, (row,) = load(tmp_path), random_rows([20])
    (first,) = model.run([row], PoolWish("embed"))
    many = model.run([row] * 70, PoolWish("embed"))
    assert all(torch.equal(each.values, first.values) for each in many)


def test_a_value_that_is_not_finite_is_an_error_of_its_input_alone(tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, "bert")
    reference.embeddings.word_embeddings.weight.data[3] = float("nan")
    reference.save_pretrained(tmp_path)
    write_modules(tmp_path, ("Pooling", POOLING))
    model, rows = load(tmp_path), random_rows([9, 40])
    broken = TextRow([4, 3, 5])
    good, bad, other = model.run([rows[0], broken, rows[1]], PoolWish("embed"))
    assert bad.values is None
    assert "not finite" in bad.error
    expected = model.run(rows, PoolWish("embed"))
    assert torch.equal(good.values, expected[0].values)
    assert torch.equal(other.values, expected[1].values)


def test_inputs_that_do_not_fit_are_refused_before_computing(tmp_path: Path) -> None:
    save_encoder(tmp_path, "roberta")
    write_modules(tmp_path, ("Pooling", POOLING))
    model = load(tmp_path)
    assert model.config.max_tokens == 78  # positions begin after the padding token's id, 1
    model.run(random_rows([78]), PoolWish("embed"))
    with pytest.raises(InvalidRequestError, match="1 to 78 tokens for this model, not 79"):
        model.run(random_rows([79]), PoolWish("embed"))
    with pytest.raises(InvalidRequestError, match="token ids must be from 0 to 96"):
        model.run([TextRow([97])], PoolWish("embed"))
    with pytest.raises(InvalidRequestError, match="does not compute classify; it computes embed and token_embed"):
        model.run(random_rows([3]), PoolWish("classify"))
    with pytest.raises(InvalidRequestError, match="dimensions must be 32 for this model, not 16"):
        model.run(random_rows([3]), PoolWish("embed", dimensions=16))
