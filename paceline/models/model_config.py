"""The configuration of a model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.core.experts import ExpertActivation, Routing
from paceline.core.media import MediaKind

LayerType = Literal["full", "nope", "sliding", "mamba", "delta"]
"""The type of a layer. A layer without positions ("nope") attends to all tokens, like "full", but does not rotate
queries and keys.
"""
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one type of layer."""

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    """With "proportional", the first `rotated_dims` / 2 pairs of dimensions i and i + head_dim / 2 turn, as in a head
    that is rotated as a whole."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    """Factor of low frequencies. This field and `high_freq_factor` are for kind "llama3" only."""
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    """Longest context that the model was first trained on, for the kinds "llama3" and "yarn"."""
    rotated_dims: int = 0
    """Number of dimensions of a head that are rotated, from the first on. 0 means all dimensions; with "proportional"
    it means no dimensions.
    """
    interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 turn together, rather than i and i + rotated / 2."""
    beta_fast: float = 32.0
    """A pair of dimensions with at least this many turns in `original_max_position` tokens keeps its speed; "yarn"
    only.
    """
    beta_slow: float = 1.0
    """A pair with at most this many turns in `original_max_position` tokens is slowed down by `factor`; "yarn" only."""
    truncate: bool = True
    """Whether the pairs with `beta_fast` and `beta_slow` turns are rounded to whole numbers, for kind "yarn"."""
    attention_factor: float = 1.0
    """Factor by which rotated queries and keys are multiplied."""
    sections: tuple[int, int, int] | None = None
    """Pairs of dimensions that turn by a token's frame, row and column, if positions have three dimensions (M-RoPE).
    Pairs 0, 1, 2, 3, … turn by frame, row, column, frame, …; pairs after the last of a row or a column turn by frame.
    None if positions have one dimension."""
    query_growth: float = 0.0
    """A rotated query is multiplied by 1 + query_growth * log(1 + position // original_max_position)."""

    @property
    def longest_context(self) -> int:
        """Number of tokens of the longest context for which YaRN scales the angles; 0 if it does not scale them."""
        return int(self.factor * self.original_max_position) if self.kind == "yarn" else 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of attention over latent vectors, of which the keys and values of all heads are linear functions."""

    rank: int
    """Dimensions of a latent vector. A rotated key, which all heads share, is cached behind it."""
    query_rank: int
    """Dimensions of a vector from which the queries of all heads are computed; 0 if they are computed from the layer's
    input.
    """
    plain_dim: int
    """Dimensions of a head's query and key that are not rotated."""
    rotated_dim: int
    """Dimensions of a head's query and key that are rotated. They follow the dimensions that are not rotated."""
    value_dim: int
    """Number of dimensions of a head's value."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention in the layers of one type."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the products of queries and keys."""
    rope: Rope | None
    """Rotary embedding of queries and keys; None if they are not rotated."""
    window: int = 0
    """Number of tokens to which a query attends, itself included; 0 for all tokens before it."""
    bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    output_bias: bool = False
    gated: bool = False
    """Whether the projection to queries also gives a gate for each element of the result."""
    sinks: bool = False
    """Whether each head has a learned score that takes part in the softmax as if it were a key without a value."""
    looks_ahead: bool = False
    """Whether tokens of an image or a frame also attend to its later tokens. A window limits only earlier tokens. If
    the model is `bidirectional`, all tokens attend to later tokens.
    """
    both_sides: bool = False
    """Whether a window also limits later tokens, to as many as before the query."""
    latent: Latent | None = None
    """If given, heads attend to latent vectors as to one KV head, whose keys of size `head_dim` are values as well."""

    @property
    def rotary_dim(self) -> int:
        """Size of the vectors that are rotated. `rope` may leave a part of them unrotated."""
        return self.head_dim if self.latent is None else self.latent.rotated_dim


@dataclass(frozen=True, slots=True)
class Mamba:
    """Sizes of Mamba-2 layers. All heads share B and C."""

    heads: int
    head_dim: int
    state_size: int
    conv_taps: int
    """Number of inputs that one output of the convolution reads, its own input included."""
    conv_bias: bool
    bias: bool
    """Whether the projections have a bias."""

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner_size + 2 * self.state_size


