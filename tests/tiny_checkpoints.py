"""Tiny checkpoints with random weights, and the `transformers` models that are their references."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

SaveTiny = Callable[..., transformers.PreTrainedModel]

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
    "pad_token_id": None,
}
_DELTA: dict[str, object] = {
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
_GRANITE: dict[str, object] = {
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.25,
}
_GRANITE_EXPERTS: dict[str, object] = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 4}
_MAMBA: dict[str, object] = {
    "shared_intermediate_size": 80,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 20,
    "mamba_chunk_size": 16,
}
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

DIVIDED: dict[str, object] = {
    "num_hidden_layers": 10,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 5,
}
"""A Gemma 3 whose sliding layers have two KV groups, because they cache nine times as much as the other layers."""

FAMILIES: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 20,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5Text", _DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_DELTA, **_DELTA_EXPERTS}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "ministral": (
        "Ministral",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 5}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gemma3": (
        "Gemma3Text",
        {
            "vocab_size": 103,
            "hidden_size": 40,
            "intermediate_size": 72,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 19,
            "sliding_window": 20,
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, **GEMMA4_KINDS["edge"]}),
    "gemma4_dense": ("Gemma4Text", {**GEMMA4, **GEMMA4_KINDS["dense"]}),
    "gemma4_experts": ("Gemma4Text", {**GEMMA4, **GEMMA4_KINDS["experts"]}),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "head_dim": 12,
            "sliding_window": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    "granite_moe": ("GraniteMoe", {**_GRANITE, **_GRANITE_EXPERTS}),
    "granite_hybrid": ("GraniteMoeHybrid", {**_GRANITE, **_MAMBA, "num_local_experts": 0}),
    "granite_hybrid_moe": ("GraniteMoeHybrid", {**_GRANITE, **_MAMBA, **_GRANITE_EXPERTS}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "n_group": 4, "topk_group": 2, "q_lora_rank": 28}),
}
"""The name of each architecture's configuration in transformers, without "Config", and the fields of a tiny one."""


QWEN3_VL_TOKENS = (95, 96, 97, 98)
"""Tokens of a tiny Qwen 3-VL: placeholders of images and videos, and those before and after a run of them."""


def write_tiny(
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    head: str = "ForCausalLM",
    **changes: object,
) -> transformers.PreTrainedModel:
    """Save a tiny random model of one of FAMILIES to a folder and return the `transformers` model.

    Args:
        head: end of the name of the architecture, such as "Model" or "ForSequenceClassification".
        changes: fields of its configuration.
    """
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **own, **changes})
    stem = name.removesuffix("Text") if head == "ForCausalLM" else name
    return _save(getattr(transformers, f"{stem}{head}"), config, folder, dtype, max_shard_size)


def _fixture(family: str) -> Callable[[Path], SaveTiny]:
    """Return a fixture that saves a tiny random model of this family to tmp_path; see `write_tiny`."""

    @pytest.fixture(name=f"save_{family}")
    def save(tmp_path: Path) -> SaveTiny:
        return functools.partial(write_tiny, tmp_path, family)

    return save


globals().update({f"save_{family}": _fixture(family) for family in FAMILIES})


_QWEN_TOKEN_NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def write_qwen3_5_with_vision(
    folder: Path, experts: bool = False, tie_word_embeddings: bool = False, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Qwen 3.5 with an encoder of images to a folder and return the `transformers` model.

    A placeholder is never the best token, because the reference would take it for an image.
    """
    family = "qwen3_5_moe" if experts else "qwen3_5"
    name, own = FAMILIES[family][0].removesuffix("Text"), FAMILIES[family][1]
    encoder = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}
    config = getattr(transformers, f"{name}Config")(
        text_config={**_SMALL, **own, "rope_parameters": rope, **changes},
        vision_config=encoder,
        tie_word_embeddings=tie_word_embeddings,
        **dict(zip(_QWEN_TOKEN_NAMES, QWEN3_VL_TOKENS)),
    )
    model = _save(getattr(transformers, f"{name}ForConditionalGeneration"), config, folder)
    if not tie_word_embeddings:
        with torch.no_grad():
            model.lm_head.weight[list(QWEN3_VL_TOKENS[:2])] = 0
        model.save_pretrained(folder)
    return model


def write_qwen3_vl(folder: Path, experts: bool = False, **changes: object) -> transformers.PreTrainedModel:
    """Save a tiny random Qwen 3-VL to a folder and return the `transformers` model.

    A placeholder is never the best token, because the reference would take it for an image.

    Args:
        changes: fields of its text model.
    """
    name = f"Qwen3VL{'Moe' if experts else ''}"
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 2, 2], "mrope_interleaved": True}
    own = {**_SMALL, **FAMILIES["qwen3_moe" if experts else "qwen3"][1], "head_dim": 20, "rope_parameters": rope}
    vision = {
        "depth": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    }
    config = getattr(transformers, f"{name}Config")(
        text_config={**own, **changes}, vision_config=vision, **dict(zip(_QWEN_TOKEN_NAMES, QWEN3_VL_TOKENS))
    )
    model = _save(getattr(transformers, f"{name}ForConditionalGeneration"), config, folder)
    with torch.no_grad():
        model.lm_head.weight[list(QWEN3_VL_TOKENS[:2])] = 0
    model.save_pretrained(folder)
    return model


def write_gemma3_with_vision(folder: Path, **changes: object) -> transformers.PreTrainedModel:
    """Save a tiny random Gemma 3 with an encoder of images to a folder and return the `transformers` model."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**_SMALL, **FAMILIES["gemma3"][1], **changes}
    # Squares of 2 x 2 patches become one row of an encoding.
    vision |= {"image_size": 56, "patch_size": 14, "vision_use_head": False}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return _save(transformers.Gemma3ForConditionalGeneration, config, folder)


def write_mistral3_with_vision(folder: Path, family: str, **changes: object) -> transformers.PreTrainedModel:
    """Save a tiny random Mistral 3 with an encoder of images to a folder and return the `transformers` model.

    Args:
        family: of the text model, "mistral" or "ministral3".
    """
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**_SMALL, "model_type": family, **FAMILIES[family][1], **changes}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**vision, "model_type": "pixtral", "image_size": 28, "patch_size": 14}
    )
    return _save(transformers.Mistral3ForConditionalGeneration, config, folder)


