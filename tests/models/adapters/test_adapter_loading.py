"""Adapters that are damaged, do not fit, or have settings that cannot be served are refused with the key's name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.adapters import read_adapter_files
from paceline.core.errors import ModelError
from paceline.kernels.reference import ReferenceKernels
from paceline.models.adapters.base_weights import BaseWeights
from paceline.models.adapters.loading import (
    AdapterRules,
    LoadedAdapter,
    load_adapter,
    most_adapter_bytes,
    target_modules,
)
from paceline.models.adapters.peft_config import read_peft_config
from tests.adapters import write_files
from tests.fuzz.adapters import layers

SIZE = 8


BASE = BaseWeights(ReferenceKernels())


def tensors(rank: int = 2, begin: str = "base_model.model.model.") -> dict[str, Tensor]:
    generator, found = torch.Generator().manual_seed(1), {}
    for layer in range(2):
        for name, size_in, out in (("q_proj", SIZE, 6), ("o_proj", 6, SIZE)):
            module = f"{begin}layers.{layer}.self_attn.{name}"
            found[f"{module}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator)
            found[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    return found


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def load(
    folder: Path, changed: dict[str, Any] | None = None, own: dict[str, Tensor] | None = None, **rules: Any
) -> LoadedAdapter:
    write_files(folder, {**CONFIG, **(changed or {})}, tensors() if own is None else own)
    return load_adapter(read_adapter_files(folder), layers(), torch.float32, AdapterRules(**rules), BASE)


@pytest.mark.parametrize("begin", ["base_model.model.model.", "base_model.model.model.language_model.", "model."])
def test_parts_have_the_outputs_of_their_layers(tmp_path: Path, begin: str) -> None:
    own = tensors(begin=begin)
    first, second, output, *_ = load(tmp_path, own=own).parts
    assert first is not None
    assert second is not None
    assert output is not None
    up = own[f"{begin}layers.0.self_attn.q_proj.lora_B.weight"]
    assert torch.equal(first.up, up[[5, 4, 3, 2]].T)
    assert torch.equal(second.up, up[[1, 0]].T)
    assert torch.equal(first.down, own[f"{begin}layers.0.self_attn.q_proj.lora_A.weight"])
    assert first.scale == 2.0
    assert torch.equal(output.up, own[f"{begin}layers.0.self_attn.o_proj.lora_B.weight"].T)


def without(key: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors().items() if name != key}


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]], str]] = {
    "DoRA without magnitudes": ({"use_dora": True}, tensors, "use_dora"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, tensors, "modules_to_save"),
    "biases of a model without them": ({"bias": "all"}, lambda: {**tensors(), f"{Q}.bias": torch.ones(6)}, "bias"),
    "biases of an unknown kind": ({"bias": "some"}, tensors, "bias"),
    "experts": ({"target_parameters": ["experts.gate_up_proj"]}, tensors, "target_parameters"),
    "tokens": ({"trainable_token_indices": [1]}, tensors, "trainable_token_indices"),
    "PiSSA": ({"init_lora_weights": "pissa"}, tensors, "pissa"),
    "a setting of the future": ({"new_idea": {"x": 1}}, tensors, "new_idea"),
    "another method": ({"peft_type": "IA3"}, tensors, "IA3"),
    "no targets": ({"target_modules": None}, tensors, "target_modules"),
    "a bad pattern": ({"target_modules": "(q_proj"}, tensors, "target_modules"),
    "a rank of words": ({"r": "two"}, tensors, "r must be"),
    "no rank": ({"r": 0}, tensors, "r must be"),
    "a scale of NaN": ({"lora_alpha": float("nan")}, tensors, "lora_alpha"),
    "another rank": ({"r": 3}, tensors, "rank 2"),
    "a bias that is missing": ({"lora_bias": True}, tensors, "lora_bias"),
    "no target": ({"target_modules": ["q_proj"]}, tensors, "o_proj"),
    "a missing layer": ({}, lambda: {key: own for key, own in tensors().items() if "layers.1" not in key}, "layers.1"),
    "half a layer": ({}, lambda: without(Q0), "no lora_A"),
    "an unknown layer": ({}, lambda: {Q0.replace("q_proj", "x_proj"): torch.ones(2, SIZE), **_up("x_proj")}, "x_proj"),
    "embeddings": ({}, lambda: {**tensors(), "base_model.model.embed.lora_embedding_A": torch.ones(2, 4)}, "embedding"),
    "magnitudes": ({}, lambda: {**tensors(), f"{Q}.lora_magnitude_vector": torch.ones(6)}, "use_dora"),
    "magnitudes of another size": ({}, lambda: {**tensors(), f"{Q}.lora_magnitude_vector": torch.ones(5)}, "[5]"),
    "two spellings": ({}, lambda: {**tensors(), **tensors(begin="base_model.model.language_model.")}, "twice"),
    "another matrix": ({}, lambda: {**tensors(), f"{Q}.base_layer.weight": torch.ones(6, 8)}, "not that of this model"),
    "a matrix of another size": (
        {},
        lambda: {**tensors(), f"{Q}.base_layer.weight": torch.ones(5, 8)},
        "its matrix is",
    ),
    "parameters of experts": ({}, lambda: {**tensors(), "x.base_layer.lora_A.weight": torch.ones(2, 2)}, "experts"),
    "another tensor": ({}, lambda: {**tensors(), "base_model.model.norm.weight": torch.ones(2)}, "norm.weight"),
    "NaN": ({}, lambda: {**tensors(), Q0: torch.full((2, SIZE), float("nan"))}, "NaN"),
    "infinity": ({}, lambda: {**tensors(), Q0: torch.full((2, SIZE), float("inf"))}, "NaN or infinity"),
    "another size": ({}, lambda: {**tensors(), Q0: torch.ones(2, SIZE + 1)}, "not"),
    "three dimensions": ({}, lambda: {**tensors(), Q0: torch.ones(2, SIZE, 1)}, "shape"),
    "whole numbers": ({}, lambda: {**tensors(), Q0: torch.ones(2, SIZE, dtype=torch.int32)}, "dtype"),
    "nothing": ({}, dict, "no tensors"),
}


def _up(name: str) -> dict[str, Tensor]:
    return {Q0.replace("q_proj", name).replace("lora_A", "lora_B"): torch.ones(6, 2)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changed, own, named = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        load(tmp_path, changed, own())
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--max-lora-rank"):
        load(tmp_path, {"r": 32}, tensors(32), most_rank=16)


def test_other_modules_are_left_out(tmp_path: Path) -> None:
    parts = load(tmp_path, only=target_modules(["qkv_proj"])).parts
    assert [part is None for part in parts] == [False, False, True] * 2


def test_settings_without_effect_are_read_over(tmp_path: Path) -> None:
    plain = load(tmp_path, {"fan_in_fan_out": True, "lora_dropout": 0.1, "use_dora": False, "modules_to_save": None})
    assert plain.parts[0] is not None


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first, again = load(tmp_path / "a"), load(tmp_path / "b")
    own = tensors()
    own[Q0][0, 0] += 1
    assert first.digest == again.digest
    assert (
        len({first.digest, load(tmp_path / "c", own=own).digest, load(tmp_path / "d", {"lora_alpha": 5}).digest}) == 3
    )


def test_an_adapter_is_never_larger_than_the_limit_for_its_file(tmp_path: Path) -> None:
    load(tmp_path)
    most = most_adapter_bytes(layers(), 2)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size <= most
    with open(tmp_path / "adapter_model.safetensors", "ab") as file:
        file.truncate(most + 1)
    with pytest.raises(ModelError, match="more than"):
        read_adapter_files(tmp_path, most)


def test_pickles_and_pipes_are_not_read(tmp_path: Path) -> None:
    write_files(tmp_path, CONFIG, tensors())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="may run code"):
        read_adapter_files(tmp_path)
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="not a file"):
        read_adapter_files(tmp_path)
    with pytest.raises(ModelError, match="a folder as PEFT saves it"):
        read_adapter_files(tmp_path / "none")


def test_the_own_matrix_of_a_module_may_be_there(tmp_path: Path) -> None:
    matrix = {f"{Q}.base_layer.weight": torch.zeros(6, SIZE)}
    assert load(tmp_path, own={**tensors(), **matrix}).parts[0] is not None


def test_all_linear_leaves_out_the_head() -> None:
    config = read_peft_config(json.dumps({**CONFIG, "target_modules": "all-linear"}).encode())
    assert not config.targets_module("lm_head")
    assert config.targets_module("model.layers.0.self_attn.q_proj")


def test_layers_to_transform_are_counted_as_peft_does() -> None:
    config = read_peft_config(json.dumps({**CONFIG, "layers_to_transform": 1}).encode())
    assert [config.targets_module(f"model.layers.{layer}.self_attn.q_proj") for layer in range(3)] == [
        False,
        True,
        False,
    ]
    config = read_peft_config(json.dumps({**CONFIG, "layers_to_transform": [1], "layers_pattern": "blocks"}).encode())
    assert not config.targets_module("model.layers.1.self_attn.q_proj")
    assert config.targets_module("model.blocks.1.self_attn.q_proj")