class ModelFacts(Protocol):
    """The facts about a model that the engine needs, whatever code computes it."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def whole_media(self) -> frozenset[MediaKind]:
        """Kinds of media whose tokens attend to each other, so that one step must compute all tokens of a span."""

    @property
    def has_grids(self) -> bool:
        """Whether spans of media have a grid, because positions have three dimensions."""

    @property
    def bidirectional(self) -> bool:
        """Whether all tokens of a context see each other, so that one step must compute the whole context."""

    @property
    def only_pools(self) -> bool:
        """Whether the model has no next token: it gives vectors or labels only."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of layers with the gated delta rule."""

    heads: int
    """Number of heads that have a value and a state of their own."""
    key_heads: int
    """Number of heads that have a query and a key. Each of them serves heads / key_heads value heads."""
    key_dim: int
    value_dim: int
    conv_taps: int
    """Number of inputs that one output of the convolution reads, its own input included."""
    grouped: bool
    """Whether the checkpoint keeps the projections in two matrices, whose outputs are grouped by key head. Otherwise it
    keeps them in four matrices."""

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers with experts: many small MLPs, of which some compute each token."""

    count: int
    """Number of experts of a layer."""
    inner_size: int
    routing: Routing
    activation: ExpertActivation
    bias: bool = False
    """Whether the router and the matrices of experts have a bias."""
    shared_size: int = 0
    """Inner size of the shared expert, an MLP beside the experts that computes all tokens; 0 if there is none."""
    dense_layers: frozenset[int] = frozenset()
    """Indices of the layers that have an MLP instead of experts."""


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """The part of a config that only Gemma 4 has."""

    values_from_keys: tuple[LayerType, ...]
    """Types of layers that compute values from the projection to keys."""
    reader_intermediate_size: int
    """Width of the MLP in layers without KV of their own."""
    layer_input_size: int
    """Size of the per-layer embedding of a token; 0 if the model has none."""
    layer_input_vocab_size: int
    """Number of rows of the table of per-layer embeddings."""


@dataclass(frozen=True, slots=True)
class Assistant:
    """The part of a config for assistants: models that draft with the keys, values and hidden states of their
    target."""

    target_size: int
    """Number of elements of the target's hidden states."""
    centroids: int = 0
    """Number of clusters of tokens, which all have the same size; 0 if all tokens have logits."""
    best_centroids: int = 0
    """Number of clusters whose tokens get logits in a step."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model: all that its model file and the engine know of the checkpoint."""

    architecture: str
    """Class name in Hugging Face's `architectures`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    layer_types: tuple[LayerType, ...]
    """The type of each layer."""
    attention: Mapping[LayerType, AttentionConfig]
    """The attention of each type of layer that has one."""
    tie_word_embeddings: bool
    max_position: int
    """Number of tokens of the longest context."""
    dtype: str
    """dtype of the checkpoint, as torch spells it: "bfloat16", "float16" or "float32"."""
    mamba: Mamba | None = None
    """Sizes of the Mamba layers; None if there are none."""
    delta: DeltaNet | None = None
    """Sizes of the layers with the gated delta rule; None if there are none."""
    experts: Experts | None = None
    """Sizes of the layers with experts; None if there are none."""
    unused_layers: int = 0
    """Number of layers after the model's own that predict further tokens. They are not loaded."""
    gemma4: Gemma4Config | None = None
    assistant: Assistant | None = None
    """The part for assistants; None if the model does not read a target's keys and values."""
    kv_sources: Mapping[int, int] = field(default_factory=dict)
    """For each layer without KV of its own, the layer whose KV it reads."""
    deepstack_layers: int = 0
    """Number of layers, from the first, after which a further part of an encoding's row is added to a placeholder
    token (deepstack, https://arxiv.org/abs/2406.04334)."""
    bidirectional: bool = False
    """Whether all tokens of a context see each other, as in `ModelFacts`."""
    has_head: bool = True
    """Whether the checkpoint has a head that gives logits of the next token. Other checkpoints only pool."""
    mlp_bias: bool = False
    logit_softcap: float = 0.0
    """Bound of logits: they become bound * tanh(logits / bound); 0 is off."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on the results of attention, mixers and MLPs before they are added to the residual stream."""
    logits_divisor: float = 1.0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in place of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def whole_media(self) -> frozenset[MediaKind]:
        """Kinds of media whose spans one step must compute whole, as in `ModelFacts`."""
        looks_ahead = not self.bidirectional and any(each.looks_ahead for each in self.attention.values())
        return frozenset({MediaKind.IMAGE, MediaKind.VIDEO_FRAME} if looks_ahead else ())

    @property
    def only_pools(self) -> bool:
        """Whether the model has no next token, as in `ModelFacts`."""
        return self.bidirectional or not self.has_head

    @property
    def has_grids(self) -> bool:
        """Whether spans of media have a grid, as in `ModelFacts`."""
        return any(
            attention.rope is not None and attention.rope.sections is not None for attention in self.attention.values()
        )

    @property
    def encoding_size(self) -> int:
        """Number of elements of a row of an encoding: one part in place of the embedding, and one part for each
        deepstack layer.
        """
        return self.hidden_size * (1 + self.deepstack_layers)

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def storing_layers(self) -> int:
        """Number of layers up to the last one with KV or a state of its own."""
        return 1 + max(layer for layer in range(self.num_layers) if layer not in self.kv_sources)
