"""What a checkpoint says about vectors, scores and labels: how hidden states are pooled, and what follows. Imports no
torch; gateways and workers read the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import PoolTask

Pooling: TypeAlias = Literal["cls", "mean", "last", "max", "mean_sqrt_len", "weightedmean"]
"""A way to make one vector of the hidden states of an input.

cls: the first. last: the last. mean, max: of each element. mean_sqrt_len: the sum over the square root of their number.
weightedmean: the mean with the weights 1, 2, 3, ... in order of position.
"""
HeadActivation: TypeAlias = Literal["none", "tanh", "relu", "gelu", "silu", "sigmoid"]
ScoreActivation: TypeAlias = Literal["none", "sigmoid", "softmax"]


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer over vectors, whose weights are in a folder of their own."""

    folder: str
    """Folder inside the model's folder."""
    size_in: int
    size_out: int
    bias: bool
    activation: HeadActivation
    residual: bool
    """Whether the input is added to the result; through a matrix without bias if the sizes differ."""


@dataclass(frozen=True, slots=True)
class NormModule:
    """A layer norm over vectors, whose weights are in a folder of their own."""

    folder: str
    size: int


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """Gives each vector the length 1."""


HeadModule: TypeAlias = DenseModule | NormModule | NormalizeModule


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How a model makes vectors, scores or labels from hidden states."""

    architecture: str
    is_encoder: bool
    """Whether pool workers compute the model, without KV blocks. Prefill workers compute the others."""
    tasks: frozenset[PoolTask]
    hidden_size: int
    dim: int
    """Number of elements of an embedding, before it is cut."""
    max_tokens: int
    """Largest number of tokens of an input, special tokens included."""
    attention: Literal["full", "causal"]
    """Whether a token attends to all tokens of its input, or to those before it."""
    generates: bool = False
    """Whether the model also generates text."""
    pooling: tuple[Pooling, ...] = ()
    """Several results are concatenated."""
    include_prompt: bool = True
    """Whether the tokens of a prompt take part in pooling."""
    modules: tuple[HeadModule, ...] = ()
    """What follows after pooling, in order."""
    token_modules: tuple[HeadModule, ...] = ()
    """What follows for vectors of tokens, in order."""
    kept_ids: frozenset[int] = frozenset()
    """If not empty: the only token ids whose vectors a document has, such as those of an image's parts."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before an input, by name."""
    default_prompt_name: str | None = None
    lower_case: bool = False
    """Whether texts become lower case before they are tokenized."""
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "none"
    """What makes probabilities of the numbers of labels."""
    score_tokens: tuple[int, int | None] | None = None
    """For causal models that rank: the score is the logit of the first token at the end of the input, less that of the
    second if there is one.
    """
    similarity: str = "cosine"
    matryoshka_dimensions: tuple[int, ...] = ()
    """Lengths to which embeddings may be cut."""
    any_dimensions: bool = False
    """Whether embeddings may be cut to any length."""
    dense_tokens: bool = False
    """Whether one pass also gives sparse weights and vectors of tokens, by two linear layers (bge-m3)."""
    keeps_first_token: bool = True
    """Whether the first token has a vector among those of tokens."""
    unweighted_ids: frozenset[int] = frozenset()
    """Token ids that have no sparse weight, such as those of special tokens."""

    @property
    def normalizes(self) -> bool:
        """Whether embeddings have the length 1."""
        return any(isinstance(module, NormalizeModule) for module in self.modules)

    def check_dimensions(self, dimensions: int, place: str = "dimensions") -> None:
        """Raise InvalidRequestError if embeddings cannot be cut to this length.

        Args:
            place: the name of the field, for the message.
        """
        if dimensions == self.dim or dimensions in self.matryoshka_dimensions:
            return
        if self.any_dimensions and 0 < dimensions <= self.dim:
            return
        if self.any_dimensions:
            allowed = f"from 1 to {self.dim}"
        else:
            allowed = " or ".join(map(str, sorted({self.dim, *self.matryoshka_dimensions})))
        raise InvalidRequestError(f"{place} must be {allowed} for this model, not {dimensions}", place)
