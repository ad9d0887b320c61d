"""The few facts about a model that are needed before `transformers` itself reads its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import ModelError
from paceline.core.media import MediaKind
from paceline.models.config.fields import Json

IMAGE_ARCHITECTURES = ("LlavaForConditionalGeneration",)
"""Architectures whose encoders of images run in `transformers`, too."""
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The `ModelFacts` of a model that runs in its own code."""

    architecture: str
    vocab_size: int
    """Number of token ids; 0 if config.json does not say it. After loading it is known."""
    max_position: int
    """Number of tokens of the longest context; 0 if config.json does not say it. After loading it is known."""
    dtype: str
    whole_media: frozenset[MediaKind] = frozenset()
    """Empty, because tokens of an image see only the tokens before them."""
    has_grids: bool = False
    bidirectional: bool = False
    only_pools: bool = False


def read_transformers(raw: Json, architecture: str) -> TransformersConfig:
    """Read the fields of a config.json of any family.

    Raises:
        ModelError: the weights are quantized, or have a dtype that no code here computes with.
    """
    text = _text_fields(raw)
    if text.get("quantization_config"):
        raise ModelError("quantized checkpoints need a native architecture (docs/architectures.md); use the bf16 one")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype} is not supported; supported are: {', '.join(_DTYPES)}")
    vocab_size, longest = text.get("vocab_size"), text.get("max_position_embeddings")
    return TransformersConfig(
        architecture=architecture,
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        max_position=longest if isinstance(longest, int) else 0,
        dtype=dtype,
    )


def image_row_size(raw: Json, architecture: str) -> int:
    """Return the elements of a row of an encoding; 0 if the model reads no images."""
    if architecture not in IMAGE_ARCHITECTURES:
        return 0
    # Older configs leave out what is the default of Llama and Mistral.
    return int(_text_fields(raw).get("hidden_size", 4096))


def _text_fields(raw: Json) -> Json:
    nested = raw.get("text_config")
    return {**raw, **nested} if isinstance(nested, Mapping) else raw
