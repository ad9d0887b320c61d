"""Fields of config.json of published models, shortened, and a reader for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.models.config import read_config
from paceline.models.model_config import Rope

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
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5_000_000,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "tie_word_embeddings": True,
}
"""As Qwen3-VL-2B."""
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5, "truncate": False}
YARN_ROPE = Rope(5e5, "yarn", 4.0, original_max_position=64, truncate=False, attention_factor=1.5)
LLAMA3_ROPE = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 64)
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "max_window_layers": 1}
GPT_OSS = {**LLAMA, "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3, "num_local_experts": 32}
del GPT_OSS["torch_dtype"]  # published ones do not have it
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


def read(folder: Path, fields: dict[str, Any], **changes: Any) -> Any:
    """Write a config.json to a folder and read it."""
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))
    return read_config(folder)


def gemma4_text(**changes: Any) -> dict[str, Any]:
    return {"text_config": {**GEMMA4["text_config"], **changes}}
