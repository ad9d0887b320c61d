from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config import read_config
from paceline.models.model_config import DeltaNet, Experts, Gemma4Config, Mamba, Rope
from paceline.models.registry import MODELS

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 40,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "sliding_window": 512,
    "eos_token_id": [1, 106],
    "dtype": "float32",
}
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "shared_intermediate_size": 2048,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "mamba_n_heads": 48,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.246,
    "logits_scaling": 3,
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
GEMMA4: dict[str, Any] = {
    # The sizes of E2B.
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131_072,
        "use_bidirectional_attention": None,
    },
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
    "torch_dtype": "bfloat16",
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        **{name: value for name, value in QWEN3_NEXT.items() if name.startswith("linear_")},
        "vocab_size": 100,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 27},
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5, "truncate": False}
YARN_ROPE = Rope(5e5, "yarn", 4.0, original_max_position=64, truncate=False, attention_factor=1.5)
LLAMA3_ROPE = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 64)


def read(folder: Path, fields: dict[str, Any], **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    return read_config(folder)


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    attention = config.attention["full"]
    assert (config.num_layers, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (2, 6, 2, 8)
    assert config.layer_types == ("full", "full")
    assert attention.scale == 8**-0.5
    assert (config.activation, config.norm_eps, config.max_position) == ("silu", 1e-5, 8192)
    assert (config.tie_word_embeddings, attention.bias, config.mlp_bias) == (False, False, False)
    assert (config.dtype, attention.rope) == ("bfloat16", Rope(10_000.0))


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
    ],
)
def test_llama_rope_old_and_new_style(tmp_path: Path, fields: dict[str, Any], rope: Rope) -> None:
    assert read(tmp_path, LLAMA, **fields).attention["full"].rope == rope


SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "max_window_layers": 1}


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


