from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.models.model_config import Rope
from tests.models.configs import (
    LLAMA,
    LLAMA3_ROPE,
    LLAMA3_SCALING,
    QWEN2,
    SMOLLM3,
    YARN_ROPE,
    YARN_SCALING,
    read,
)


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    attention = config.attention["full"]
    assert (config.num_layers, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (2, 6, 2, 8)
    assert config.layer_types == ("full", "full")
    assert attention.scale == 8**-0.5
    assert (config.activation, config.norm_eps, config.max_position) == ("silu", 1e-5, 8192)
    assert (config.tie_word_embeddings, attention.bias, config.mlp_bias) == (False, False, False)
    assert (config.dtype, attention.rope) == ("bfloat16", Rope(10_000.0))


LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(5e5, "linear", 4.0)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN_SCALING}}, YARN_ROPE),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN_SCALING}}, YARN_ROPE),
        ({"rope_parameters": {"rope_theta": 3.0}, "rope_theta": 5e5, "rope_scaling": LINEAR}, Rope(5e5, "linear", 4.0)),
    ],
)
def test_llama_rope_old_and_new_style(tmp_path: Path, fields: dict[str, Any], rope: Rope) -> None:
    assert read(tmp_path, LLAMA, **fields).attention["full"].rope == rope


def test_yarn_makes_contexts_longer(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, LLAMA, max_position_embeddings=4096, rope_scaling=yarn).max_position == 16_384
    assert read(tmp_path, LLAMA, max_position_embeddings=20_000, rope_scaling=yarn).max_position == 20_000


def test_qwen2(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2, use_sliding_window=False)
    attention = config.attention["full"]
    assert (attention.bias, attention.output_bias, config.layer_types) == (True, False, ("full", "full"))
    config = read(tmp_path, QWEN2, use_sliding_window=True)
    assert (config.layer_types, config.attention["sliding"].window) == (("full", "sliding"), 512)
    names = ["sliding_attention", "full_attention"]
    assert read(tmp_path, QWEN2, use_sliding_window=True, layer_types=names).layer_types == ("sliding", "full")


def test_qwen3(tmp_path: Path) -> None:
    qwen3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"]}
    attention = read(tmp_path, qwen3).attention["full"]
    assert (attention.head_dim, attention.scale, attention.bias) == (128, 128**-0.5, False)
    attention = read(tmp_path, qwen3, attention_bias=True, head_dim=16).attention["full"]
    assert (attention.head_dim, attention.bias, attention.output_bias) == (16, True, True)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MinistralForCausalLM"])
def test_mistral(tmp_path: Path, architecture: str) -> None:
    mistral = {**LLAMA, "architectures": [architecture]}
    config = read(tmp_path, mistral)
    assert (config.layer_types, config.attention["sliding"].window) == (("sliding", "sliding"), 4096)
    assert read(tmp_path, mistral, sliding_window=None).layer_types == ("full", "full")
    names = ["full_attention", "sliding_attention"]
    config = read(tmp_path, mistral, sliding_window=100, layer_types=names)
    assert (config.layer_types, config.attention["sliding"].window) == (("full", "sliding"), 100)


def test_ministral3(tmp_path: Path) -> None:
    ministral3 = {**LLAMA, "architectures": ["Ministral3ForCausalLM"], "torch_dtype": "bfloat16"}
    rope = read(tmp_path, ministral3).attention["full"].rope
    growing = Rope(1e6, "yarn", 16.0, original_max_position=16_384, query_growth=0.1)
    assert rope == replace(growing, attention_factor=rope.attention_factor)
    parameters = {"rope_type": "default", "rope_theta": 5.0, "llama_4_scaling_beta": 0.2}
    config = read(tmp_path, ministral3, rope_parameters=parameters, sliding_window=None)
    assert config.attention["full"].rope == Rope(5.0, query_growth=0.2, original_max_position=8192)
    assert (config.layer_types, config.attention["full"].head_dim) == (("full", "full"), 128)


def test_smollm3(tmp_path: Path) -> None:
    smollm3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    config = read(tmp_path, smollm3)
    assert (config.layer_types, config.tie_word_embeddings) == (("full", "full", "full", "nope"), True)
    assert (config.attention["full"].rope, config.attention["nope"].rope) == (Rope(2e6), None)
    assert read(tmp_path, smollm3, no_rope_layers=[0, 1, 1, 0]).layer_types == ("nope", "full", "full", "nope")


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported are"),
        (LLAMA, {"architectures": None}, "architecture none is not supported"),
        (LLAMA, {"architectures": 5}, "architectures must be a list of names, not 5"),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, not 'LlamaForCausalLM'"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number that is not negative, not nan"),
        (LLAMA, {"rope_theta": 0}, "rope_theta must be above 0"),
        (LLAMA, {"rope_parameters": {"rope_theta": -1.0}}, "rope's rope_theta must be given, finite and above 0"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq; supported are awq, "),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic is not supported"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type longrope is not supported"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": -1.0}}, "rope's factor must be given, finite and above 0"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope's factor must be given"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial rotary"),
        (LLAMA, {"rope_interleaved": True}, "interleaved"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": "big"}, "hidden_size must be a positive whole number, not 'big'"),
        (LLAMA, {"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        (LLAMA, {"head_dim": 7}, "head_dim must be even"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        (LLAMA, {"rms_norm_eps": "tiny"}, "rms_norm_eps must be a finite number that is not negative, not 'tiny'"),
        (LLAMA, {"attention_bias": "no"}, "attention_bias must be true or false, not 'no'"),
        (LLAMA, {"rope_parameters": [5]}, r"rope_parameters must be an object, not \[5\]"),
        (LLAMA, {"layer_types": 5}, "layer_types must be a list, not 5"),
        (LLAMA, {"hidden_act": ["silu"]}, "hidden_act must be a text"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, "rope's factor must be a number, not '4'"),
        (LLAMA, {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", **YARN_SCALING}}, "rope_theta must not be 1"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, not 1000000000"),
        (LLAMA, {"head_dim": 10**9}, "head_dim must be at most"),
        (SMOLLM3, {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window is not supported"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers describes 1 layers, num_hidden_layers is 2"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 2}, "layer_types other than full_attention"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantized by an unnamed method; supported are awq, "),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)
