"""Tiny checkpoints with random weights, and the `transformers` models that are their references."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

SaveTiny = Callable[..., transformers.PreTrainedModel]


@pytest.fixture
def save_llama(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Llama to tmp_path and return the `transformers` model."""

    return functools.partial(write_llama, tmp_path)


def write_llama(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Llama to a folder and return the `transformers` model."""
    fields: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.LlamaConfig(**{**fields, **changes})
    return _save(transformers.LlamaForCausalLM, config, folder, max_shard_size, dtype)


DIVIDED: dict[str, object] = {
    "num_hidden_layers": 10,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 5,
}
"""A Gemma 3 whose sliding layers have two KV groups, because they cache nine times as much as the other layers."""


@pytest.fixture
def save_gemma3(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Gemma 3 to tmp_path and return the `transformers` model."""

    return functools.partial(write_gemma3, tmp_path)


def write_gemma3(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Gemma 3 with a window of 20 tokens to a folder and return the `transformers` model."""
    fields: dict[str, object] = {
        "vocab_size": 103,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "query_pre_attn_scalar": 19,
        "sliding_window": 20,
        "max_position_embeddings": 4096,
    }
    config = transformers.Gemma3TextConfig(**{**fields, **changes})
    return _save(transformers.Gemma3ForCausalLM, config, folder, max_shard_size, dtype)


@pytest.fixture
def save_granite_hybrid(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Granite hybrid to tmp_path and return the `transformers` model."""

    return functools.partial(write_granite_hybrid, tmp_path)


def write_granite_hybrid(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Granite hybrid (Mamba-2 and attention) to a folder and return the `transformers` model."""
    fields: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": 48,
        "shared_intermediate_size": 80,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_local_experts": 0,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mamba_n_heads": 4,
        "mamba_d_state": 20,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.25,
    }
    config = transformers.GraniteMoeHybridConfig(**{**fields, **changes})
    return _save(transformers.GraniteMoeHybridForCausalLM, config, folder, max_shard_size, dtype)


@pytest.fixture
def save_qwen3_moe(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Qwen 3 with experts to tmp_path and return the `transformers` model."""

    def save(max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object) -> object:
        fields: dict[str, object] = {
            **_SMALL,
            "head_dim": 20,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        }
        config = transformers.Qwen3MoeConfig(**{**fields, **changes})
        return _save(transformers.Qwen3MoeForCausalLM, config, tmp_path, max_shard_size, dtype)

    return save


@pytest.fixture
def save_mixtral(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Mixtral to tmp_path and return the `transformers` model."""

    def save(max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object) -> object:
        fields = {**_SMALL, "intermediate_size": 24, "num_local_experts": 5}
        config = transformers.MixtralConfig(**{**fields, **changes})
        return _save(transformers.MixtralForCausalLM, config, tmp_path, max_shard_size, dtype)

    return save


@pytest.fixture
def save_granite_moe(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Granite 3 with experts to tmp_path and return the `transformers` model."""

    def save(max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object) -> object:
        fields: dict[str, object] = {
            **_SMALL,
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.25,
        }
        config = transformers.GraniteMoeConfig(**{**fields, **changes})
        return _save(transformers.GraniteMoeForCausalLM, config, tmp_path, max_shard_size, dtype)

    return save


@pytest.fixture
def save_deepseek_v2(tmp_path: Path) -> SaveTiny:
    """Save a tiny random DeepSeek V2 to tmp_path and return the `transformers` model."""

    return functools.partial(write_deepseek_v2, tmp_path)


def write_deepseek_v2(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random DeepSeek V2 to a folder and return the `transformers` model."""
    fields: dict[str, object] = {**_SMALL, **_LATENT, "q_lora_rank": None, "n_shared_experts": 2}
    config = transformers.DeepseekV2Config(**{**fields, **changes})
    return _save(transformers.DeepseekV2ForCausalLM, config, folder, max_shard_size, dtype)


@pytest.fixture
def save_deepseek_v3(tmp_path: Path) -> SaveTiny:
    """Save a tiny random DeepSeek V3 to tmp_path and return the `transformers` model."""

    return functools.partial(write_deepseek_v3, tmp_path)


def write_deepseek_v3(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random DeepSeek V3 to a folder and return the `transformers` model."""
    fields: dict[str, object] = {**_SMALL, **_LATENT, "n_group": 4, "topk_group": 2, "q_lora_rank": 28}
    config = transformers.DeepseekV3Config(**{**fields, **changes})
    return _save(transformers.DeepseekV3ForCausalLM, config, folder, max_shard_size, dtype)


_LATENT: dict[str, object] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 24,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}


@pytest.fixture
def save_qwen3_next(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Qwen3-Next with experts to tmp_path and return the `transformers` model."""

    return functools.partial(write_qwen3_next, tmp_path)


def write_qwen3_next(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Qwen3-Next with experts in most layers to a folder and return the `transformers` model."""
    config = transformers.Qwen3NextConfig(**{**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1], **changes})
    return _save(transformers.Qwen3NextForCausalLM, config, folder, max_shard_size, dtype)


@pytest.fixture
def save_qwen3_5(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Qwen 3.5 to tmp_path and return the `transformers` model."""

    return functools.partial(write_qwen3_5, tmp_path)


def write_qwen3_5(
    folder: Path,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    experts: bool = False,
    vision: bool = False,
    **changes: object,
) -> transformers.PreTrainedModel:
    """Save a tiny random Qwen 3.5 to a folder, with experts or an encoder of images if wanted. Return the
    `transformers` model."""
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    text = {**_DELTA, **(_DELTA_EXPERTS if experts else {}), **changes}
    if not vision:
        config = getattr(transformers, f"{name}TextConfig")(**text)
        return _save(getattr(transformers, f"{name}ForCausalLM"), config, folder, max_shard_size, dtype)
    encoder = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    tied = bool(text.pop("tie_word_embeddings", False))
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=encoder, tie_word_embeddings=tied)
    return _save(getattr(transformers, f"{name}ForConditionalGeneration"), config, folder, max_shard_size, dtype)


_SMALL: dict[str, object] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_DELTA: dict[str, object] = {
    **_SMALL,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_DELTA_EXPERTS: dict[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}


GEMMA4 = {
    "vocab_size": 103,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "final_logit_softcapping": 3.0,
    "max_position_embeddings": 4096,
}
"""The text of a small Gemma 4."""
GEMMA4_KINDS: dict[str, dict[str, object]] = {
    # As in 12B and 31B: full layers have fewer KV heads, and make values of the projection to keys.
    "dense": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    # As in E2B: the last layers read the KV of others and have wider MLPs.
    "edge": {
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 103,
    },
    # As in 26B.
    "experts": {
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}


@pytest.fixture
def save_gemma4(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Gemma 4 of the kind "edge" to tmp_path and return the `transformers` model."""
    return functools.partial(write_gemma4, tmp_path, "edge")


@pytest.fixture
def save_gemma4_dense(tmp_path: Path) -> SaveTiny:
    """Save a tiny random Gemma 4 of the kind "dense" to tmp_path and return the `transformers` model."""
    return functools.partial(write_gemma4, tmp_path, "dense")


def write_gemma4(
    folder: Path, kind: str, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Gemma 4 of one of GEMMA4_KINDS to a folder and return the `transformers` model."""
    config = transformers.Gemma4TextConfig(**{**GEMMA4, **GEMMA4_KINDS[kind], **changes})
    return _save(transformers.Gemma4ForCausalLM, config, folder, max_shard_size, dtype)


def write_gemma4_with_media(
    folder: Path, kind: str, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Gemma 4 for text, images and audio to a folder and return the `transformers` model."""
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {**tower, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 16, "position_embedding_size": 9}
    audio = {**tower, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16}
    config = transformers.Gemma4Config(
        text_config={**GEMMA4, **GEMMA4_KINDS[kind], **changes}, vision_config=vision, audio_config=audio
    )
    return _save(transformers.Gemma4ForConditionalGeneration, config, folder, max_shard_size, dtype)


def write_gemma4_unified(
    folder: Path, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random unified Gemma 4 to a folder and return the `transformers` model."""
    text = {**GEMMA4, **GEMMA4_KINDS["dense"], **changes}
    del text["hidden_size_per_layer_input"]
    vision = {"mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}
    )
    return _save(transformers.Gemma4UnifiedForConditionalGeneration, config, folder, max_shard_size, dtype)


def _save(
    architecture: type[transformers.PreTrainedModel],
    config: transformers.PretrainedConfig,
    folder: Path,
    max_shard_size: str,
    dtype: torch.dtype,
) -> transformers.PreTrainedModel:
    # The same weights in every run, so that no run meets two logits that are nearly equal when others did not.
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = architecture(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that every term changes the logits. Norms and biases, too, differ from their initial values.
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def _saver(name: str, **own: object) -> Callable[[Path], SaveTiny]:
    """Return a fixture that saves a tiny random `name`ForCausalLM of transformers to tmp_path, with these fields."""

    @pytest.fixture
    def save(tmp_path: Path) -> SaveTiny:
        return functools.partial(write_tiny, tmp_path, name, own)

    return save


def write_tiny(
    folder: Path, name: str, own: dict[str, object], dtype: torch.dtype = torch.float32, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random model to a folder and return the `transformers` model.

    Args:
        name: name of its class in transformers, without "ForCausalLM".
        own, changes: fields of its configuration.
    """
    config = getattr(transformers, f"{name}Config")(
        **{**_SMALL, "num_hidden_layers": 4, "pad_token_id": None, **own, **changes}
    )
    return _save(getattr(transformers, f"{name}ForCausalLM"), config, folder, "1GB", dtype)


save_qwen2 = _saver("Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=2)
save_qwen3 = _saver("Qwen3", head_dim=12)
save_mistral = _saver("Mistral", sliding_window=20)
save_ministral = _saver(
    "Ministral", head_dim=12, sliding_window=20, layer_types=["full_attention", "sliding_attention"] * 2
)
save_ministral3 = _saver(
    "Ministral3",
    head_dim=12,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.3,
    },
)
save_smollm3 = _saver("SmolLM3", no_rope_layer_interval=2)
save_gpt_oss = _saver(
    "GptOss",
    head_dim=12,
    sliding_window=20,
    num_local_experts=5,
    num_experts_per_tok=2,
    intermediate_size=24,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
)