def write_llava(
    folder: Path,
    vision: str = "clip",
    vision_feature_select_strategy: str = "default",
    image_token: int = 90,
    **changes: object,
) -> transformers.PreTrainedModel:
    """Save a tiny random LLaVA and the settings of its processor to a folder, and return the `transformers` model.

    Args:
        vision: "clip" or "siglip". The latter has no row for the whole image, so it needs the strategy "full".
        image_token: id of the placeholder.
        changes: fields of its text model, which is a Llama.
    """
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower |= {"model_type": f"{vision}_vision_model", "image_size": 28, "patch_size": 7}
    if vision == "siglip":
        tower["vision_use_head"] = False
    config = transformers.LlavaConfig(
        text_config={**_SMALL, "model_type": "llama", **FAMILIES["llama"][1], **changes},
        vision_config=tower,
        image_token_index=image_token,
        vision_feature_select_strategy=vision_feature_select_strategy,
    )
    square = {"height": 28, "width": 28}
    image = {"resample": 3, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    image |= {"size": {"shortest_edge": 28}, "crop_size": square} if vision == "clip" else {"size": square}
    processor = {
        "patch_size": 7,
        "num_additional_image_tokens": int(vision == "clip"),
        "vision_feature_select_strategy": vision_feature_select_strategy,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return _save(transformers.LlavaForConditionalGeneration, config, folder)


def write_gemma4_with_media(
    folder: Path, kind: str, max_shard_size: str = "1GB", audio_features: int = 8, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random Gemma 4 for text and media to a folder and return the `transformers` model.

    As in the released sizes, "edge" has audio and bounds of linear layers, and other kinds standardize rows of images.
    """
    tower = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "use_clipped_linears": kind == "edge"}
    vision = {
        **tower,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "position_embedding_size": 30,
        "standardize": kind != "edge",
    }
    audio = {**tower, "subsampling_conv_channels": [audio_features, 4], "output_proj_dims": 20}
    config = transformers.Gemma4Config(
        text_config={**GEMMA4, **GEMMA4_KINDS[kind], **changes},
        vision_config=vision,
        audio_config=audio if kind == "edge" else None,
    )
    return _save(transformers.Gemma4ForConditionalGeneration, config, folder, max_shard_size=max_shard_size)


def write_gemma4_unified(folder: Path, **changes: object) -> transformers.PreTrainedModel:
    """Save a tiny random unified Gemma 4 to a folder and return the `transformers` model."""
    text = {**GEMMA4, **GEMMA4_KINDS["dense"], **changes}
    del text["hidden_size_per_layer_input"]
    vision = {"patch_size": 4, "mm_embed_dim": 20, "mm_posemb_size": 8, "output_proj_dims": 20}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}
    )
    return _save(transformers.Gemma4UnifiedForConditionalGeneration, config, folder)


def write_gemma4_assistant(
    folder: Path, target_size: int = 40, unified: bool = False, centroids: bool = False, **changes: object
) -> transformers.PreTrainedModel:
    """Save a tiny random assistant of a GEMMA4 to a folder and return the `transformers` model.

    Args:
        target_size: size of the target's hidden states.
        centroids: whether only tokens of chosen centroids have logits.
        changes: fields of its text model.
    """
    name, layers = f"Gemma4{'Unified' if unified else ''}", ["sliding_attention"] * 2 + ["full_attention"]
    own = {"hidden_size": 24, "num_hidden_layers": 3, "layer_types": layers, "hidden_size_per_layer_input": 0}
    text = getattr(transformers, f"{name}TextConfig")(**{**GEMMA4, **own, "vocab_size_per_layer_input": 0, **changes})
    config = getattr(transformers, f"{name}AssistantConfig")(
        text_config=text,
        backbone_hidden_size=target_size,
        use_ordered_embeddings=centroids,
        num_centroids=13,
        centroid_intermediate_top_k=4,
    )
    # transformers 5.23 refuses a model whose layers all read others' keys and values, also if it is an assistant.
    with mock.patch.object(type(text), "kv_sharing_modes", ["reuse"] * 3):
        return _save(getattr(transformers, f"{name}AssistantForCausalLM"), config, folder)


def _save(
    architecture: type[transformers.PreTrainedModel],
    config: transformers.PretrainedConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> transformers.PreTrainedModel:
    # The same weights in every run, so that no run meets two logits that are nearly equal when others did not.
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = architecture(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that every term changes the logits. Norms and biases, too, differ from their initial values.
            scale = 0.2 if parameter.dim() == 1 else max(1, parameter.shape[-1]) ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.2)
            if name.endswith(("std_bias", "std_scale")):
                buffer.add_(torch.randn(buffer.shape, generator=generator))
            if name.endswith(("_min", "_max")):
                # Bounds of linear layers, of which each reaches some elements.
                buffer.copy_((0.5 + torch.rand((), generator=generator)) * (1 if name.endswith("_max") else -1))
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
