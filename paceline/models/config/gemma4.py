"""The config.json of the text models of Gemma 4, alone or as a part of a model for several media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.experts import Routing
from paceline.models.config.fields import LAYER_TYPES, Fields, read_factor, read_layer_types, read_rope
from paceline.models.model_config import AttentionConfig, Experts, Gemma4Config, LayerType, ModelConfig, Rope

_NAMES: Mapping[LayerType, str] = {kind: name for name, kind in LAYER_TYPES.items()}
_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_theta": 10_000.0},
}


def gemma4(fields: Fields) -> ModelConfig:
    looks_ahead = _looks_ahead(fields)
    fields = fields.text_part()
    layer_types = _layer_types(fields)
    max_position = fields.size("max_position_embeddings", 131_072)
    sources = _kv_sources(fields, layer_types)
    common = fields.common()
    widening = 2 if fields.get("use_double_wide_mlp", False) else 1
    input_size = fields.count("hidden_size_per_layer_input", 0 if "Unified" in fields.architecture else 256)
    input_vocab_size = fields.size("vocab_size_per_layer_input", 262_144) if input_size else 0
    if input_size and input_vocab_size < common["vocab_size"]:
        raise ModelError(
            f"vocab_size_per_layer_input ({input_vocab_size}) must not be below vocab_size ({common['vocab_size']})"
        )
    return ModelConfig(
        **common,
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        layer_types=layer_types,
        attention={
            kind: _attention(fields, kind, layer_types, max_position, looks_ahead) for kind in sorted(set(layer_types))
        },
        gemma4=Gemma4Config(
            values_from_keys=("full",) if fields.get("attention_k_eq_v", False) else (),
            reader_intermediate_size=common["intermediate_size"] * widening,
            layer_input_size=input_size,
            layer_input_vocab_size=input_vocab_size,
        ),
        experts=_experts(fields) if fields.get("enable_moe_block", False) else None,
        kv_sources=sources,
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        max_position=max_position,
    )


def _experts(fields: Fields) -> Experts:
    return Experts(
        count=fields.size("num_experts"),
        inner_size=fields.size("moe_intermediate_size"),
        routing=Routing(fields.size("top_k_experts"), normalize=True),
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
    )


def _layer_types(fields: Fields) -> tuple[LayerType, ...]:
    layers = fields.size("num_hidden_layers")
    default = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)]
    names = fields.get("layer_types", default)
    # transformers gives the last layer full attention, whatever the config says.
    return (*read_layer_types(names, LAYER_TYPES, layers)[:-1], "full")


def _kv_sources(fields: Fields, layer_types: Sequence[LayerType]) -> dict[int, int]:
    """Return, for each layer at the end that has no KV, the layer whose KV it reads: the last of its type with KV."""
    first = len(layer_types) - fields.count("num_kv_shared_layers", 0)
    last = {kind: layer for layer, kind in enumerate(layer_types[: max(first, 0)])}
    if missing := set(layer_types) - set(last):
        raise ModelError(
            f"num_kv_shared_layers leaves no {_NAMES[missing.pop()]} layer whose keys and values others can read"
        )
    return {layer: last[layer_types[layer]] for layer in range(first, len(layer_types))}


def _looks_ahead(fields: Fields) -> bool:
    """Return whether tokens of an image attend to each other in sliding layers."""
    text = fields.raw.get("text_config") or fields.raw
    default = "vision" if "Unified" in fields.architecture else None
    return bool(text.get("use_bidirectional_attention", default) == "vision")


def _attention(
    fields: Fields, kind: LayerType, layer_types: Sequence[LayerType], max_position: int, looks_ahead: bool
) -> AttentionConfig:
    kind_fields = _fields_of(fields, kind, layer_types)
    ropes = fields.get("rope_parameters", _ROPES)
    if not set(ropes) <= set(LAYER_TYPES):
        raise ModelError(f"rope_parameters must name the layer types {', '.join(LAYER_TYPES)}, not {', '.join(ropes)}")
    rope = ropes.get(_NAMES[kind]) or _ROPES[_NAMES[kind]]
    head_dim = kind_fields.size("head_dim", 256)
    bias = fields.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=kind_fields.size("num_key_value_heads", 4),
        head_dim=head_dim,
        scale=1.0,
        rope=_rope(rope, head_dim, max_position),
        window=fields.size("sliding_window", 512) if kind == "sliding" else 0,
        bias=bias,
        output_bias=bias,
        looks_ahead=looks_ahead and kind == "sliding",
    )


def _fields_of(fields: Fields, kind: LayerType, layer_types: Sequence[LayerType]) -> Fields:
    """Return the fields of one type of layer, in the style of transformers or of the released checkpoints."""
    listed = fields.raw.get("per_layer_config")
    if listed is None:
        changes: dict[str, Any] = {}
        if kind == "full":
            changes["head_dim"] = fields.size("global_head_dim", 512)
            if fields.get("attention_k_eq_v", False):
                changes["num_key_value_heads"] = fields.raw.get("num_global_key_value_heads")
        changes = {name: value for name, value in changes.items() if value is not None}
        return fields.changed(**changes)
    # transformers writes the numbers of layers with as many digits as the largest one has.
    by_layer = {int(layer): changes for layer, changes in listed.items()}
    each = [dict(by_layer.get(layer) or {}) for layer, layer_type in enumerate(layer_types) if layer_type == kind]
    if any(number != each[0] for number in each):
        raise ModelError(f"per_layer_config must be the same for all {_NAMES[kind]} layers")
    if unknown := sorted(set(each[0]) - {"head_dim", "num_key_value_heads"}):
        raise ModelError(f"per_layer_config must not change {', '.join(unknown)}")
    return fields.changed(**each[0])


def _rope(parameters: Mapping[str, Any], head_dim: int, max_position: int) -> Rope:
    if parameters.get("rope_type") != "proportional":
        return read_rope(parameters, 10_000.0, max_position)
    part = parameters.get("partial_rotary_factor")
    pairs = int((1.0 if part is None else float(part)) * head_dim // 2)
    if not 0 <= 2 * pairs <= head_dim:
        raise ModelError(f"partial_rotary_factor {part} must be from 0 to 1")
    return Rope(
        read_factor(parameters, "rope_theta", 1_000_000.0),
        "proportional",
        read_factor(parameters, "factor", 1.0),
        rotated_dims=2 * pairs,
    )
