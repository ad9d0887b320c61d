"""Readers of config.json for encoders of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields, NotNativeError
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
    config = bert(fields.with_defaults(layer_norm_eps=1e-12))
    return replace(config, first_position=fields.count("pad_token_id", 1) + 1)


def _heads(fields: Fields) -> int:
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads or hidden // heads % 2:
        raise ModelError(f"hidden_size {hidden} cannot be divided into {heads} heads of even size")
    return heads


def read_activation(fields: Fields, name: str, default: str) -> TextActivation:
    value = fields.get(name, default)
    if value not in _ACTIVATIONS:
        raise NotNativeError(f"{name} {value!r:.80} is not supported; supported are: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


TEXT_ENCODERS: Mapping[str, Callable[[Fields], TextEncoderConfig]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm-roberta": roberta,
    "camembert": roberta,
}
"""The readers by `model_type`."""
