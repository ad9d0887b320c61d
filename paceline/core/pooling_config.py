"""What a checkpoint says about vectors, scores and labels: how hidden states are pooled, and what follows. Imports no
torch; gateways and workers read the same values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import PoolRole, PoolTask

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
    """Folder inside the model's folder; "" if the weights are among the model's own."""
    size_in: int
    size_out: int
    bias: bool | None
    """Whether the layer has a bias; None if the weights say so."""
    activation: HeadActivation
    residual: bool
    """Whether the input is added to the result; through a matrix without bias if the sizes differ."""
    name: str = "linear"
    """Name of the layer's tensors, without `.weight`."""


@dataclass(frozen=True, slots=True)
class NormModule:
    """A layer norm over vectors, whose weights are in a folder of their own."""

    folder: str
    size: int


@dataclass(frozen=True, slots=True)
class NormalizeModule:
    """Gives each vector the length 1."""


HeadModule: TypeAlias = DenseModule | NormModule | NormalizeModule


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Tokens that follow a query up to a length. Each has a vector, by which the model adds words to the query."""

    token_id: int
    length: int
    """Number of tokens of a query that has these tokens."""
    attends: bool
    """Whether other tokens attend to them."""
    is_limit: bool
    """Whether queries may have no more tokens."""


@dataclass(frozen=True, slots=True)
class SpladeHead:
    """How weights of words are made of the logits of tokens: the sum or the largest of log(1 + relu(logit))."""

    pooling: Literal["max", "sum"]
    logs: int
    """Number of logarithms: 1, or 2 for log(1 + log(1 + relu(logit)))."""


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
    """If not empty: the only token ids whose vectors a document has, such as those of an image's parts. Of labels of
    tokens, the only ids whose labels an input has.
    """
    skipped_ids: frozenset[int] = frozenset()
    """Token ids that have no vectors, such as those of punctuation."""
    skipping_roles: frozenset[PoolRole] = frozenset({"document"})
    """The inputs to which `skipped_ids` applies."""
    expansion: QueryExpansion | None = None
    marker_ids: Mapping[PoolRole, int] = field(default_factory=dict)
    """The token that says what an input is. It stands after the first special token."""
    lengths: Mapping[PoolRole, int] = field(default_factory=dict)
    """Largest numbers of tokens of queries and of documents, if they are smaller than `max_tokens`."""
    query_suffix: str = ""
    """Text to put after each query."""
    image_prompt: str = ""
    """The prompt for an image alone, with the model's marker in the image's place; "" if it is the chat template's."""
    is_static: bool = False
    """Whether hidden states are rows of a table."""
    special_tokens: bool = True
    """Whether the tokenizer may add its special tokens to texts."""
    dropped_ids: frozenset[int] = frozenset()
    """Token ids of texts that the model does not get."""
    splade: SpladeHead | None = None
    """How a model whose logits are weights of words makes sparse vectors; None if it does not."""
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

    def limit(self, role: PoolRole | None) -> int:
        """Return the largest number of tokens of an input, special tokens included."""
        return min(self.max_tokens, self.lengths.get(role or "document", self.max_tokens))

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
