"""Checkpoints whose quantization is described by a file beside config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.core.model_folder import QUANTIZATION_FILES
from paceline.kernels import select_kernels
from paceline.models.config import read_facts, weight_form
from paceline.models.identity import model_identity
from paceline.models.loader import load_model
from tests.models.formats import test_awq, test_gptq, test_modelopt
from tests.models.formats.stored import store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "model_file_base_name": "model"}
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODEL_OPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}


def describe(folder: Path, name: str, content: Any) -> None:
    """Write a file beside config.json, and take the quantization out of config.json."""
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / name).write_text(json.dumps(content))


def add_to_config(folder: Path, quantization: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))


@pytest.mark.parametrize(
    ("name", "content", "pack"),
    [
        ("quantize_config.json", GPTQ, partial(test_gptq.pack, group=32)),
        ("quantize_config.json", {**GPTQ, "checkpoint_format": "gptq_v2"}, partial(test_gptq.pack, layout="gptq_v2")),
        ("quant_config.json", AWQ, lambda weight: test_awq.pack("gemm", 32, weight)),
        ("hf_quant_config.json", MODEL_OPT, test_modelopt.pack_fp8),
    ],
)
def test_logits_are_those_of_the_dequantized_model(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, name: str, content: Any, pack: Callable[..., Any]
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, {}, lambda _, weight: pack(weight))
    describe(tmp_path, name, content)
    assert weight_form(tmp_path, "auto") == "checkpoint"
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU)
    check_against_reference(reference, model, paged_contexts)


def test_a_file_that_agrees_with_config_json_changes_nothing(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    add_to_config(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert weight_form(tmp_path, "auto") == "checkpoint"


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 32},
            "bits is 8 in config.json and 4 in quantize_config.json",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "group_size is 64 in config.json and 32 in"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "sym is True in config.json and False in"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, save_llama: Any, stated: Any, named: str) -> None:
    save_llama()
    add_to_config(tmp_path, stated)
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    with pytest.raises(ModelError, match=f"{named}.*remove the file that does not describe the weights"):
        read_facts(tmp_path, "native")


def test_two_files_that_contradict_each_other_are_refused(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    (tmp_path / "quantize_config.json").write_text(json.dumps({**GPTQ, "quant_method": "gptq"}))
    (tmp_path / "quant_config.json").write_text(json.dumps(AWQ))
    with pytest.raises(ModelError, match=r"quant_method is 'gptq' in quantize_config\.json and 'awq' in quant_config"):
        weight_form(tmp_path, "auto")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("quantize_config.json", "{", "cannot read"),
        ("quantize_config.json", '{"damp": 1}', "names neither bits nor quant_method"),
        ("hf_quant_config.json", '{"quantization": "FP8"}', "must have an object named quantization"),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": "W4A8_AWQ"}}', "with the algorithm W4A8_AWQ"),
        ("quant_config.json", '{"w_bit": 3, "q_group_size": 128}', "in 3 bits; only 4 are supported"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, save_llama: Any, name: str, content: str, named: str) -> None:
    save_llama()
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=named):
        read_facts(tmp_path, "native")


def test_the_code_of_transformers_refuses_such_a_checkpoint(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ))
    with pytest.raises(ModelError, match="quantized checkpoints need a native architecture"):
        read_facts(tmp_path, "transformers")


@pytest.mark.parametrize("name", QUANTIZATION_FILES)
def test_the_identity_covers_the_files(tmp_path: Path, save_llama: Any, name: str) -> None:
    save_llama()
    before = model_identity(tmp_path, "bfloat16")
    (tmp_path / name).write_text("{}")
    changed = model_identity(tmp_path, "bfloat16")
    assert before.digest != changed.digest
    assert before.weights != changed.weights


def test_torchao_is_refused_before_weights_are_read(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    add_to_config(tmp_path, {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}})
    with pytest.raises(ModelError, match=r"quantized by torchao; supported are .* bf16, which --quantization rounds"):
        read_facts(tmp_path, "native")
