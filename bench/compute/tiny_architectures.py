"""Tiny random checkpoints of the causal language models in `transformers`, made from one table of sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = (
    *("llama", "gemma", "gemma2", "gemma3_text", "gemma4_text", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mistral"),
    *("mixtral", "ministral", "phi", "phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmoe", "stablelm", "starcoder2"),
    *("gpt_neox", "gpt2", "gpt_bigcode", "gptj", "gpt_oss", "opt", "bloom", "falcon", "falcon_h1", "cohere", "cohere2"),
    *("glm", "glm4", "glm4_moe", "granite", "granitemoe", "granitemoehybrid", "nemotron", "nemotron_h", "smollm3"),
    *("exaone4", "helium", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "seed_oss", "apertus", "arcee", "persimmon"),
    *("deepseek_v2", "deepseek_v3", "bamba", "jamba", "mamba2", "recurrent_gemma", "rwkv", "lfm2", "llama4_text"),
    *("mpt", "biogpt", "ctrl", "bert", "t5", "whisper"),
)
"""Model types of the table: most decoders that people serve, and some that cannot be served."""

SIZES: Mapping[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 20,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_num_experts": 4,
    "moe_k": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Values of fields that a config has; a config without the field does not get it."""

_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}

OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4},
    "deepseek_v2": {**_LATENT, **_NO_GROUPS, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
    "deepseek_v3": {**_LATENT, **_NO_GROUPS, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
    "dots1": {**_NO_GROUPS, "first_k_dense_replace": 1},
    "exaone4": {"sliding_window_pattern": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "ffn_hidden_size": 96},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
    },
    "glm4_moe": {**_NO_GROUPS, "first_k_dense_replace": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 20},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "shared_intermediate_size": 96,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
    "jetmoe": {"kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"attention_chunk_size": 32, "intermediate_size_mlp": 96},
    "longcat_flash": {**_LATENT, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "zero_expert_num": 2},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "mixtral": {"sliding_window": None},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512},
    "nemotron_h": {"hybrid_override_pattern": "M*-*", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "openai-gpt": {"n_positions": 512},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 20, "lru_width": 64},
    "rwkv": {"attention_hidden_size": 64, "context_length": 512},
    "smollm3": {"no_rope_layer_interval": 2},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
}
"""Sizes that one family names in its own way, or needs besides."""


def tiny_config(family: str, **changes: Any) -> Any:
    """Return the config of a tiny model of a family, which is named as its `model_type`."""
    kind = transformers.CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return kind(**{**sizes, **OWN_SIZES.get(family, {}), **changes})


def save_tiny(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a tiny random model of a family to a folder. Return the `transformers` model.

    Args:
        changes: fields of the config.
    """
    config = tiny_config(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:  # no decoder
            model = transformers.AutoModel.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Large enough that every term changes the logits. Norms and biases, too, differ from initial values.
                scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter.add_(torch.randn(parameter.shape) * scale)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model
