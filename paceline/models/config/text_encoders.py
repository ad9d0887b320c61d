"""Readers of config.json for encoders of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import (
    LAYER_TYPES,
    Fields,
    Json,
    NotNativeError,
    read_factor,
    read_layer_types,
    read_rope,
)
from paceline.models.model_config import Rope
from paceline.models.text_encoder_config import TextActivation, TextEncoderConfig

_ACTIVATIONS: Mapping[str, TextActivation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def bert(fields: Fields) -> TextEncoderConfig:
    """BERT, and what has its layers."""
    if fields.get("position_embedding_type", "absolute") != "absolute":
        raise NotNativeError(f"position_embedding_type {fields.raw['position_embedding_type']!r:.80} is not supported")
    if fields.flag("is_decoder", False) or fields.flag("add_cross_attention", False):
        raise NotNativeError("an encoder that is used as a decoder is not supported")
    return TextEncoderConfig(
        model_type=str(fields.get("model_type", "")),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        inner_size=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=_heads(fields),
        positions=fields.size("max_position_embeddings"),
        first_position=0,
        types=fields.count("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=read_activation(fields, "hidden_act", "gelu"),
        gated=False,
        qkv_bias=True,
        attention_bias=True,
        inner_bias=True,
        mlp_bias=True,
    )


def roberta(fields: Fields) -> TextEncoderConfig:
    """RoBERTa, XLM-R and CamemBERT: BERT, with positions that begin after the id of the padding token."""
    config = bert(fields)
    return replace(config, first_position=fields.count("pad_token_id", 1) + 1)


def distilbert(fields: Fields) -> TextEncoderConfig:
    """DistilBERT: BERT without types of tokens, and with names of its own in config.json."""
    same = fields.changed(
        hidden_size=fields.size("dim", 768),
        intermediate_size=fields.size("hidden_dim", 3072),
        num_hidden_layers=fields.size("n_layers", 6),
        num_attention_heads=fields.size("n_heads", 12),
        hidden_act=fields.get("activation", "gelu"),
        type_vocab_size=0,
    )
    return replace(bert(same.with_defaults(max_position_embeddings=512)), norm_eps=1e-12)


def electra(fields: Fields) -> TextEncoderConfig:
    """ELECTRA: BERT, whose embeddings may be smaller than its hidden states."""
    config = bert(fields)
    return replace(config, embedding_size=fields.size("embedding_size", config.hidden_size))


def mpnet(fields: Fields) -> TextEncoderConfig:
    """MPNet: RoBERTa, with scores that depend on the distance of two tokens."""
    if (buckets := fields.size("relative_attention_num_buckets", 32)) != 32:
        raise NotNativeError(f"relative_attention_num_buckets must be 32, not {buckets}")
    return replace(roberta(fields.changed(type_vocab_size=0)), distance_buckets=buckets)


def nomic_bert(fields: Fields) -> TextEncoderConfig:
    """NomicBert, in the fields of its authors or in those of transformers."""
    if fields.raw.get("n_embd") is None:
        return _rotary(fields, "silu", fields.rope(1000.0, fields.size("max_position_embeddings")))
    known: Json = {
        "prenorm": False,
        "parallel_block": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "moe_every_n_layers": 0,
        "use_rms_norm": False,
        "causal": False,
    }
    for name, value in known.items():
        if fields.raw.get(name, value) not in (value, None):
            raise NotNativeError(f"{name} {fields.raw[name]!r:.80} is not supported")
    gated = {"swiglu": "silu", "geglu": "gelu"}
    activation = fields.get("activation_function", "swiglu")
    if activation not in gated:
        raise NotNativeError(f"activation_function {activation!r:.80} is not supported; supported are: swiglu, geglu")
    same = fields.changed(
        hidden_size=fields.size("n_embd"),
        num_hidden_layers=fields.size("n_layer"),
        num_attention_heads=fields.size("n_head"),
        intermediate_size=fields.size("n_inner"),
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-12),
        hidden_act=gated[activation],
    )
    config = _rotary(same, "silu", Rope(fields.positive("rotary_emb_base", 10000.0)))
    return replace(
        config,
        qkv_bias=fields.flag("qkv_proj_bias", False),
        attention_bias=fields.flag("qkv_proj_bias", False),
        inner_bias=fields.flag("mlp_fc1_bias", False),
        mlp_bias=fields.flag("mlp_fc2_bias", False),
    )


def gte(fields: Fields) -> TextEncoderConfig:
    """GTE ("new"), in the fields of its authors or in those of transformers."""
    if fields.get("position_embedding_type", "rope") != "rope":
        raise NotNativeError(f"position_embedding_type {fields.raw['position_embedding_type']!r:.80} is not supported")
    if fields.flag("logn_attention_scale", False) or fields.get("layer_norm_type", "layer_norm") != "layer_norm":
        raise NotNativeError("logn_attention_scale and norms of another type than layer_norm are not supported")
    most = fields.size("max_position_embeddings")
    config = _rotary(fields, "gelu", _fixed_ntk(fields) or fields.rope(160000.0, most))
    return replace(config, qkv_bias=True, attention_bias=True, mlp_bias=True)


def _fixed_ntk(fields: Fields) -> Rope | None:
    """Return a rotary embedding that is stretched by a constant (rope type "ntk"); None if it has another type."""
    scaling = fields.raw.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type") != "ntk" or scaling.get("mixed_b") is not None:
        return None
    factor, dims = read_factor(scaling, "factor"), fields.size("hidden_size") // _heads(fields)
    return Rope(fields.positive("rope_theta", 10000.0) * factor, "linear", factor ** (2 / dims))


def _rotary(fields: Fields, activation: str, rope: Rope) -> TextEncoderConfig:
    """Return an encoder like BERT with a rotary embedding, MLPs with a gate, and no biases."""
    config = bert(fields.with_defaults(hidden_act=activation, max_position_embeddings=1, position_embedding_type=None))
    config = replace(config, qkv_bias=False, attention_bias=False, inner_bias=False, mlp_bias=False)
    return replace(config, positions=0, gated=True, rope=rope)


def modernbert(fields: Fields) -> TextEncoderConfig:
    layers = fields.size("num_hidden_layers")
    every = fields.size("global_attn_every_n_layers", 3)
    types = fields.get("layer_types", None) or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    local = frozenset(
        layer for layer, kind in enumerate(read_layer_types(types, LAYER_TYPES, layers)) if kind == "sliding"
    )
    most, bias = fields.size("max_position_embeddings"), fields.flag("attention_bias", False)
    ropes = fields.raw.get("rope_parameters") or {}
    theta = fields.positive("global_rope_theta", 160000.0)
    thetas = {"full_attention": theta, "sliding_attention": fields.positive("local_rope_theta", 10000.0)}
    if fields.raw.get("local_rope_theta", 0) is None:
        thetas["sliding_attention"] = theta
    rope, local_rope = (read_rope(ropes.get(kind) or {}, thetas[kind], most) for kind in thetas)
    return TextEncoderConfig(
        model_type="modernbert",
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        inner_size=fields.size("intermediate_size"),
        layers=layers,
        heads=_heads(fields),
        positions=0,
        first_position=0,
        types=0,
        norm_eps=fields.number("norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_activation", "gelu"),
        gated=True,
        qkv_bias=bias,
        attention_bias=bias,
        inner_bias=fields.flag("mlp_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_bias=fields.flag("norm_bias", False),
        norms="before",
        rope=rope,
        local_rope=local_rope,
        window=fields.size("local_attention", 128) // 2 + 1,
        local_layers=local,
        head_activation=read_activation(fields, "classifier_activation", "gelu"),
        head_bias=fields.flag("classifier_bias", False),
    )


def _heads(fields: Fields) -> int:
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads or hidden // heads % 2:
        raise ModelError(f"hidden_size {hidden} cannot be divided into {heads} heads of even size")
    return heads


def read_activation(fields: Fields, name: str, default: str) -> TextActivation:
    value = fields.get(name, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise NotNativeError(f"{name} {value!r:.80} is not supported; supported are: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


TEXT_ENCODERS: Mapping[str, Callable[[Fields], TextEncoderConfig]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
    "nomic_bert": nomic_bert,
    "gte": gte,
    "new": gte,
    "modernbert": modernbert,
    "distilbert": distilbert,
    "electra": electra,
    "mpnet": mpnet,
}
"""The readers by `model_type`."""
