"""The configurations of encoders of text, whose tokens attend to each other. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.models.model_config import Rope

TextActivation: TypeAlias = Literal["gelu", "gelu_tanh", "silu"]
NormPlace: TypeAlias = Literal["after", "before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderConfig:
    """An encoder of text: BERT and its descendants."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    layers: int
    heads: int
    positions: int
    """Rows of the table of positions; 0 if there is none."""
    first_position: int
    """Row of the first token's position in this table."""
    types: int
    """Rows of the table of token types; 0 if there is none."""
    norm_eps: float
    activation: TextActivation
    gated: bool
    """Whether MLPs have a gate."""
    qkv_bias: bool
    attention_bias: bool
    """Whether the projection after attention has a bias."""
    inner_bias: bool
    """Whether the first layer of an MLP has a bias."""
    mlp_bias: bool
    """Whether the last layer of an MLP has a bias."""
    embedding_size: int = 0
    """Number of elements of an embedding, from which a layer makes a hidden state; 0 if it is one already."""
    distance_buckets: int = 0
    """Number of classes of distances between two tokens, of which each has a score for each head; 0 if there are none.
    """
    norm_bias: bool = True
    norms: NormPlace = "after"
    """Whether norms follow the sums of the residual stream, or precede attention and MLPs."""
    rope: Rope | None = None
    """The rotary embedding of layers that attend to all tokens; None if there is none."""
    local_rope: Rope | None = None
    """The rotary embedding of layers with a window."""
    window: int = 0
    """In layers with a window, a token attends to those fewer than this many positions before or after it."""
    local_layers: frozenset[int] = frozenset()
    """The layers with a window."""
    head_activation: TextActivation = "gelu"
    """Activation before the norm of a head with a norm."""
    head_bias: bool = False
    """Whether the first layer of such a head has a bias."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads
