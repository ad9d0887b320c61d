"""What follows after an encoder: pooling, dense layers and norms, as the files of sentence-transformers say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import InvalidRequestError, ModelError
from paceline.core.pooling import PoolWish
from paceline.core.pooling_folder import read_pooling_config
from paceline.models.identity import model_identity
from paceline.models.pooling.model import TextRow
from paceline.models.pooling.sums import reduction
from tests.models.pooling.tiny_encoders import POOLING, hidden_states, load, random_rows, save_encoder, write_modules

_TANH = "torch.nn.modules.activation.Tanh"
_POSITIONS = torch.arange(1, 81.0)[:, None]
_KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda x, skipped: x[skipped],
    "lasttoken": lambda x, skipped: x[-1],
    "max": lambda x, skipped: x[skipped:].amax(0),
    "mean": lambda x, skipped: x[skipped:].mean(0),
    "mean_sqrt_len_tokens": lambda x, skipped: x[skipped:].sum(0) / (len(x) - skipped) ** 0.5,
    "weightedmean": lambda x, skipped: (x * _POSITIONS[: len(x)])[skipped:].sum(0) / _POSITIONS[skipped : len(x)].sum(),
}


def close(found: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.reshape(1, -1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", _KINDS)
def test_each_kind_of_pooling_in_its_older_and_its_newer_form(kind: str, tmp_path: Path) -> None:
    reference, rows = save_encoder(tmp_path, "bert"), random_rows([1, 30, 9])
    older = kind if kind in ("lasttoken", "mean_sqrt_len_tokens") else f"{kind}_tokens"
    older = "cls_token" if kind == "cls" else older
    for config in ({f"pooling_mode_{older}": True, "pooling_mode_mean": False}, {"pooling_mode": kind}):
        config = {name: value for name, value in config.items() if value}
        write_modules(tmp_path, ("Pooling", config))
        for row, found in zip(rows, load(tmp_path).run(rows, PoolWish("embed"))):
            close(found.values, _KINDS[kind](hidden_states(reference, row), 0))


@pytest.mark.parametrize("kind", _KINDS)
def test_the_tokens_of_a_prompt_take_part_unless_the_checkpoint_leaves_them_out(kind: str, tmp_path: Path) -> None:
    reference, (row,) = save_encoder(tmp_path, "bert"), random_rows([30])
    prompted = TextRow(row.token_ids, prompt_tokens=11)
    for includes, skipped in ((True, 0), (False, 11)):
        write_modules(tmp_path, ("Pooling", {"pooling_mode": kind, "include_prompt": includes}))
        (found,) = load(tmp_path).run([prompted], PoolWish("embed"))
        close(found.values, _KINDS[kind](hidden_states(reference, row), skipped))


def test_several_kinds_are_concatenated(tmp_path: Path) -> None:
    reference, (row,) = save_encoder(tmp_path, "bert"), random_rows([12])
    write_modules(tmp_path, ("Pooling", {"pooling_mode": ["max", "cls"]}))
    model = load(tmp_path)
    assert model.config.dim == 64
    states = hidden_states(reference, row)
    close(model.run([row], PoolWish("embed"))[0].values, torch.cat((states.amax(0), states[0])))


@pytest.mark.parametrize("kind", ["cls", "last", "max", "mean", "mean_sqrt_len", "weightedmean"])
@pytest.mark.parametrize("skipped", [0, 5])
def test_the_places_at_which_an_input_is_cut_change_no_bit(kind: Any, skipped: int) -> None:
    rows = torch.randn(300, 24)
    whole = reduction(kind, skipped)
    whole.add(rows)
    for sizes in ((300,), (1,) * 300, (3, 4, 200, 93)):
        cut = reduction(kind, skipped)
        for part in torch.split(rows, list(sizes)):
            cut.add(part)
        assert torch.equal(cut.result(), whole.result())


def save_dense(folder: Path, name: str, size_in: int, size_out: int, residual: bool = False) -> dict[str, Tensor]:
    tensors = {"linear.weight": torch.randn(size_out, size_in) / 4, "linear.bias": torch.randn(size_out)}
    if residual:
        tensors["residual.weight"] = torch.randn(size_out, size_in) / 4
    save_file(tensors, folder / name / "model.safetensors")
    return tensors


_DENSE = {"in_features": 32, "out_features": 20, "bias": True}


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ({}, torch.tanh),
        ({"activation_function": _TANH}, torch.tanh),
        ({"activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ({"activation_function": "torch.nn.modules.activation.GELU"}, F.gelu),
    ],
)
def test_a_dense_layer_has_its_activation_which_is_tanh_if_none_is_named(
    activation: dict[str, str], function: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    reference, rows = save_encoder(tmp_path, "bert"), random_rows([12, 5])
    write_modules(tmp_path, ("Pooling", POOLING), ("Dense", {**_DENSE, **activation}), ("Normalize", {}))
    dense = save_dense(tmp_path, "2_Dense", 32, 20)
    model = load(tmp_path)
    assert (model.config.dim, model.config.normalizes) == (20, True)
    results = model.run(rows, PoolWish("embed")), model.run(rows, PoolWish("embed", normalize=False))
    for row, found, long in zip(rows, *results):
        mean = hidden_states(reference, row).mean(0)
        expected = function(F.linear(mean, dense["linear.weight"], dense["linear.bias"]))
        close(long.values, expected)
        close(found.values, F.normalize(expected, dim=0))
        assert torch.equal(model.run([row], PoolWish("embed"))[0].values, found.values)


def test_a_dense_layer_may_add_its_input(tmp_path: Path) -> None:
    reference, (row,) = save_encoder(tmp_path, "bert"), random_rows([12])
    write_modules(tmp_path, ("Pooling", POOLING), ("Dense", {**_DENSE, "use_residual": True}))
    dense = save_dense(tmp_path, "2_Dense", 32, 20, residual=True)
    mean = hidden_states(reference, row).mean(0)
    expected = torch.tanh(F.linear(mean, dense["linear.weight"], dense["linear.bias"]))
    close(load(tmp_path).run([row], PoolWish("embed"))[0].values, expected + dense["residual.weight"] @ mean)


def test_vectors_are_cut_and_then_get_the_length_1(tmp_path: Path) -> None:
    reference, (row,) = save_encoder(tmp_path, "bert"), random_rows([12])
    write_modules(tmp_path, ("Pooling", POOLING), ("Normalize", {}), matryoshka_dimensions=[8, 16])
    model, mean = load(tmp_path), hidden_states(reference, row).mean(0)
    close(model.run([row], PoolWish("embed", dimensions=8))[0].values, F.normalize(mean[:8], dim=0))
    close(model.run([row], PoolWish("embed", dimensions=32))[0].values, F.normalize(mean, dim=0))
    close(model.run([row], PoolWish("embed", dimensions=8, normalize=False))[0].values, mean[:8])
    with pytest.raises(InvalidRequestError, match="dimensions must be 8 or 16 or 32 for this model, not 9"):
        model.run([row], PoolWish("embed", dimensions=9))


def test_one_model_gives_dense_sparse_and_token_vectors(tmp_path: Path) -> None:
    reference = save_encoder(tmp_path, "xlm-roberta", pad_token_id=1, bos_token_id=0, eos_token_id=2)
    write_modules(tmp_path, ("Pooling", {"pooling_mode": "cls"}), ("Normalize", {}))
    heads = {name: torch.nn.Linear(32, size) for name, size in (("sparse", 1), ("colbert", 32))}
    for name, head in heads.items():
        torch.save(head.state_dict(), tmp_path / f"{name}_linear.pt")
    model, row = load(tmp_path), TextRow([0, 40, 7, 40, 3, 9, 2])
    assert model.config.tasks == {"embed", "token_embed", "sparse"}
    states = hidden_states(reference, row)
    close(model.run([row], PoolWish("embed"))[0].values, F.normalize(states[0], dim=0))
    with torch.inference_mode():
        tokens = F.normalize(heads["colbert"](states[1:]), dim=1)
        weights = torch.relu(heads["sparse"](states))[:, 0]
    torch.testing.assert_close(model.run([row], PoolWish("token_embed"))[0].values, tokens, atol=2e-5, rtol=0)
    expected = {7: weights[2], 9: weights[5], 40: torch.maximum(weights[1], weights[3])}
    wanted = torch.tensor([[token, weight] for token, weight in expected.items() if weight > 0]).view(-1, 2)
    torch.testing.assert_close(model.run([row], PoolWish("sparse"))[0].values, wanted, atol=2e-5, rtol=0)


def test_vectors_of_tokens_have_their_own_modules_and_ids_that_are_kept(tmp_path: Path) -> None:
    reference, row = save_encoder(tmp_path, "bert"), TextRow([5, 9, 7, 9, 8])
    identity = "torch.nn.modules.linear.Identity"
    dense = {**_DENSE, "bias": False, "activation_function": identity}
    write_modules(tmp_path, ("Dense", dense), ("Normalize", {}), ("MultiVectorMask", {"keep_only_token_ids": [9, 8]}))
    weight = torch.randn(20, 32)
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    model = load(tmp_path)
    assert (model.config.tasks, model.config.dim, model.config.similarity) == ({"token_embed"}, 20, "maxsim")
    expected = F.normalize(hidden_states(reference, row) @ weight.T, dim=1)
    for role, kept in (("query", [0, 1, 2, 3, 4]), ("document", [1, 3, 4])):
        (found,) = model.run([row], PoolWish("token_embed", role=role))  # type: ignore[arg-type]
        torch.testing.assert_close(found.values, expected[kept], atol=2e-5, rtol=0)


class TestRefusals:
    def test_an_encoder_without_a_word_on_pooling(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, "bert")
        with pytest.raises(ModelError, match=r"lacks modules\.json, which says how an encoder's hidden states become"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("module", "config", "message"),
        [
            ("Pooling", {}, "lacks pooling_mode"),
            ("Pooling", {"pooling_mode": "median"}, "pooling_mode must be among cls, max, mean"),
            ("CNN", {}, "lists the module CNN"),
            ("MultiVectorMask", {"skiplist_tasks": ["title"]}, "skiplist_tasks must be among query, document"),
            ("SpladePooling", {}, "SpladePooling needs logits"),
        ],
    )
    def test_pooling_that_is_unknown(self, module: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
        save_encoder(tmp_path, "bert")
        write_modules(tmp_path, (module, config))
        with pytest.raises(ModelError, match=message):
            load(tmp_path)

    def test_modules_with_code_of_their_own_or_outside_of_the_folder(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, "bert")
        write_modules(tmp_path, ("Pooling", POOLING))
        path = tmp_path / "modules.json"
        listed = json.loads(path.read_text())
        for change in ({"type": "custom_st.Pooling"}, {"path": "../1_Pooling"}):
            path.write_text(json.dumps([listed[0], {**listed[1], **change}]))
            with pytest.raises(ModelError, match=r"code of its own|must be inside the model's folder"):
                load(tmp_path)

    def test_tensors_that_are_missing_or_unknown(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, "bert")
        write_modules(tmp_path, ("Pooling", POOLING), ("Dense", _DENSE))
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        dense = save_dense(tmp_path, "2_Dense", 32, 20)
        save_file({**tensors, "encoder.gate.weight": torch.ones(2)}, path)
        with pytest.raises(ModelError, match=r"unexpected tensors: encoder\.gate\.weight"):
            load(tmp_path)
        name = "encoder.layer.1.output.LayerNorm.bias"
        save_file({key: value for key, value in tensors.items() if key != name}, path)
        with pytest.raises(ModelError, match=rf"missing tensors: {name}"):
            load(tmp_path)
        save_file(tensors, path)
        save_file({"linear.weight": dense["linear.weight"]}, tmp_path / "2_Dense" / "model.safetensors")
        with pytest.raises(ModelError, match=r"2_Dense: .*missing tensors: linear\.bias"):
            load(tmp_path)
        (tmp_path / "2_Dense" / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"2_Dense lacks model\.safetensors"):
            load(tmp_path)

    def test_float16_is_never_computed(self, tmp_path: Path) -> None:
        save_encoder(tmp_path, "bert").half().save_pretrained(tmp_path)
        write_modules(tmp_path, ("Pooling", POOLING))
        with pytest.raises(ModelError, match="bfloat16 or float32"):
            load(tmp_path, torch.float16)
        assert load(tmp_path).run(random_rows([4]), PoolWish("embed"))[0].values is not None


def test_settings_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    prompts = {"query": "query: ", "document": ""}
    write_modules(tmp_path, ("Pooling", POOLING), prompts=prompts, default_prompt_name="query")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30, "do_lower_case": True}))
    config = read_pooling_config(tmp_path)
    assert config is not None
    assert (config.prompts, config.default_prompt_name) == (prompts, "query")
    assert (config.max_tokens, config.lower_case, config.similarity) == (30, True, "cosine")


def test_the_identity_covers_every_file_that_says_how_to_pool(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    write_modules(tmp_path, ("Pooling", POOLING), ("Dense", _DENSE))
    save_dense(tmp_path, "2_Dense", 32, 20)
    digests = {model_identity(tmp_path, "float32").digest}
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json"):
        with (tmp_path / name).open("a") as file:
            file.write(" ")
        digests.add(model_identity(tmp_path, "float32").digest)
    save_dense(tmp_path, "2_Dense", 32, 20)
    digests.add(model_identity(tmp_path, "float32").digest)
    assert len(digests) == 6
