"""The formats that --quantization and --quantization-config choose for each layer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.config import WorkerConfig, quantization_of
from paceline.core.errors import ConfigError
from paceline.core.online_quantization import ONLINE_FORMATS, OnlineQuantization, read_online_quantization

LAYER = "model.layers.3."
EXPERTS = (
    LAYER + "mlp.experts.7.gate_proj.weight",
    LAYER + "mlp.experts.gate_up_proj[7][1]",
    LAYER + "block_sparse_moe.input_linear.weight[7][0]",
    LAYER + "block_sparse_moe.experts.7.w1.weight",
    "model.language_model.layers.3.experts.down_proj[7][0]",
)
LINEAR = (
    LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.qkv_proj.weight[2]",
    LAYER + "mlp.shared_experts.up_proj.weight",
    LAYER + "mlp.shared_expert.up_proj.weight",
)
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight", "language_model.lm_head.weight")


def chosen(config: Any, quantization: str = "auto") -> OnlineQuantization:
    found = read_online_quantization(quantization, json.dumps(config))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ONLINE_FORMATS)
def test_a_name_alone_rounds_linear_layers_and_experts(name: Any) -> None:
    found = quantization_of(WorkerConfig(quantization=name))
    assert isinstance(found, OnlineQuantization)
    assert {found.format_of(matrix) for matrix in (*EXPERTS, *LINEAR)} == {name}
    assert {found.format_of(matrix) for matrix in EMBEDDINGS} == {"int8" if name == "int8" else None}
    assert str(found) == name


@pytest.mark.parametrize("name", ONLINE_FORMATS)
@pytest.mark.parametrize(
    "matrix",
    [
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.wg.weight",
        "model.layers.3.mlp.router.gate.weight",
        "transformer.blocks.3.ffn.router.layer.weight",
        "model.language_model.embed_tokens_per_layer.weight",
    ],
)
def test_routers_and_tables_are_never_rounded(name: Any, matrix: str) -> None:
    assert OnlineQuantization.of(name).format_of(matrix) is None


def test_gates_of_experts_are_no_routers() -> None:
    found = chosen({"linear": "mxfp8", "moe": "mxfp4"})
    assert found.format_of("model.layers.3.mlp.experts.0.gate.weight") == "mxfp4"
    assert found.format_of("model.layers.3.mlp.gate_proj.weight") == "mxfp8"


@pytest.mark.parametrize("name", ["auto", "none", "gguf"])
def test_other_names_round_nothing(name: Any) -> None:
    assert quantization_of(WorkerConfig(quantization=name)) == name


def test_each_kind_of_layers_has_a_format_of_its_own() -> None:
    found = chosen({"linear": "mxfp8", "moe": {"weight": "mxfp4", "activation": None}})
    assert {found.format_of(matrix) for matrix in EXPERTS} == {"mxfp4"}
    assert {found.format_of(matrix) for matrix in LINEAR} == {"mxfp8"}
    assert {found.format_of(matrix) for matrix in EMBEDDINGS} == {None}


def test_the_object_changes_what_the_name_means() -> None:
    found = chosen({"linear": {"weight": None}, "moe": {"activation": None}}, "int8")
    assert {found.format_of(matrix) for matrix in LINEAR} == {None}
    assert {found.format_of(matrix) for matrix in (*EXPERTS, *EMBEDDINGS)} == {"int8"}


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ("model.layers.3.self_attn.q_proj", [LINEAR[0]]),
        ("re:.*self_attn", LINEAR[:2]),
        ("*shared_expert*", LINEAR[2:]),
        ("model.layers.3.mlp.experts", EXPERTS[:2]),
        ("re:model.*experts", [*LINEAR[2:3], *EXPERTS[:2], *EXPERTS[3:]]),
        ("self_attn.q_proj", []),
        ("re:layers", []),
    ],
)
def test_layers_to_ignore_are_named_or_match_a_pattern(entry: str, left: Any) -> None:
    found = chosen({"ignore": [entry]}, "fp8")
    assert [matrix for matrix in (*LINEAR, *EXPERTS) if found.format_of(matrix) is None] == list(left)


def test_different_choices_have_different_names() -> None:
    choices = [
        chosen({"linear": "fp8"}),
        chosen({"moe": "fp8"}),
        chosen({"linear": "fp8", "moe": "mxfp4"}),
        chosen({}, "fp8"),
        chosen({"ignore": ["a"]}, "fp8"),
        chosen({"ignore": ["b"]}, "fp8"),
        chosen({}, "int8"),
        chosen({"linear": "int8", "moe": "int8"}),
    ]
    names = {str(choice) for choice in choices}
    assert len(names) == len(choices)
    assert all(name.replace("-", "").isalnum() for name in names)


def test_names_of_vllm_are_known() -> None:
    assert chosen({"linear": "fp8_per_channel_static", "moe": "fp8_per_channel"}) == OnlineQuantization.of("fp8")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"experts": "fp8"}', "has the key 'experts'; supported are linear, moe and ignore"),
        ('{"linear": null}', "linear must be a format, or an object with weight"),
        ('{"linear": {"bits": 4}}', "linear must be a format, or an object with weight"),
        ('{"linear": "fp8_per_tensor"}', "the format of linear must be fp8, mxfp8, .* not 'fp8_per_tensor'"),
        ('{"moe": {"weight": 4}}', "the format of moe must be"),
        ('{"linear": {"weight": "mxfp8", "activation": "mxfp8"}}', "activations are never quantized"),
        ('{"linear": "fp8", "ignore": "lm_head"}', "ignore must be a list of names"),
        ('{"linear": "fp8", "ignore": ["re:("]}', "is no regular expression"),
        ('{"ignore": ["a"]}', "names no format"),
        ('{"linear": "fp8", "linear": "int8"}', "has the key 'linear' twice"),
        ('{"moe": {"weight": "fp8", "weight": null}}', "has the key 'weight' twice"),
        ('{"linear": {"weight": null}}', "names no format"),
    ],
)
def test_what_is_not_valid_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization-config.*{named}"):
        WorkerConfig(quantization_config=text)


@pytest.mark.parametrize("name", ["none", "gguf"])
def test_an_object_contradicts_a_format_that_rounds_nothing(name: Any) -> None:
    with pytest.raises(ConfigError, match=f"which --quantization {name} excludes"):
        WorkerConfig(quantization=name, quantization_config='{"linear": "fp8"}')


@pytest.mark.parametrize("options", [{"quantization": "mxfp4"}, {"quantization_config": '{"moe": "fp8"}'}])
def test_kernels_of_a_gpu_round_nothing(options: Any) -> None:
    with pytest.raises(ConfigError, match="for the kernels of CPUs, not for --device cuda:1"):
        WorkerConfig(device="cuda:1", **options)
