"""The names that checkpoints give to the tensors of encoders whose norms follow the sums (`post_norm.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.models.base import Weights


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's parts, after the layer's own name. Several names in one place are parts of one matrix."""

    qkv: Sequence[str]
    """The projections to queries, keys and values: three names, or one for all."""
    output: str
    attention_norm: str
    inner: Sequence[str]
    """The first layer of the MLP: one name without a gate; with a gate, those of up and gate, or one for both."""
    down: str
    mlp_norm: str


@dataclass(frozen=True, slots=True)
class EncoderNames:
    embedding_norm: str
    layers: str
    layer: LayerNames


_BERT = EncoderNames(
    "embeddings.LayerNorm",
    "encoder.layer",
    LayerNames(
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output.dense",
        "attention.output.LayerNorm",
        ("intermediate.dense",),
        "output.dense",
        "output.LayerNorm",
    ),
)
_GATED = EncoderNames(
    "embeddings.LayerNorm",
    "layers",
    LayerNames(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.o_proj",
        "post_attention_layernorm",
        ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.down_proj",
        "post_mlp_layernorm",
    ),
)
_NOMIC = EncoderNames(
    "emb_ln",
    "encoder.layers",
    LayerNames(("attn.Wqkv",), "attn.out_proj", "norm1", ("mlp.fc11", "mlp.fc12"), "mlp.fc2", "norm2"),
)
_NEW = EncoderNames(
    "embeddings.LayerNorm",
    "encoder.layer",
    LayerNames(
        ("attention.qkv_proj",), "attention.o_proj", "attn_ln", ("mlp.up_gate_proj",), "mlp.down_proj", "mlp_ln"
    ),
)
_DISTILBERT = EncoderNames(
    "embeddings.LayerNorm",
    "transformer.layer",
    LayerNames(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out_lin",
        "sa_layer_norm",
        ("ffn.lin1",),
        "ffn.lin2",
        "output_layer_norm",
    ),
)
_MPNET = EncoderNames(
    "embeddings.LayerNorm",
    "encoder.layer",
    LayerNames(
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.attn.o",
        "attention.LayerNorm",
        ("intermediate.dense",),
        "output.dense",
        "output.LayerNorm",
    ),
)
_ALL: Mapping[str, Sequence[EncoderNames]] = {
    "nomic_bert": (_NOMIC, _GATED),
    "gte": (_NEW, _GATED),
    "new": (_NEW, _GATED),
    "distilbert": (_DISTILBERT,),
    "mpnet": (_MPNET,),
}
"""The names by `model_type`, first those of the models' authors, then those of transformers."""


def names_of(model_type: str, weights: Weights, place: str) -> EncoderNames:
    """Return the names that a checkpoint has.

    Args:
        place: what all names begin with.
    """
    known = _ALL.get(model_type, (_BERT,))
    return next((each for each in known if weights.has(f"{place}{each.layers}.0.{each.layer.output}.weight")), known[0])
