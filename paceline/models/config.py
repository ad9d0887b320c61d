"""The reader of Hugging Face's config.json. No other module knows the fields of an architecture. Imports no torch.

The gateway reads text settings (special tokens, end-of-generation tokens, chat templates) from the folder itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.models.model_config import Activation, LayerType, Mamba, ModelConfig, Rope

Json = Mapping[str, Any]


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a Hugging Face model folder.

    Raises:
        ModelError: config.json cannot be read, or describes a model that none of our model files computes.
    """
    raw = _read_json(folder / "config.json")
    architectures = raw.get("architectures") or ["none"]
    architecture = str(architectures[0])
    reader = _READERS.get(architecture)
    if reader is None:
        known = ", ".join(_READERS)
        raise ModelError(f"{folder}: architecture {architecture} is not supported; supported are: {known}")
    try:
        _refuse_unsupported(raw)
        config = reader(_Fields(raw, architecture))
        _check_shapes(config)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{folder / 'config.json'}: a field has a value of the wrong kind: {error}") from error
    return config


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of config.json, with checked accessors for the readers of architectures."""

    raw: Json
    architecture: str

    def get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise ModelError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{name} must be a positive whole number, not {value!r}")
        return value

    def common(self) -> dict[str, Any]:
        """Return the arguments of ModelConfig that all architectures read in the same way."""
        dtype = str(self.get("dtype", self.get("torch_dtype", "float32")))
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ModelError(f"dtype {dtype} is not supported; supported are: bfloat16, float16, float32")
        return {
            "architecture": self.architecture,
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size("intermediate_size"),
            "num_heads": self.size("num_attention_heads"),
            "norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "attention_bias": bool(self.get("attention_bias", False)),
            "dtype": dtype,
        }

    def activation(self, name: str, default: str) -> Activation:
        known: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
        value = self.get(name, default)
        if value not in known:
            raise ModelError(f"{name} {value!r} is not supported; supported are: {', '.join(known)}")
        return known[value]


def _llama(fields: _Fields) -> ModelConfig:
    full: LayerType = "full"
    heads = fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", fields.size("hidden_size") // heads)
    max_position = fields.size("max_position_embeddings", 2048)
    if any(kind != "full_attention" for kind in fields.get("layer_types", ())):
        raise ModelError("layer_types other than full_attention are not supported for LlamaForCausalLM")
    old_style = {"rope_theta": fields.raw.get("rope_theta"), **(fields.raw.get("rope_scaling") or {})}
    rope = _rope(fields.get("rope_parameters", old_style), fields.get("rope_theta", 10_000.0), max_position)
    return ModelConfig(
        **fields.common(),
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        activation=fields.activation("hidden_act", "silu"),
        layer_types=(full,) * fields.size("num_hidden_layers"),
        sliding_window=0,
        rope=rope,
        sliding_rope=rope,
        attention_scale=head_dim**-0.5,
        attention_softcap=0.0,
        logit_softcap=0.0,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position=max_position,
    )


def _gemma3(fields: _Fields) -> ModelConfig:
    layer_types = _gemma3_layer_types(fields)
    max_position = fields.size("max_position_embeddings", 131_072)
    old_style = {
        "full_attention": {"rope_theta": fields.raw.get("rope_theta"), **(fields.raw.get("rope_scaling") or {})},
        "sliding_attention": {"rope_theta": fields.raw.get("rope_local_base_freq")},
    }
    ropes = fields.get("rope_parameters", old_style)
    if not set(ropes) <= set(old_style):
        raise ModelError(f"rope_parameters must name the layer types {', '.join(old_style)}, not {', '.join(ropes)}")
    return ModelConfig(
        **fields.common(),
        num_kv_heads=fields.size("num_key_value_heads", 4),
        head_dim=fields.size("head_dim", 256),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        layer_types=layer_types,
        sliding_window=fields.size("sliding_window", 4096) if "sliding" in layer_types else 0,
        rope=_rope(ropes.get("full_attention") or {}, 1_000_000.0, max_position),
        sliding_rope=_rope(ropes.get("sliding_attention") or {}, 10_000.0, max_position),
        attention_scale=float(fields.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=float(fields.get("attn_logit_softcapping", 0.0)),
        logit_softcap=float(fields.get("final_logit_softcapping", 0.0)),
        mlp_bias=False,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", True)),
        max_position=max_position,
    )


def _granite_hybrid(fields: _Fields) -> ModelConfig:
    if int(fields.get("num_local_experts", 8)) > 0:
        raise ModelError("experts (num_local_experts) are not supported; choose a model with a dense MLP")
    known: dict[str, LayerType] = {
        "full_attention": "full",
        "attention": "full",
        "linear_attention": "mamba",
        "mamba": "mamba",
    }
    layers, heads = fields.size("num_hidden_layers"), fields.size("num_attention_heads")
    names = fields.get("layer_types", fields.get("layers_block_type", ["mamba"] * layers))
    position = fields.get("position_embedding_type", "nope")
    if position not in ("nope", "rope"):
        raise ModelError(f"position_embedding_type {position} is not supported; supported are: nope, rope")
    max_position = fields.size("max_position_embeddings", 2048)
    old_style = {"rope_theta": fields.raw.get("rope_theta"), **(fields.raw.get("rope_scaling") or {})}
    rope = _rope(fields.get("rope_parameters", old_style), 10_000.0, max_position)
    return ModelConfig(
        **{**fields.common(), "intermediate_size": fields.size("shared_intermediate_size", 1024)},
        num_kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", fields.size("hidden_size") // heads),
        activation=fields.activation("hidden_act", "silu"),
        layer_types=_layer_types(names, known, layers),
        sliding_window=0,
        rope=rope,
        sliding_rope=rope,
        attention_scale=float(fields.get("attention_multiplier", 1.0)),
        attention_softcap=0.0,
        logit_softcap=0.0,
        mlp_bias=False,
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_position=max_position,
        mamba=_mamba(fields),
        rotates=position == "rope",
        embedding_multiplier=float(fields.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(fields.get("residual_multiplier", 1.0)),
        logits_divisor=float(fields.get("logits_scaling", 1.0)),
    )


def _mamba(fields: _Fields) -> Mamba:
    heads, inner = fields.size("mamba_n_heads", 128), fields.size("mamba_expand", 2) * fields.size("hidden_size")
    automatic = fields.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // heads if automatic else fields.size("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"mamba_n_heads ({heads}) times mamba_d_head ({head_dim}) must be {inner}")
    if fields.size("mamba_n_groups", 1) != 1:
        raise ModelError("Mamba heads in more than one group (mamba_n_groups) are not supported")
    least, most = fields.get("time_step_limit", (0.0, math.inf))
    if isinstance(most, Mapping):  # how transformers writes numbers that JSON cannot, such as Infinity
        most = float(most.get("__float__", 0.0))
    if (least, most) != (0.0, math.inf):
        raise ModelError("limits of Mamba's time steps (time_step_limit) are not supported")
    if fields.activation("hidden_act", "silu") != "silu":
        raise ModelError("Mamba layers need hidden_act silu")
    return Mamba(
        heads=heads,
        head_dim=head_dim,
        state_size=fields.size("mamba_d_state", 256),
        conv_taps=fields.size("mamba_d_conv", 4),
        conv_bias=bool(fields.get("mamba_conv_bias", True)),
        bias=bool(fields.get("mamba_proj_bias", False)),
    )


# An architecture is one line here and one in registry.py.
_READERS: Mapping[str, Callable[[_Fields], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "Gemma3ForCausalLM": _gemma3,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
}


def _gemma3_layer_types(fields: _Fields) -> tuple[LayerType, ...]:
    layers = fields.size("num_hidden_layers")
    names = fields.raw.get("layer_types")
    if names is None:
        # Before transformers 5, this is the distance between layers with full attention.
        pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", 6))
        return tuple("sliding" if (layer + 1) % pattern else "full" for layer in range(layers))
    return _layer_types(names, {"full_attention": "full", "sliding_attention": "sliding"}, layers)


def _layer_types(names: Sequence[str], known: Mapping[str, LayerType], layers: int) -> tuple[LayerType, ...]:
    unknown = sorted({str(name) for name in names} - set(known))
    if unknown:
        raise ModelError(f"layer type {unknown[0]} is not supported; supported are: {', '.join(known)}")
    if len(names) != layers:
        raise ModelError(f"layer_types names {len(names)} layers, num_hidden_layers {layers}")
    return tuple(known[name] for name in names)


def _rope(parameters: Json, default_theta: float, max_position: int) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of transformers 4 in one dict."""
    theta = float(parameters.get("rope_theta") or default_theta)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("a partial rotary embedding (partial_rotary_factor) is not supported")
    if kind == "default":
        return Rope(theta)
    if kind not in ("linear", "llama3"):
        raise ModelError(f"rope type {kind} is not supported; supported are: default, linear, llama3")
    factor = _factor(parameters, "factor")
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = _factor(parameters, "low_freq_factor"), _factor(parameters, "high_freq_factor")
    if high <= low:
        raise ModelError(f"rope's high_freq_factor ({high}) must be above its low_freq_factor ({low})")
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    return Rope(theta, "llama3", factor, low, high, original)


def _factor(parameters: Json, name: str) -> float:
    value = float(parameters.get(name) or 0.0)
    if value <= 0:
        raise ModelError(f"rope's {name} must be given and above 0")
    return value


def _refuse_unsupported(raw: Json) -> None:
    if raw.get("quantization_config"):
        raise ModelError("quantized checkpoints are not supported; use the bf16 one")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("bidirectional attention is not supported")
    if raw.get("rope_interleaved"):
        raise ModelError("an interleaved rotary embedding is not supported")
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("a partial rotary embedding (partial_rotary_factor) is not supported")


def _check_shapes(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"head_dim must be even for the rotary embedding, not {config.head_dim}")


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content
