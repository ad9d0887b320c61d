"""All that a model file and the engine know of a checkpoint. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["full", "sliding", "mamba"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one kind of layer. What is behind `factor` concerns kind "llama3" alone."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of Mamba-2 layers, whose heads share B and C."""

    heads: int
    head_dim: int
    state_size: int
    conv_taps: int
    """Inputs that one output of the convolution sees, its own included."""
    conv_bias: bool
    bias: bool
    """Of the projections."""

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.state_size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that a model file and the engine know of a checkpoint."""

    architecture: str
    """Class name in Hugging Face's `architectures`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    layer_types: tuple[LayerType, ...]
    """One a layer."""
    sliding_window: int
    """Tokens that a query of a sliding layer sees, itself included; 0 where no layer slides."""
    rope: Rope
    """Of full layers."""
    sliding_rope: Rope
    """Of sliding layers."""
    attention_scale: float
    attention_softcap: float
    """0 is off, as for `logit_softcap`."""
    logit_softcap: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position: int
    """Tokens of the longest context."""
    dtype: str
    """Of the checkpoint, as torch spells it: "bfloat16", "float16" or "float32"."""
    mamba: Mamba | None = None
    """Where there are layers of this type."""
    rotates: bool = True
    """Whether positions are in queries and keys at all."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what each block adds to the residual stream."""
    logits_divisor: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)
