"""Inputs of pooling: texts, pairs of texts and token ids become inputs for the workers. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.core.pooling import PoolTask

Content: TypeAlias = str | Sequence[int] | tuple[str, str]
"""A text, token ids, or a pair of texts, such as a query and a document."""
Side: TypeAlias = Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class TextInput:
    """One input, as a client sent it."""

    content: Content
    place: str
    """Field of the request's body, such as "input[3]", for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What to compute from the inputs of one request. None takes the model's own setting."""

    task: PoolTask = "embed"
    dimensions: int | None = None
    """Length to which vectors are cut before they are normalized."""
    normalize: bool | None = None
    """Whether vectors get the length 1."""
    activation: bool | None = None
    """Whether numbers of labels become probabilities."""
    prompt: str = ""
    """Text to put before each input, which is already looked up by its name; see `PoolingModel.prompt`."""
    truncate: Side | None = None
    """End at which inputs that are too long lose tokens; None refuses them."""
    max_tokens: int | None = None
    """Most tokens of an input, special tokens included; None is the limit of the model."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to texts. Token ids stay as they are."""
    priority: int | None = None
    """Priority of the request; lower is more urgent."""
    cache_salt: str = ""