GPT_OSS = {**LLAMA, "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3, "num_local_experts": 32}
del GPT_OSS["torch_dtype"]  # published ones do not have it


def test_gpt_oss(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert config.layer_types == ("sliding", "full", "sliding")
    assert (full.window, sliding.window, full.sinks, sliding.sinks, full.output_bias) == (0, 128, True, True, True)
    assert full.rope is not None
    assert (full.rope.theta, full.rope.factor, full.rope.truncate) == (150_000.0, 32.0, False)
    assert full.rope.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert config.experts == Experts(32, 80, Routing(4, normalize=True), "clamped_swiglu", bias=True)
    assert config.dtype == "bfloat16"


def test_yarn_makes_contexts_longer(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, LLAMA, max_position_embeddings=4096, rope_scaling=yarn).max_position == 16_384
    assert read(tmp_path, LLAMA, max_position_embeddings=20_000, rope_scaling=yarn).max_position == 20_000


def test_gemma3_old_style(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        GEMMA,
        rope_theta=2e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    assert config.layer_types == ("sliding", "sliding", "full", "sliding", "sliding", "full", "sliding", "sliding")
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.rope, sliding.rope) == (Rope(2e6, "linear", 8.0), Rope(2e4))
    assert (full.window, sliding.window) == (0, 512)
    assert (full.scale, sliding.scale, config.tie_word_embeddings) == (256**-0.5, 256**-0.5, True)


def test_gemma3_new_style(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        GEMMA,
        layer_types=["full_attention"] * 7 + ["sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
        query_pre_attn_scalar=168,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    )
    assert config.layer_types == ("full",) * 7 + ("sliding",)
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.rope, sliding.rope) == (Rope(2e6, "linear", 8.0), Rope(2e4))
    assert (full.scale, config.logit_softcap, full.softcap, sliding.softcap) == (168**-0.5, 30.0, 50.0, 50.0)


def test_gemma3_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA)
    assert config.layer_types == ("sliding",) * 5 + ("full",) + ("sliding",) * 2
    assert (config.attention["full"].rope, config.attention["sliding"].rope) == (Rope(1_000_000.0), Rope(10_000.0))


def test_granite_hybrid(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    assert config.layer_types == ("mamba", "full", "mamba")
    assert config.mamba == Mamba(heads=48, head_dim=32, state_size=128, conv_taps=4, conv_bias=True, bias=False)
    assert (config.mamba.inner_size, config.mamba.conv_channels) == (1536, 1792)
    attention = config.attention["full"]
    assert (attention.scale, attention.rope, config.intermediate_size) == (0.015625, None, 2048)
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_divisor) == (12.0, 0.246, 3.0)
    assert read(tmp_path, GRANITE, position_embedding_type="rope").attention["full"].rope == Rope(10_000.0)
    assert read(tmp_path, GRANITE, mamba_d_head="auto").mamba == config.mamba
    for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        assert read(tmp_path, GRANITE, time_step_limit=limit) == config
    names = ["linear_attention", "full_attention", "linear_attention"]
    assert read(tmp_path, GRANITE, layer_types=names) == config


def test_qwen3_next(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_NEXT)
    assert config.layer_types == ("delta", "delta", "delta", "full") * 2
    assert config.delta == DeltaNet(32, 16, key_dim=128, value_dim=128, conv_taps=4, grouped=True)
    assert config.delta.conv_channels == 8192
    attention = config.attention["full"]
    assert (attention.gated, attention.scale, attention.rope) == (True, 256**-0.5, Rope(1e7, rotated_dims=64))
    experts = config.experts
    assert experts.routing == Routing(10, normalize=True)
    assert (experts.count, experts.inner_size, experts.shared_size, experts.dense_layers) == (512, 512, 512, {2})
    assert read(tmp_path, QWEN3_NEXT, decoder_sparse_step=2).experts.dense_layers == {0, 2, 4, 6}
    assert read(tmp_path, QWEN3_NEXT, num_experts=0).experts is None
    assert read(tmp_path, QWEN3_NEXT, partial_rotary_factor=None) == config
    assert read(tmp_path, QWEN3_NEXT, partial_rotary_factor=1.0).attention["full"].rope == Rope(1e7)


def test_qwen3_5_is_the_text_model_of_a_model_for_images(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_5)
    assert config.layer_types == ("delta", "delta", "delta", "full")
    assert config.delta == DeltaNet(32, 16, key_dim=128, value_dim=128, conv_taps=4, grouped=False)
    assert (config.dtype, config.tie_word_embeddings, config.max_position) == ("bfloat16", True, 262144)
    assert config.attention["full"].rope == Rope(1e7, rotated_dims=64)
    assert config.experts.routing == Routing(8, normalize=True)
    text = {**QWEN3_5["text_config"], "architectures": ["Qwen3_5MoeForCausalLM"], "dtype": "bfloat16"}
    alone = read(tmp_path, text, tie_word_embeddings=True)
    assert replace(alone, architecture=config.architecture) == config
    dense = read(tmp_path, text, architectures=["Qwen3_5ForCausalLM"], intermediate_size=9216)
    assert (dense.experts, dense.intermediate_size, dense.delta) == (None, 9216, config.delta)


def test_gemma4_with_layers_that_read_others(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA4)
    assert config.kv_sources == {layer: 14 if layer % 5 == 4 else 13 for layer in range(15, 35)}
    assert (config.storing_layers, config.num_layers, config.dtype) == (15, 35, "bfloat16")
    full, sliding = config.attention["full"], config.attention["sliding"]
    assert (full.head_dim, sliding.head_dim, full.num_kv_heads, sliding.num_kv_heads) == (512, 256, 1, 1)
    assert (full.window, sliding.window, full.scale, config.logit_softcap) == (0, 512, 1.0, 30.0)
    assert full.rope == Rope(1_000_000.0, "proportional", rotated_dims=128)
    assert sliding.rope == Rope(10_000.0)
    assert config.gemma4 == Gemma4Config((), 12_288, 256, 262_144)
    assert (config.intermediate_size, config.tie_word_embeddings, config.experts) == (6144, True, None)


def test_gemma4_as_transformers_saves_it(tmp_path: Path) -> None:
    released = read(tmp_path, GEMMA4)
    transformers.Gemma4Config(**GEMMA4).save_pretrained(tmp_path)
    # The numbers of layers have leading zeros there.
    assert "04" in json.loads((tmp_path / "config.json").read_text())["text_config"]["per_layer_config"]
    assert read_config(tmp_path).attention == released.attention


def test_gemma4_with_values_from_keys_and_experts(tmp_path: Path) -> None:
    text = {
        **GEMMA4["text_config"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "use_bidirectional_attention": "vision",
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    }
    config = read(tmp_path, GEMMA4, text_config=text)
    assert (config.attention["full"].num_kv_heads, config.attention["sliding"].num_kv_heads) == (2, 8)
    assert config.gemma4 == Gemma4Config(("full",), 12_288, 0, 0)
    assert (config.kv_sources, config.storing_layers) == ({}, 35)
    assert config.experts == Experts(128, 704, Routing(8, normalize=True), "gelu_tanh")


def gemma4_text(**changes: Any) -> dict[str, Any]:
    return {"text_config": {**GEMMA4["text_config"], **changes}}


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma3Text", "Qwen2", "Qwen3", "Mistral", "Ministral3", "SmolLM3", "GptOss"]
)
def test_what_transformers_saves_is_read_as_it_understands_it(tmp_path: Path, family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")(num_hidden_layers=4)
    theirs.architectures = [f"{family.removesuffix('Text')}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    for name, their_name in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "norm_eps": "rms_norm_eps",
        "max_position": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(ours, name) == getattr(theirs, their_name)
    heads, head_dim = ours.attention["full"], theirs.hidden_size // theirs.num_attention_heads
    assert (heads.num_kv_heads, heads.head_dim) == (theirs.num_key_value_heads, getattr(theirs, "head_dim", head_dim))
    window = getattr(theirs, "sliding_window", None)
    assert {ours.attention[kind].window for kind in ours.layer_types} - {0} == ({window} if window else set())


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (LLAMA, {"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported are"),
        (LLAMA, {"architectures": None}, "architecture none is not supported"),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic is not supported"),
        (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type longrope is not supported"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": -1.0}}, "rope's factor must be given and above 0"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope's factor must be given"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial rotary"),
        (LLAMA, {"rope_interleaved": True}, "interleaved"),
        (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types other than"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": "big"}, "hidden_size must be a positive whole number, not 'big'"),
        (LLAMA, {"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        (LLAMA, {"head_dim": 7}, "head_dim must be even"),
        (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn is not supported"),
        (LLAMA, {"rms_norm_eps": "tiny"}, "a field has a value of the wrong kind"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers describes 1 layers, num_hidden_layers is 2"),
        (SMOLLM3, {"layer_types": ["sliding_attention"] * 2}, "layer_types other than full_attention"),
        (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit 10.0 is not supported; supported is 7.0"),
        (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints"),
        (LLAMA, {"quantization_config": {"quant_method": "mxfp4"}}, "quantized checkpoints"),
        (GEMMA, {"use_bidirectional_attention": True}, "bidirectional"),
        (GEMMA, {"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers 8"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 8}, "layer type chunked_attention is not supported"),
        (GEMMA, {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must name the layer types"),
        (
            GRANITE,
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "a token cannot have 5 experts: it chooses among 4",
        ),
        (GEMMA4, gemma4_text(use_bidirectional_attention="all"), "bidirectional"),
        (GEMMA4, gemma4_text(quantization_config={"quant_method": "fp8"}), "quantized checkpoints"),
        (GEMMA4, gemma4_text(vocab_size_per_layer_input=1000), "vocab_size_per_layer_input .1000. must not be below"),
        (GEMMA4, gemma4_text(num_kv_shared_layers=32), "leaves no full_attention layer"),
        (GEMMA4, gemma4_text(num_kv_shared_layers=-1), "num_kv_shared_layers must be a positive whole number, not -1"),
        (GEMMA4, gemma4_text(per_layer_config={"4": {"head_dim": 512}}), "must be the same for all full_attention"),
        (GEMMA4, gemma4_text(per_layer_config={"0": {"window": 1}}), "must be the same for all sliding_attention"),
        (GRANITE, {"layer_types": ["mamba", "conv", "mamba"]}, "layer type conv is not supported"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type alibi is not supported"),
        (GRANITE, {"mamba_n_heads": 40}, r"mamba_n_heads \(40\) times mamba_d_head \(32\) must be 1536"),
        (GRANITE, {"mamba_n_groups": 2}, "more than one group"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        (GRANITE, {"hidden_act": "gelu_pytorch_tanh"}, "Mamba layers need hidden_act silu"),
        (QWEN3_NEXT, {"hidden_act": "gelu_pytorch_tanh"}, "linear attention need hidden_act silu"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"] * 7}, "layer_types names 7 layers, num_hidden_layers 8"),
        (QWEN3_NEXT, {"layer_types": ["sliding_attention"] * 8}, "layer type sliding_attention is not supported"),
        (QWEN3_NEXT, {"linear_num_key_heads": 12}, r"32 value heads .* cannot share 12 key heads .* evenly"),
        (QWEN3_NEXT, {"partial_rotary_factor": 0.35}, "0.35 must rotate an even number of 256 dimensions"),
        (
            QWEN3_NEXT,
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope type yarn is not supported with partial_rotary_factor",
        ),
        (QWEN3_NEXT, {"num_experts": 8}, "a token cannot have 10 experts: it chooses among 8"),
        (QWEN3_5, {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints"),
        (QWEN3_5, {"text_config": {"num_hidden_layers": 2}}, "vocab_size is missing"),
        (QWEN3_5, {"text_config": ["x"]}, "a field has a value of the wrong kind"),
    ],
)
def test_what_we_do_not_compute_is_refused(
    tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, fields, **changes)


def test_an_unreadable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        read_config(tmp_path)


def test_reading_a_config_or_finding_a_model_imports_no_torch() -> None:
    code = "import sys, paceline.models.config, paceline.models.assets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_has_a_reader(tmp_path: Path, architecture: str) -> None:
    fields = {"architectures": [architecture], "num_local_experts": 8, "num_experts_per_tok": 2, "mamba_n_heads": 6}
    assert read(tmp_path, LLAMA, **fields).architecture == architecture


QWEN3_MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_qwen3_moe(tmp_path: Path, name: str) -> None:
    fields = {**QWEN3_MOE, name: QWEN3_MOE["num_experts"]}
    if name != "num_experts":
        del fields["num_experts"]
    experts = read(tmp_path, fields, norm_topk_prob=True).experts
    assert (experts.count, experts.inner_size, experts.shared_size) == (12, 24, 0)
    assert experts.routing == Routing(3, normalize=True)
    assert experts.dense_layers == {0, 2, 3, 4}
    assert not read(tmp_path, fields).experts.routing.normalize


def test_windows_of_models_with_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a sliding window .* is not supported for Qwen3MoeForCausalLM"):
        read(tmp_path, QWEN3_MOE, use_sliding_window=True)
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"]}
    assert read(tmp_path, mixtral).attention["full"].rope.theta == 1_000_000.0
    with pytest.raises(ModelError, match="a sliding_window is not supported for MixtralForCausalLM"):
        read(tmp_path, mixtral, sliding_window=4096)
